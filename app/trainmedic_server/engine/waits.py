"""Progress of waits for a time, a query or an action.

Before the run's first action they hold no lock. After them, the driver locks the target and looks once more.
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime
from typing import Any

from msgspec.structs import replace

from trainmedic_core import duration, errors
from trainmedic_core.problems import cut
from trainmedic_server.domain import event_kinds as kinds
from trainmedic_server.domain import wait_events
from trainmedic_server.domain.inputs import read_time
from trainmedic_server.domain.playbook import (
    PROMETHEUS_QUERY,
    DelayStep,
    PolledAction,
    PolledQuery,
    PollStep,
    UntilStep,
)
from trainmedic_server.domain.run import Status, StepState, StepStatus
from trainmedic_server.domain.upcoming import UNTIL, clock
from trainmedic_server.engine import after_resolve, claims
from trainmedic_server.engine.looking import Look, Sight
from trainmedic_server.engine.plan_values import RunDraft, TakeTarget, Wait

WAITING_ON = "wait"  # value of `Run.waiting_on`
MOOT = "the alert resolved before the wait was over"  # why a wait was skipped
HOLDS = "it holds"  # also the step's stored message while the condition holds
_SHOWN = 80  # characters of a condition


def proceed(
    draft: RunDraft, state: StepState, definition: PollStep | DelayStep | UntilStep
) -> Wait | Look | TakeTarget | None:
    """Begin, continue or end the wait; None once the step is final."""
    if after_resolve.is_moot(draft, state):
        _end_moot(draft, state)
        return None
    if state.status is StepStatus.PENDING:
        begun = _begin(draft, state, definition)
        if begun is None:
            return None
        state = begun
    if isinstance(definition, PollStep):
        return _poll(draft, state, definition)
    # The time of `wait_until` does not move with the clock.
    deadline = state.deadline if isinstance(definition, UntilStep) else draft.timely(state).deadline
    state = draft.run.step(state.key)  # `RunDraft.timely` restarts it if the clock was set back
    assert deadline is not None
    if draft.now >= deadline:
        draft.end(state, StepStatus.SUCCEEDED)
        draft.add_event(wait_events.WaitEnded(state.id, "over"))
        return None
    draft.set_status(Status.WAITING, WAITING_ON)
    return Wait(deadline)


def _end_moot(draft: RunDraft, state: StepState) -> None:
    """End a wait whose alert resolved. Later steps run as without it."""
    draft.end(state, StepStatus.SKIPPED, message=MOOT)
    if state.started_at is None:
        draft.add_event(kinds.StepSkipped(state.id, why=MOOT))
    else:
        draft.add_event(wait_events.WaitEnded(state.id, "moot", MOOT))


def _begin(draft: RunDraft, state: StepState, definition: PollStep | DelayStep | UntilStep) -> StepState | None:
    """Return None if the step failed."""
    params: Mapping[str, Any] = {}
    try:
        if isinstance(definition, PollStep):
            rendered = draft.playbook.params(state.phase, state.index, draft.scope())
            params = _params(definition, rendered.model_dump(mode="json", by_alias=True, exclude_none=True))
            assert definition.timeout is not None
            deadline = draft.now + definition.timeout
        else:
            deadline = _deadline(draft, state, definition)
    except (errors.ExpressionError, ValueError, OverflowError) as error:
        why = "the wait would end after the year 9999" if isinstance(error, OverflowError) else str(error)
        draft.end(state, StepStatus.FAILED, error=why, started_at=draft.now)
        draft.add_event(kinds.StepFailed(state.id, state.action, why))
        return None
    what = condition_text(definition, params)
    draft.add_event(wait_events.WaitStarted(state.id, what, deadline))
    begun = replace(state, status=StepStatus.WAITING, started_at=draft.now, deadline=deadline, params=params)
    if draft.run.message:
        draft.run = replace(draft.run, message="")
    return draft.put(begun)


def _deadline(draft: RunDraft, state: StepState, definition: DelayStep | UntilStep) -> datetime:
    written = draft.playbook.message(state.phase, state.index, draft.scope())
    return draft.now + duration.parse(written) if isinstance(definition, DelayStep) else read_time(written)


def _params(definition: PollStep, rendered: Mapping[str, Any]) -> Mapping[str, Any]:
    if isinstance(definition.wait_for, PolledAction):
        return {"action": definition.wait_for.action, "with": rendered}
    return rendered


def _look_of(definition: PollStep, state: StepState, deadline: datetime) -> Look:
    polled = definition.wait_for
    if isinstance(polled, PolledQuery):
        action, params = PROMETHEUS_QUERY, state.params
    else:
        action, params = polled.action, state.params["with"]
    return Look(state.key, action, params, polled.for_, polled.every, deadline)


def _poll(draft: RunDraft, state: StepState, definition: PollStep) -> Look | TakeTarget | None:
    """End the step, look again, or lock the target after the condition held."""
    deadline = draft.timely(state).deadline
    state = draft.run.step(state.key)
    assert deadline is not None
    sight = draft.sight if draft.sight is not None and draft.sight.key == state.key else None
    look = _look_of(definition, state, deadline)
    # Under a just taken lock, one look suffices: the condition has held for `held_for` before.
    is_over = sight is not None and bool(sight.holds) and (draft.look_once or sight.is_over(look))
    if sight is not None:
        state = _record_change(draft, state, definition, sight)
    if is_over and (draft.has_target or not claims.is_unlocked(draft.run)):
        assert sight is not None
        assert sight.last is not None
        draft.look_once = False
        draft.run = replace(draft.run, message="")
        draft.end(state, StepStatus.SUCCEEDED, output=sight.last.output, message=None)
        draft.add_event(wait_events.WaitEnded(state.id, "held"))
        return None
    if draft.now >= deadline:
        last = result_text(sight) if sight is not None and sight.last is not None else state.message or "no answer came"
        last = "it held, but the target was busy" if draft.run.waiting_on == "target" else last
        error = f"{condition_text(definition, state.params)} was not true for long enough in time; at the end: {last}"
        output = sight.last.output if sight is not None and sight.last is not None else {}
        draft.end(state, StepStatus.TIMED_OUT, error=error, output=output)
        draft.add_event(wait_events.WaitEnded(state.id, "timed_out"))
        return None
    if is_over:
        return TakeTarget(deadline)
    draft.set_status(Status.WAITING, WAITING_ON)
    return look if sight is not None else replace(look, once=draft.look_once)  # at once after the lock was taken


def _record_change(draft: RunDraft, state: StepState, definition: PollStep, sight: Sight) -> StepState:
    if sight.last is None or (state.message is not None and (state.message == HOLDS) == sight.holds):
        return state
    result = result_text(sight)
    draft.add_event(wait_events.WaitChanged(state.id, bool(sight.holds), sight.value, sight.last.why or None))
    draft.run = replace(draft.run, message=f"{condition_text(definition, state.params)}: {result}")
    return draft.put(replace(state, message=result))


def result_text(sight: Sight) -> str:
    if sight.holds:
        return HOLDS
    why = sight.last.why if sight.last is not None else ""
    return f"it does not hold: {why}" if why else "it does not hold"


def condition_text(definition: PollStep | DelayStep | UntilStep, params: Mapping[str, Any]) -> str:
    if isinstance(definition, DelayStep):
        return definition.wait
    if isinstance(definition, UntilStep):
        return definition.wait_until
    if isinstance(definition.wait_for, PolledQuery):
        return cut(str(params.get("query", definition.wait_for.query)), _SHOWN)
    until = definition.wait_for.until
    return f"{definition.wait_for.action}: {cut(until, _SHOWN)}" if until else definition.wait_for.action


def awaited_text(definition: PollStep | DelayStep | UntilStep, state: StepState, sight: Sight | None) -> str:
    if not isinstance(definition, PollStep):
        return f"{UNTIL}{clock(state.deadline)}" if state.deadline else f"{UNTIL}its time"
    what, held_for = condition_text(definition, state.params), definition.wait_for.for_
    held = f"has held for {duration.write(held_for)}" if held_for else "holds"
    if sight is None or sight.last is None:
        return f"{UNTIL}{what} {held}; not looked yet"
    parts = [f"{UNTIL}{what} {held}"]
    if sight.since is not None:
        parts.append(f"it holds since {clock(sight.since)}")
    elif sight.last.why:
        parts.append(sight.last.why)
    if sight.value is not None:
        parts.append(f"last value {sight.value:g}" if isinstance(sight.value, (int, float)) else "")
    return "; ".join(filter(None, parts))
