"""Progress of one step: start, wait, retry, end."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import timedelta
from typing import Any

from msgspec.structs import replace

from trainmedic_core import errors
from trainmedic_server.domain import event_kinds as kinds
from trainmedic_server.domain import wait_events
from trainmedic_server.domain.playbook import (
    FREE_WAITS,
    ActionStep,
    ApproveStep,
    OwnUndo,
    UndoTrigger,
    WaitStep,
)
from trainmedic_server.domain.run import (
    Attempt,
    Decision,
    Run,
    Status,
    StepState,
    StepStatus,
    Undo,
    UndoStatus,
)
from trainmedic_server.engine import after_resolve, approval_steps, waits, windows
from trainmedic_server.engine.looking import Look
from trainmedic_server.engine.plan_values import (
    AttemptOutcome,
    PerformAttempt,
    RunDraft,
    TakeTarget,
    Wait,
)
from trainmedic_server.engine.step_sequence import step_definition, why_without_target
from trainmedic_server.engine.turns import TURN
from trainmedic_server.ports.actions import ON_RECORD, Action, Actions
from trainmedic_server.ports.playbooks import Step

# Attempts of a step that is stopped each time an alert resolves, and repeated when it fires again.
MOST_STOPPED_ATTEMPTS = 20


def proceed(draft: RunDraft, state: StepState) -> PerformAttempt | Wait | Look | TakeTarget | None:
    """Advance the first step that is not final. Return its next act.

    None once it is final, or if the run must not act (`RunDraft.refused`).
    """
    definition = step_definition(draft.playbook, state)
    is_unwanted = after_resolve.is_unwanted(draft, state)
    if is_unwanted and state.attempts:
        _stop(draft, state, f"it was not tried again, because the alert resolved; the last attempt: {state.error}")
        return None
    if is_held_by_pause(draft, state) and not is_unwanted:
        if draft.outside.resolved and any(map(_may_be_applied, state.attempts)):
            paused = "not asked again, because the server was paused and the alert resolved"
            mark_outcome_unknown(draft, state, f"it may have been applied; {paused}")
            return None
        return draft.suspend_until_resumed()
    if state.status is StepStatus.PENDING:
        if not _begin_or_skip(draft, state, definition):
            return None
        if is_unwanted:
            after_resolve.skip_to_wait(draft, state)
            return None
    if isinstance(definition, FREE_WAITS):
        return waits.proceed(draft, state, definition)
    if not draft.has_target:
        return TakeTarget()
    if why := why_without_target(draft.run, state):
        draft.end(state, StepStatus.SKIPPED, message=why)
        draft.add_event(kinds.StepSkipped(state.id, action=state.action, why=why))
        return None
    if isinstance(definition, WaitStep):
        return _wait(draft, state, definition)
    if isinstance(definition, ApproveStep):
        return approval_steps.proceed(draft, state, definition)
    return _act(draft, state, definition)


def _begin_or_skip(draft: RunDraft, state: StepState, definition: Step) -> bool:
    """Return False if the condition ended the step."""
    reason = "its condition was not met"
    try:
        if definition.when is None or draft.playbook.when(state.phase, state.index, draft.scope()):
            return True
    except errors.ExpressionError as error:
        prevented = ", ".join(step.id for step in after_resolve.prevented_steps(draft.run))
        if not prevented:
            _fail(draft, state, str(error))
            return False
        # The condition may use the output of a step that was not carried out.
        reason = f"its condition was not met: {error}; the alert resolved before {prevented} had ended"
    draft.end(state, StepStatus.SKIPPED, message=reason)
    draft.add_event(kinds.StepSkipped(state.id, when=definition.when))
    return False


def record_location(draft: RunDraft, key: tuple[str, int], params: Mapping[str, Any]) -> None:
    """Record the places of a multi-node action, in the undo too."""
    state = draft.run.step(key)
    action = draft.context.actions.action_class(state.action) if state.action else None
    undo = state.undo
    if undo is not None and action is not None:
        undo = _undo_of(action, params, undo.trigger, undo.undo_of)
    draft.put(replace(state, params=params, undo=undo))
    draft.add_event(kinds.StepLocated(state.id, state.action, params))


def apply_outcome(draft: RunDraft, key: tuple[str, int], outcome: AttemptOutcome) -> None:
    # An open run's message states what it waits for, or its last error; a limited run's, why it was refused.
    message = "" if outcome.status == "applied" else outcome.error or outcome.status
    if draft.run.message != message and not draft.run.is_limited:
        draft.run = replace(draft.run, message=message)
    state = draft.run.step(key)
    definition = step_definition(draft.playbook, state)
    assert isinstance(definition, ActionStep)
    attempt = replace(
        state.attempts[-1],
        status="rejected" if outcome.status == "skipped" else outcome.status,  # no attempt has the status `skipped`
        ended_at=draft.now,
        error=outcome.error,
        in_part=outcome.in_part,
    )
    attempts, output, error = (*state.attempts[:-1], attempt), outcome.output, outcome.error
    if outcome.status == "applied":
        undo = _undo_after_success(draft, state, definition, output)
        draft.end(state, StepStatus.SUCCEEDED, attempts=attempts, output=output, error=error, undo=undo)
        draft.add_event(kinds.StepSucceeded(state.id, state.action, outcome.output))
        return
    may_have_acted = any(each.status == "unknown" for each in attempts)
    if outcome.status == "skipped" and not may_have_acted:
        draft.end(keep_or_drop_undo(replace(state, attempts=attempts)), StepStatus.SKIPPED, message=error)
        draft.add_event(kinds.StepSkipped(state.id, action=state.action, why=error))
        return
    state = replace(state, attempts=attempts, output=output, error=error)
    if outcome.status == "stopped" and after_resolve.is_unwanted(draft, state):
        _stop(draft, state, outcome.error or "it was stopped, because the alert resolved")
        return
    if outcome.barred_by is not None and not has_acted_before(draft.run, state, draft.context.actions):
        draft.run = replace(draft.run, acted_at=None)  # it was set when the attempt was persisted
        draft.refuse(outcome.barred_by, f"the breaker opened before the run could act: {outcome.error}")
    may_follow = outcome.status not in ("rejected", "skipped") and outcome.may_be_repeated and outcome.barred_by is None
    most = (
        definition.retry.attempts
        if outcome.status != "stopped"
        else max(definition.retry.attempts, MOST_STOPPED_ATTEMPTS)
    )
    if may_follow and attempt.number < most:
        delay = definition.retry.delay_after(attempt.number)
        draft.put(replace(state, status=StepStatus.WAITING, retry_at=draft.now + delay))
        draft.add_event(kinds.AttemptFailed(state.id, attempt.number, outcome.error, delay.total_seconds()))
        return
    if may_have_acted:
        # Even if the last attempt failed, an earlier one may have been applied: the undo stays pending.
        draft.end(keep_or_drop_undo(state), StepStatus.UNKNOWN)
        draft.add_event(kinds.StepUnknown(state.id, state.action, outcome.error))
        return
    _fail(draft, keep_or_drop_undo(state), outcome.error or outcome.status)


def take_back_attempt(draft: RunDraft, key: tuple[str, int]) -> None:
    """Remove the step's last attempt, which was persisted but not started."""
    state = draft.run.step(key)
    *earlier, unmade = state.attempts
    acted_at = draft.run.acted_at if has_acted_before(draft.run, state, draft.context.actions) else None
    draft.add_event(kinds.AttemptCalledOff(state.id, unmade.number, unmade.command_id))
    if not earlier:
        unbegun = StepState(state.phase, state.index, state.id, state.kind, state.action, target=state.target)
        draft.put(unbegun, acted_at=acted_at)
        return
    waiting = replace(state, status=StepStatus.WAITING, attempts=tuple(earlier), error=earlier[-1].error)
    draft.put(waiting, acted_at=acted_at)


