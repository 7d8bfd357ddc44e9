"""Permitted actions of a run after its alert has resolved.

A changing step of a run with an alert starts only while one fires, with few exceptions (`is_unwanted`).
``undoing`` plans what is undone then.
"""

from __future__ import annotations

from collections.abc import Iterator

from trainmedic_server.domain.alert import decisive
from trainmedic_server.domain.event_kinds import StepSkipped
from trainmedic_server.domain.run import Run, StepState, StepStatus
from trainmedic_server.engine.plan_values import RunDraft
from trainmedic_server.engine.step_sequence import step_definition, tolerates_timeout
from trainmedic_server.ports.playbooks import CompiledPlaybook

NOT_BEGUN = "the alert resolved before it began"  # message of skipped steps, by which `prevented_steps` finds them


def is_unwanted(draft: RunDraft, state: StepState) -> bool:
    """Return whether the step must not start, because all alerts of the run resolved."""
    if not is_resolved(draft) or state.action is None:
        return False
    action = draft.context.actions.action_class(state.action)
    if action is None or not action.harmful or getattr(action, "gives_back", False):
        return False
    return not is_behind_wait(draft.run, draft.playbook, state) and not may_be_silenced(draft)


def is_behind_wait(run: Run, playbook: CompiledPlaybook, state: StepState) -> bool:
    """Return whether a ``wait_for: resolved`` before the step succeeded.

    A wait with ``on_timeout: continue`` counts only if no other wait follows.
    """
    before = [wait for wait in _waits(run) if _position(run, wait) < _position(run, state)]
    ended = [wait for wait in before if wait.status is StepStatus.SUCCEEDED]
    if any(not tolerates_timeout(step_definition(playbook, wait)) for wait in ended):
        return True
    return bool(ended) and next_wait(run, state) is None


def next_wait(run: Run, state: StepState) -> StepState | None:
    later = (wait for wait in _waits(run) if _position(run, wait) > _position(run, state))
    return next((wait for wait in later if _follows(wait, state)), None)


def may_be_silenced(draft: RunDraft) -> bool:
    """Return whether a step may have ended the alert by stopping its source (``ActionTraits.silences``)."""
    resolved_at = max(
        (record.resolved_at for record in decisive(draft.outside.alerts) if record.resolved_at), default=None
    )
    if resolved_at is None:
        return False
    for state in draft.run.steps:
        action = draft.context.actions.action_class(state.action or "")
        kinds = {target.kind for target in draft.run.targets_of(state)}
        if not kinds.intersection(getattr(action, "silences", ())):
            continue
        # Includes steps to be retried: the first attempt may have silenced the alert.
        carried_out = [attempt for attempt in state.attempts if attempt.status in ("applied", "unknown")]
        if carried_out and state.attempts[0].started_at <= resolved_at:
            return True
    return False


def skip_to_wait(draft: RunDraft, first: StepState) -> None:
    """Skip the pending steps from `first` to the next ``wait_for: resolved``, or all.

    In ``on_failure`` only `first`: later steps report the failure.
    """
    wait = next_wait(draft.run, first)
    end = len(draft.run.steps) if wait is None else _position(draft.run, wait)
    skipped = draft.run.steps[_position(draft.run, first) : end] if first.phase != "on_failure" else (first,)
    for state in skipped:
        if state.status is StepStatus.PENDING and _follows(state, first):
            draft.end(state, StepStatus.SKIPPED, message=NOT_BEGUN)
            draft.add_event(StepSkipped(state.id, why=NOT_BEGUN))


def prevented_steps(run: Run) -> Iterator[StepState]:
    """Yield steps that the end of the alert prevented or stopped."""
    for state in run.steps:
        if state.message == NOT_BEGUN or (state.kind == "action" and state.status is StepStatus.CANCELLED):
            yield state


def is_moot(draft: RunDraft, state: StepState) -> bool:
    """Return whether the end of the alerts ends an approval or wait: what it is for would not start any more."""
    if not is_resolved(draft) or may_be_silenced(draft):
        return False
    return not is_behind_wait(draft.run, draft.playbook, state)


def is_resolved(draft: RunDraft) -> bool:
    return draft.outside.is_over


def _waits(run: Run) -> list[StepState]:
    return [state for state in run.steps if state.kind == "wait_for"]


def _position(run: Run, state: StepState) -> int:
    return next(position for position, each in enumerate(run.steps) if each.key == state.key)


def _follows(later: StepState, state: StepState) -> bool:  # in a run that has not failed
    return later.phase == state.phase or (later.phase == "on_success" and state.phase != "on_failure")
