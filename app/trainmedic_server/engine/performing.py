"""Calls of actions and their outcomes."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Awaitable, Callable, Hashable, Mapping
from datetime import datetime, timedelta
from typing import Any, cast

from msgspec.structs import replace
from pydantic import BaseModel

from trainmedic_core.target import Target
from trainmedic_server import errors, telemetry
from trainmedic_server.domain import destinations
from trainmedic_server.domain.alert import Alert
from trainmedic_server.domain.destinations import DestinationOutcome
from trainmedic_server.domain.run import Attempt, Run, StepState
from trainmedic_server.engine.plan_values import AttemptOutcome, PerformAttempt
from trainmedic_server.ports.actions import ON_RECORD, Action, Actions, Call, Clearance, MultiNodeAction

GRACE = timedelta(seconds=5)  # Time after its deadline for an action to report before it is cancelled

Work = Callable[[Call], Awaitable[Mapping[str, Any]]]  # performs an attempt and returns its output

log = telemetry.logger(__name__)


def attempts_of(state: StepState, act: PerformAttempt) -> tuple[Attempt, ...]:
    """The last is the one to make."""
    return state.undo_attempts if act.undo else state.attempts


def call_of(
    run: Run,
    act: PerformAttempt,
    actions: Actions,
    alert: Alert,
    now: datetime,
    report_wait: Callable[[str], Awaitable[None]],
    clearance: Callable[[], Awaitable[Clearance]],
) -> Call:
    """Return the call for the attempt, with its full time from `now` if that ran out before the start.

    Raises ConfigurationError or ValueError.
    """
    state = run.step(act.key)
    undo = state.undo if act.undo else None
    name = undo.action if undo else state.action or ""
    *earlier, attempt = attempts_of(state, act)
    repeated = bool(earlier) and earlier[-1].command_id == attempt.command_id
    action_class = actions.action_class(name)
    if action_class is None:
        raise errors.ConfigurationError(f"this server has no action {name!r}")
    return Call(
        command_id=attempt.command_id,
        run_id=run.id,
        playbook=run.playbook,
        target=run.targets_of(state)[0],
        params=action_class.Params.model_validate(undo.params if undo else state.params, context=ON_RECORD),
        reason=f"{alert.name}: {undo.because}" if undo else alert.name,
        issued_at=attempt.started_at,
        deadline=attempt.deadline if now < attempt.deadline else now + (attempt.deadline - attempt.started_at),
        alert=alert,
        resumed=act.resumed or repeated,
        undo_of=undo.undo_of if undo else None,
        undoes_applied=undo is not None and _was_applied(state, undo.undo_of),
        report_wait=report_wait,
        clearance=clearance if undo is None else None,  # neither pauses nor cancelling stop an undo
    )


def _was_applied(state: StepState, command_id: str) -> bool:
    return any(attempt.command_id == command_id and attempt.status == "applied" for attempt in state.attempts)


@functools.cache  # Python 3.11 takes tens of microseconds per check
def has_methods_of(action_class: Hashable, protocol: type) -> bool:
    return isinstance(action_class, protocol)


def multi_node_action(actions: Actions, name: str) -> MultiNodeAction | None:
    try:
        action = actions.get(name)
    except errors.PermanentFailure:
        return None  # the attempt fails with this reason
    return cast("MultiNodeAction", action) if has_methods_of(type(action), MultiNodeAction) else None


def work_of(run: Run, act: PerformAttempt, actions: Actions, name: str, metrics: telemetry.Metrics) -> Work:
    """Return the function that performs the attempt; a step on jobs calls each job."""
    state = run.step(act.key)
    if state.target is None:
        return lambda call: actions.get(name).perform(call)

    async def on_each(call: Call) -> Mapping[str, Any]:
        action = actions.get(name)
        async with asyncio.TaskGroup() as group:
            calls = [_call_on(call, target, state, actions) for target in run.also]
            tasks = [group.create_task(_perform_one(action, each, name, metrics)) for each in calls]
        outcomes = [task.result() for task in tasks]
        return destinations.combine(outcomes, destinations.output_by_job(outcomes), is_undo=act.undo)

    return on_each


async def _perform_one(action: Action, call: Call, name: str, metrics: telemetry.Metrics) -> DestinationOutcome:
    try:
        return DestinationOutcome(call.target, await action.perform(call))
    except errors.ActionFailure as failure:
        return DestinationOutcome(call.target, failure.output, failure)
    except Exception as failure:  # the calls of other jobs go on
        return DestinationOutcome(call.target, {}, errors.OutcomeUnknown(_note_bug(name, failure, metrics)))


def _call_on(call: Call, target: Target, state: StepState, actions: Actions) -> Call:
    return replace(
        call,
        command_id=destinations.command_id_of(call.command_id, state, target),
        target=target,
        params=_own_undo_params(call, target, state, actions) or call.params,
        undo_of=destinations.command_id_of(call.undo_of, state, target) if call.undo_of is not None else None,
    )


def _own_undo_params(call: Call, target: Target, state: StepState, actions: Actions) -> BaseModel | None:
    # An undo may depend on the output, such as a previous value, which differs by job.
    output = state.output.get(destinations.BY_JOB, {}).get(target.job)
    action = actions.action_class(state.action or "")
    if call.undo_of is None or output is None or action is None or state.undo is None:
        return None
    inverse = action.inverse(action.Params.model_validate(state.params, context=ON_RECORD), output)
    if inverse is None or inverse.action != state.undo.action:
        return None
    return type(call.params).model_validate(inverse.params, context=ON_RECORD)


async def outcome_of(name: str, call: Call, work: Work, now: datetime, metrics: telemetry.Metrics) -> AttemptOutcome:
    limit = max((call.deadline - now + GRACE).total_seconds(), 0.0)
    try:
        async with asyncio.timeout(limit):
            return AttemptOutcome("applied", await work(call))
    except errors.TemporaryFailure as failure:
        return AttemptOutcome("failed", failure.output, _reason(failure), failure.is_begun)
    except errors.PermanentFailure as failure:
        return AttemptOutcome("rejected", failure.output, _reason(failure), failure.is_begun)
    except errors.NotSetUp as failure:
        return AttemptOutcome("skipped", failure.output, _reason(failure))
    except errors.EffectDisproved as failure:
        return AttemptOutcome("failed", failure.output, _reason(failure), failure.is_begun, may_be_repeated=False)
    except errors.NoLongerWanted as failure:
        return AttemptOutcome("stopped", failure.output, _reason(failure), failure.is_begun)
    except errors.OutcomeUnknown as failure:
        return AttemptOutcome("unknown", failure.output, _reason(failure))
    except TimeoutError:
        return AttemptOutcome("unknown", error="the action did not end in time")
    except Exception as failure:  # an action's bug ends its attempt, not the server
        return AttemptOutcome("unknown", error=_note_bug(name, failure, metrics))


def _note_bug(name: str, failure: Exception, metrics: telemetry.Metrics) -> str:
    metrics.loop_errors.labels("action").inc()
    log.exception("action raised an undeclared error", action=name)
    return f"unexpected {type(failure).__name__} in the action; see the server's log"


def _reason(failure: errors.ActionFailure) -> str:
    return str(failure).strip() or f"the action raised {type(failure).__name__} without a reason"


def unmakeable_outcome(act: PerformAttempt, reason: str) -> AttemptOutcome:
    """Return the outcome of an attempt that this server cannot make.

    Undos are retried. The outcome is unknown if a killed server may have made the attempt.
    """
    if act.undo:
        return AttemptOutcome("failed", error=reason)
    return AttemptOutcome("unknown" if act.resumed else "rejected", error=reason)