def has_acted_before(run: Run, state: StepState, actions: Actions) -> bool:
    """Return whether the run may have changed anything before this step's last attempt, or by it if unknown."""
    if len(state.attempts) > 1 or state.attempts[-1].status == "unknown":
        return True
    others = (step for step in run.steps if step.key != state.key and step.attempts)
    return any(is_harmful(actions, step.action) for step in others)


def is_harmful(actions: Actions, name: str | None) -> bool:
    """Return False for unknown actions."""
    action = actions.action_class(name) if name else None
    return action is not None and action.harmful


def keep_or_drop_undo(state: StepState) -> StepState:
    """Return an unsuccessful step with the undo of its last attempt that may be applied, or the undo dropped."""
    if state.undo is None:
        return state
    applied = [attempt.command_id for attempt in state.attempts if _may_be_applied(attempt)]
    if applied:
        return replace(state, undo=replace(state.undo, undo_of=applied[-1]))
    return replace(state, undo=replace(state.undo, status=UndoStatus.DROPPED, because="the action was not applied"))


def _may_be_applied(attempt: Attempt) -> bool:
    return attempt.status in ("unknown", "running") or attempt.in_part


def next_attempt(draft: RunDraft, attempts: tuple[Attempt, ...], timeout: timedelta) -> Attempt:
    """Return the next attempt.

    After an unknown outcome it keeps the command ID, so that nothing is applied twice. After a failure it gets a new
    ID: receivers would repeat the stored result.
    """
    is_unknown = bool(attempts) and attempts[-1].status == "unknown"
    command_id = attempts[-1].command_id if is_unknown else draft.context.new_id()
    number = attempts[-1].number + 1 if attempts else 1
    return Attempt(number, command_id, draft.now, draft.now + timeout)


