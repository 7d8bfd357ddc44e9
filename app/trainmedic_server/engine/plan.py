"""The next instruction of a run.

All state is in the run, so a restart just continues from the store.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime

from msgspec.structs import replace

from trainmedic_core import duration
from trainmedic_server.domain.event_kinds import Closed, StepResumed
from trainmedic_server.domain.playbook import APPROVAL, CHECK
from trainmedic_server.domain.run import Decision, OrderKind, Run, Status, StepState, StepStatus
from trainmedic_server.engine import (
    after_resolve,
    approval_steps,
    group_plan,
    preview,
    step_sequence,
    steps,
    undoing,
    windows,
)
from trainmedic_server.engine.plan_values import (
    CALLED_OFF,
    AttemptOutcome,
    Idle,
    Instruction,
    OutsideState,
    PerformAttempt,
    PlanningContext,
    RunDraft,
    RunPlan,
    Wait,
)
from trainmedic_server.engine.rollout import RolloutOver
from trainmedic_server.ports.playbooks import CompiledPlaybook, Scope


def advance(draft: RunDraft) -> RunPlan:
    """Plan up to the next instruction."""
    then: Instruction | None = _advance_open(draft) if draft.run.is_open else None
    if then is None:
        then = undoing.next_undo(draft)
    elif isinstance(then, Wait) and draft.run.waiting_on == "resume":
        then = undoing.next_undo_while_paused(draft, then)
    return draft.plan(then)


def conclude_and_advance(draft: RunDraft, act: PerformAttempt, outcome: AttemptOutcome) -> RunPlan:
    """Record the outcome, or remove a `CALLED_OFF` attempt."""
    if outcome is not CALLED_OFF:
        (undoing if act.undo else steps).apply_outcome(draft, act.key, outcome)
    elif not act.resumed:  # otherwise a killed server may have made it
        steps.take_back_attempt(draft, act.key)
    _close_if_refused(draft)
    return advance(draft)


def is_called_off(draft: RunDraft, act: PerformAttempt) -> bool:
    """Return whether a new plan would differ from the persisted attempt."""
    then = conclude_and_advance(draft, act, CALLED_OFF).then
    return not isinstance(then, PerformAttempt) or (then.key, then.undo) != (act.key, act.undo)


def cancel_or_not_start(draft: RunDraft, reason: str, decision: Decision) -> RunPlan:
    """Close a run that must not act: not started if it never acted, otherwise cancelled. The next plan starts pending
    undos.
    """
    _mark_interrupted_unknown(draft, f"not asked again, because {reason}")
    _cancel_or_not_start(draft, reason, decision)
    return draft.plan(Idle())


def fail_unreadable(draft: RunDraft, reason: str) -> RunPlan:
    """Close a run whose playbook is unreadable. The next plan starts pending undos."""
    _mark_interrupted_unknown(draft, f"the run cannot continue: {reason}")
    _close(draft, Status.FAILED, _with_refusal(draft.run, [reason]))
    return draft.plan(Idle())


def why_stale(draft: RunDraft) -> str | None:
    """Return why a run delayed before its first act must no longer act, or None."""
    if draft.outside.resolved:
        return "the alert resolved before the run could act"
    age, max_age = draft.now - newest_beginning(draft.run, draft.outside, draft.context), draft.context.max_age
    if age > max_age:
        return f"the alert began {duration.write_rounded(age)} ago, over the maximum age of {duration.write(max_age)}"
    return None


def newest_beginning(run: Run, outside: OutsideState, context: PlanningContext) -> datetime:
    """Return the time from which the maximum age counts."""
    began = [record.alert.starts_at for record in outside.alerts if not record.is_resolved]
    has_windows = context.playbook is not None and bool(context.playbook.definition.windows)
    # Such runs may begin long after their alert. A member counts from its batch.
    counts_from_creation = run.started_by or run.repeats or run.parent or has_windows
    return max([*began, run.created_at] if counts_from_creation else began, default=run.created_at)


def has_begun(run: Run) -> bool:
    """Return whether the run has done more than wait for its turn or target."""
    return (
        run.acted_at is not None
        or run.waiting_on in (group_plan.MEMBERS, windows.WINDOW)
        or any(step.status is not StepStatus.PENDING for step in run.steps)
    )


def is_under_way(draft: RunDraft) -> bool:
    """Return whether the run or one of its members has begun."""
    return has_begun(draft.run) or (draft.run.is_group and group_plan.has_begun(draft.run, draft.group))


_WHY_NOT_OBSERVED = {
    CHECK: "is for the time after a batch",
    "on_success": "is for a run that succeeds",
    "on_failure": "is for a run that fails",
}


def observe(run: Run, playbook: CompiledPlaybook, names: Scope) -> Run:
    """Close a run with the preview of its steps."""

    def observed(state: StepState) -> StepState:
        if why := step_sequence.why_without_target(run, state):
            return replace(state, status=StepStatus.SKIPPED, message=why)
        if state.phase == "steps":
            return preview.observed(state, playbook, names)
        message = _WHY_NOT_OBSERVED[state.phase]
        return replace(state, status=StepStatus.SKIPPED, message=message)

    return replace(run, status=Status.OBSERVED, steps=tuple(map(observed, run.steps)))


def _advance_open(draft: RunDraft) -> Instruction | None:
    interrupted = steps.interrupted(draft.run)
    if interrupted is not None:
        then = _continue_attempt(draft, interrupted)
        if then is not None:
            return then
    order = draft.outside.last(OrderKind.CANCEL, OrderKind.UNDO)  # an undo of an open run ends it first
    if order is not None and not approval_steps.is_rejected(draft):  # a rejection takes precedence
        last = group_plan.wait_for_last(draft)
        if last is not None:
            return last
        message = f"cancelled by {order.actor}"
        if draft.group is not None and draft.group.begun:
            message = f"{message}; {draft.group.counts}"
        _close(draft, Status.CANCELLED, _with_refusal(draft.run, [message]))
        return None
    # An alert may have grown stale during a pause before the first act. A group is under way once a member has begun.
    was_held = draft.run.waiting_on == "resume" and not draft.outside.paused and draft.run.acted_at is None
    if not draft.run.is_limited and ((was_held and not draft.run.is_group) or not is_under_way(draft)):
        reason = why_stale(draft)
        if reason:
            _cancel_or_not_start(draft, reason, Decision.STALE)
            return None
    while draft.run.is_open:
        ahead = _proceed(draft)
        if ahead is not None:
            return ahead
    return None


def _proceed(draft: RunDraft) -> Instruction | None:
    """Work on the next step, or close the run. None if it was closed or this must be repeated."""
    broken = step_sequence.failed_step(draft.run, draft.playbook)
    if broken is not None and broken.status is StepStatus.REJECTED:
        _close(draft, Status.REJECTED, group_plan.why_ended(draft, broken, broken.why_not))
        return None
    if broken is not None and broken.status is StepStatus.CANCELLED:
        if draft.run.acted_at is None:
            draft.run = replace(draft.run, decision=Decision.STALE)
        _close(draft, Status.CANCELLED, broken.why_not)
        return None
    state = step_sequence.next_step(draft.run, draft.playbook, broken)
    error = None
    if draft.run.is_limited and state is None:
        _close(draft, Status.NOT_STARTED, _with_refusal(draft.run, _failures(draft.run)), draft.run.decision)
        return None
    # After the approval, a group's members come before its parent's other steps.
    if draft.group is not None and broken is None and (state is None or state.phase != APPROVAL):
        if draft.group.refused:
            _cancel_or_not_start(draft, draft.group.refused, Decision.BREAKER_OPEN)
            return None
        outside = windows.why_outside(draft.playbook.definition.windows, draft.now)
        if outside is not None and not draft.group.begun:
            _cancel_or_not_start(draft, outside, Decision.OUTSIDE_WINDOW)
            return None
        ahead = group_plan.proceed(draft)
        if isinstance(ahead, StepState):
            state = ahead
        elif isinstance(ahead, RolloutOver):
            error = ahead.error or None
            state = step_sequence.next_step(draft.run, draft.playbook, error)
        else:
            return ahead
    if state is not None:
        then = steps.proceed(draft, state)
        _close_if_refused(draft)
        return then
    if error is not None:
        _close(draft, Status.FAILED, error)
    elif draft.run.is_group and broken is None:
        status, message, decision = group_plan.outcome(draft)
        draft.run = replace(draft.run, decision=decision or draft.run.decision)
        _close(draft, status, message, decision)
    elif broken is None:
        _close(draft, Status.SUCCEEDED, _summary(draft.run))
    else:
        _close(draft, Status.FAILED, group_plan.why_ended(draft, broken, f"step {broken.id}: {broken.why_not}"))
    return None


def _continue_attempt(draft: RunDraft, interrupted: StepState) -> PerformAttempt | Wait | None:
    """Repeat an attempt that a killed server may have made, under the same command ID; wait during a pause.

    None if it must not be repeated: its outcome stays unknown.
    """
    attempt = interrupted.attempts[-1]
    order = draft.outside.last(OrderKind.CANCEL, OrderKind.UNDO)
    if steps.is_held_by_pause(draft, interrupted):
        if order is None and not draft.outside.resolved:
            return draft.suspend_until_resumed()
        over = f"{order.actor} ended the run" if order is not None else "the alert resolved"
        _mark_interrupted_unknown(draft, f"not asked again, because the server was paused and {over}")
        return None
    if draft.run.waiting_on == "resume" and draft.now - attempt.started_at > draft.context.max_age:
        _mark_interrupted_unknown(draft, "not asked again, because the server was paused for too long")
        return None
    if attempt.deadline <= draft.now or attempt.started_at > draft.now:
        # It timed out while no server was up, or began before the clock was set back.
        later = replace(attempt, deadline=draft.now + (attempt.deadline - attempt.started_at))
        draft.put(replace(interrupted, attempts=(*interrupted.attempts[:-1], later)))
    draft.set_status(Status.RUNNING)
    draft.add_event(StepResumed(interrupted.id, interrupted.action, attempt.command_id))
    return PerformAttempt(interrupted.key, resumed=True)


def _mark_interrupted_unknown(draft: RunDraft, reason: str) -> None:
    interrupted = steps.interrupted(draft.run)
    if interrupted is not None:
        steps.mark_outcome_unknown(draft, interrupted, f"it may have been applied; {reason}")


def _cancel_or_not_start(draft: RunDraft, reason: str, decision: Decision) -> None:
    status = Status.NOT_STARTED if draft.run.acted_at is None else Status.CANCELLED
    draft.run = replace(draft.run, decision=decision)
    _close(draft, status, reason, decision)


def _close_if_refused(draft: RunDraft) -> None:
    if draft.refused is not None:
        decision, reason = draft.refused
        _cancel_or_not_start(draft, reason, decision)


def _close(draft: RunDraft, status: Status, message: str, decision: Decision | None = None) -> None:
    unused = StepStatus.CANCELLED if status is Status.CANCELLED else StepStatus.SKIPPED
    for state in draft.run.steps:
        if not state.status.is_final:
            ended = replace(state, status=unused, ended_at=draft.now if state.started_at else None)
            draft.put(steps.keep_or_drop_undo(ended))
    draft.run = replace(draft.run, status=status, ended_at=draft.now, waiting_on=None, message=message)
    draft.run = undoing.with_undos_of_closed(draft.run, draft.context.actions)
    draft.add_event(Closed(status, message, decision))


def _with_refusal(run: Run, reasons: Sequence[str]) -> str:  # a refusal by ``max_runs`` comes first
    return "; ".join([run.message, *reasons] if run.is_limited else reasons)


def _summary(run: Run) -> str:
    failed = _failures(run)
    not_begun = [step.id for step in after_resolve.prevented_steps(run) if not step.attempts]
    if not_begun:
        failed.append(f"the alert resolved before {', '.join(not_begun)} began")
    done = f"applied {run.action_taken}" if run.action_taken else "nothing was applied"
    if not failed:
        return done if run.action_taken else "nothing had to be done"
    return "; ".join([done, *failed])


def _failures(run: Run) -> list[str]:
    return [
        f"step {step.id}: {step.error or step.message}"
        for step in run.steps
        if step.kind == "action" and (step.error or (step.status is StepStatus.SKIPPED and step.attempts))  # not set up
    ]