def _act(draft: RunDraft, state: StepState, definition: ActionStep) -> PerformAttempt | Wait | None:
    # A time beyond the longest retry is from before the clock was set back.
    if state.retry_at and draft.now < state.retry_at <= draft.now + definition.retry.max_delay:
        draft.set_status(Status.WAITING, "retry")
        return Wait(state.retry_at)
    action = draft.context.actions.action_class(definition.action)
    if action is None:
        _fail(draft, state, f"there is no action {definition.action!r} in this server")
        return None
    if action.harmful and draft.run.acted_at is None and draft.outside.breaker and _has_waited(draft.run):
        draft.refuse(Decision.BREAKER_OPEN, f"the breaker opened before the run could act: {draft.outside.breaker}")
        return None
    if _needs_window(state, action):
        outside = windows.why_outside(draft.playbook.definition.windows, draft.now)
        if outside is not None:
            return _wait_for_window(draft, outside)
    params = state.params
    if not state.attempts:
        try:
            rendered = draft.playbook.params(state.phase, state.index, draft.scope())
        except errors.ExpressionError as error:
            _fail(draft, state, str(error))
            return None
        params = rendered.model_dump(mode="json", by_alias=True, exclude_none=True)
    attempt = next_attempt(draft, state.attempts, definition.timeout or action.default_timeout)
    try:
        undo = _undo_before_attempt(draft, state, definition, action, params, attempt.command_id)
    except errors.ExpressionError as error:
        _fail(draft, state, f"undo: {error}")
        return None
    state = replace(
        state,
        status=StepStatus.RUNNING,
        params=params,
        started_at=state.started_at or draft.now,
        retry_at=None,
        error=None,
        attempts=(*state.attempts, attempt),
        undo=undo,
    )
    acted_at = draft.now if action.harmful and draft.run.acted_at is None else draft.run.acted_at
    message = "" if draft.run.waiting_on in (TURN, windows.WINDOW) else draft.run.message
    draft.put(state, status=Status.RUNNING, waiting_on=None, acted_at=acted_at, message=message)
    draft.add_event(kinds.StepStarted(state.id, state.action, state.params, attempt.number, attempt.command_id))
    return PerformAttempt(state.key)


def _needs_window(state: StepState, action: type[Action]) -> bool:
    # Retries, reverting steps (`ActionTraits.gives_back`) and final phases may act outside windows.
    gives_back = getattr(action, "gives_back", False)
    return action.harmful and not gives_back and not state.attempts and state.phase == "steps"


def _wait_for_window(draft: RunDraft, outside: str) -> Wait | None:
    """Refuse a run that has not acted. One that has acted, or a member of a group, waits for the next window."""
    if draft.run.acted_at is None and draft.run.parent is None:
        draft.refuse(Decision.OUTSIDE_WINDOW, outside)
        return None
    draft.set_status(Status.WAITING, windows.WINDOW)
    if draft.run.message != outside:
        draft.run = replace(draft.run, message=outside)
    return Wait(windows.opens_at(draft.playbook.definition.windows, draft.now))


def _has_waited(run: Run) -> bool:
    """Return whether admission, which checked the breaker, is over."""
    return run.waiting_on is not None or any(step.status is not StepStatus.PENDING for step in run.steps)


def _wait(draft: RunDraft, state: StepState, definition: WaitStep) -> Wait | None:  # ``wait_for: resolved``
    if not draft.run.has_alert and not draft.outside.resolved:
        draft.end(state, StepStatus.SKIPPED, message="it was started by hand, and no alert fires that could resolve")
        draft.add_event(kinds.StepSkipped(state.id, when="started by hand: there is no alert"))
        return None
    if draft.outside.resolved:
        draft.end(state, StepStatus.SUCCEEDED, started_at=state.started_at or draft.now)
        draft.add_event(wait_events.WaitEnded(state.id, "resolved", draft.outside.resolved_because))
        return None
    if state.status is StepStatus.PENDING:
        deadline = draft.now + definition.timeout if definition.timeout else None
        state = draft.put(replace(state, status=StepStatus.WAITING, started_at=draft.now, deadline=deadline))
        draft.add_event(wait_events.WaitStarted(state.id, definition.wait_for, deadline))
    state = draft.timely(state)
    if state.deadline and draft.now >= state.deadline:
        draft.end(state, StepStatus.TIMED_OUT, error="the alert had not resolved in time")
        draft.add_event(wait_events.WaitEnded(state.id, "timed_out"))
        return None
    draft.set_status(Status.WAITING, "resolved")
    return Wait(state.deadline)


def is_held_by_pause(draft: RunDraft, state: StepState) -> bool:
    return draft.outside.paused and is_harmful(draft.context.actions, state.action)


def _stop(draft: RunDraft, state: StepState, error: str) -> None:
    """Cancel a step whose alert resolved, and the following ones up to a wait."""
    state = keep_or_drop_undo(replace(state, retry_at=None))
    draft.end(state, StepStatus.CANCELLED, error=error)
    draft.add_event(kinds.StepStopped(state.id, state.action, error, state.output))
    after_resolve.skip_to_wait(draft, state)


def _fail(draft: RunDraft, state: StepState, error: str) -> None:
    draft.end(state, StepStatus.FAILED, error=error, started_at=state.started_at or draft.now)
    draft.add_event(kinds.StepFailed(state.id, state.action, error))


def _undo_before_attempt(
    draft: RunDraft,
    state: StepState,
    definition: ActionStep,
    action: type[Action],
    params: Mapping[str, Any],
    command_id: str,
) -> Undo | None:
    if definition.own_undo is None:
        return _undo_of(action, params, definition.undo_trigger, command_id)
    return _own_undo(draft, state, definition.own_undo, command_id)


def _own_undo(
    draft: RunDraft, state: StepState, own: OwnUndo, command_id: str, output: Mapping[str, Any] | None = None
) -> Undo | None:
    params = draft.playbook.undo_params(state.phase, state.index, draft.scope(), output)
    if params is None:
        return None  # it needs the step's output; `_undo_after_success` asks again
    written = params.model_dump(mode="json", by_alias=True, exclude_none=True)
    return Undo(own.when, own.action, written, command_id, _status_of(own.when))


def _status_of(trigger: UndoTrigger) -> UndoStatus:
    return UndoStatus.AVAILABLE if trigger is UndoTrigger.NEVER else UndoStatus.ARMED


def _undo_of(
    action: type[Action],
    params: Mapping[str, Any],
    trigger: UndoTrigger,
    command_id: str,
    output: Mapping[str, Any] | None = None,
) -> Undo | None:
    """Return the undo, as far as known; ``undo: never`` makes it available only.

    It is pending before the attempt, for the next server after a crash.
    """
    inverse = action.inverse(action.Params.model_validate(params, context=ON_RECORD), output)
    if inverse is None:
        return None
    return Undo(trigger, inverse.action, inverse.params, command_id, _status_of(trigger))


def _undo_after_success(
    draft: RunDraft, state: StepState, definition: ActionStep, output: Mapping[str, Any]
) -> Undo | None:
    command_id = state.attempts[-1].command_id
    if definition.own_undo is not None and state.undo is None:
        try:
            return _own_undo(draft, state, definition.own_undo, command_id, output)
        except errors.ExpressionError as error:
            own = definition.own_undo
            return Undo(own.when, own.action, {}, command_id, UndoStatus.DROPPED, because=f"it is not known: {error}")
    if definition.own_undo is not None:
        return state.undo
    action = draft.context.actions.action_class(definition.action)
    if action is None:
        return state.undo
    return _undo_of(action, state.params, definition.undo_trigger, command_id, output) or state.undo


def interrupted(run: Run) -> StepState | None:
    """Return the step with an attempt in flight. During planning this occurs only after a restart."""
    return next(
        (step for step in run.steps if step.status is StepStatus.RUNNING and step.attempts[-1].status == "running"),
        None,
    )


def mark_outcome_unknown(draft: RunDraft, state: StepState, reason: str) -> None:
    attempt = replace(state.attempts[-1], status="unknown", ended_at=draft.now, error=reason)
    attempts = (*state.attempts[:-1], attempt)
    draft.end(state, StepStatus.UNKNOWN, error=reason, attempts=attempts)
    draft.add_event(kinds.StepUnknown(state.id, state.action, reason))
