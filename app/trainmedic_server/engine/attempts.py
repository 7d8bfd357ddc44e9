"""One attempt of an action: its call, its targets, and every way it can end.

Who calls it: ``driver``, which puts the attempt on record before it is made.
"""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Awaitable, Callable, Hashable, Iterator, Mapping, Sequence
from datetime import datetime, timedelta
from typing import Any, cast

from msgspec.structs import replace

from trainmedic_server import errors, telemetry
from trainmedic_server.domain.alert import Alert
from trainmedic_server.domain.run import Attempt, Decision, Run, StepState
from trainmedic_server.domain.target import Target
from trainmedic_server.engine.plan_values import AttemptOutcome, PerformAttempt
from trainmedic_server.ports.actions import ON_RECORD, Actions, Call, Clearance, MultiNodeAction, NodeTouchingAction

GRACE = timedelta(seconds=5)
"""How long after its deadline an action may still report before it is cut off."""

Work = Callable[[Call], Awaitable[Mapping[str, Any]]]

log = telemetry.logger(__name__)


def attempts_of(state: StepState, act: PerformAttempt) -> tuple[Attempt, ...]:
    """The attempts of the step, or of its undo, that are on record; the last is the one to be made."""
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
    """The call for the attempt. One whose time is over before it is begun, because a commit took so long, has its whole
    time from `now`. Raises ConfigurationError or ValueError where none can be made."""
    state = run.step(act.key)
    undo = state.undo if act.undo else None
    name = undo.action if undo else state.action or ""
    *earlier, attempt = attempts_of(state, act)
    repeated = bool(earlier) and earlier[-1].command_id == attempt.command_id
    action_class = actions.action_class(name)
    assert run.target is not None
    if action_class is None:
        raise errors.ConfigurationError(f"this server has no action {name!r}")
    return Call(
        command_id=attempt.command_id,
        run_id=run.id,
        playbook=run.playbook,
        target=run.target,
        params=action_class.Params.model_validate(undo.params if undo else state.params, context=ON_RECORD),
        reason=f"{alert.name}: {undo.because}" if undo else alert.name,
        issued_at=attempt.started_at,
        deadline=attempt.deadline if now < attempt.deadline else now + (attempt.deadline - attempt.started_at),
        alert=alert,
        resumed=act.resumed or repeated,
        undo_of=undo.undo_of if undo else None,
        undoes_applied=undo is not None and _was_applied(state, undo.undo_of),
        report_wait=report_wait,
        clearance=clearance if undo is None else None,  # neither pause nor cancelling stops an undo
    )


def _was_applied(state: StepState, command_id: str) -> bool:
    return any(attempt.command_id == command_id and attempt.status == "applied" for attempt in state.attempts)


@functools.cache
def _has_methods_of(action_class: Hashable, protocol: type) -> bool:
    """Kept by class: each attempt asks several times, and Python 3.11 takes tens of microseconds to compare them."""
    return isinstance(action_class, protocol)


def multi_node_action(actions: Actions, name: str) -> MultiNodeAction | None:
    """The action of this name, if it finds out itself on which nodes it works."""
    try:
        action = actions.get(name)
    except errors.PermanentFailure:
        return None  # the attempt fails with the reason
    return cast("MultiNodeAction", action) if _has_methods_of(type(action), MultiNodeAction) else None


def targets_of(run: Run, act: PerformAttempt, actions: Actions) -> Sequence[Target]:
    """The targets that the attempt works on. One that only reads disturbs nothing on a job's nodes, so these are
    not among its targets."""
    assert run.target is not None
    state = run.step(act.key)
    undo = state.undo if act.undo else None
    action_class = actions.action_class(undo.action if undo else state.action or "")
    if action_class is None or not action_class.harmful or not _has_methods_of(action_class, MultiNodeAction):
        return (run.target,)
    try:
        params = action_class.Params.model_validate(undo.params if undo else state.params, context=ON_RECORD)
    except ValueError:
        return (run.target,)  # the attempt will not be made
    return (run.target, *cast("type[MultiNodeAction]", action_class).places(params))


def nodes_touched(run: Run, act: PerformAttempt, actions: Actions, targets: Sequence[Target]) -> set[str]:
    """The nodes on which the attempt on these targets may change something, which the breaker counts; none for one that
    only reads, and for an undo, which nothing holds back. Raises ConfigurationError where the action cannot say."""
    state = run.step(act.key)
    action_class = actions.action_class(state.action or "")
    if act.undo or action_class is None or not action_class.harmful:
        return set()
    assert run.target is not None
    nodes = {target.node for target in targets if target.node is not None}
    if _has_methods_of(action_class, NodeTouchingAction):
        try:
            params = action_class.Params.model_validate(state.params, context=ON_RECORD)
            nodes |= set(cast("type[NodeTouchingAction]", action_class).touches(params, run.target))
        except Exception as error:  # it may be another package's, and what it touches must be known
            raise errors.ConfigurationError(
                f"action {state.action} does not say which nodes it touches: {type(error).__name__}: {error}"
            ) from error
    return nodes


def barred_outcome(act: PerformAttempt, reason: str) -> AttemptOutcome:
    """The outcome of an attempt that the breaker keeps from being made."""
    return replace(unmakeable_outcome(act, reason), barred_by=Decision.BREAKER_OPEN)


def with_full_timeout(run: Run, act: PerformAttempt, now: datetime) -> Run:
    """The run with the attempt's deadline reset to its full timeout from `now`."""
    state = run.step(act.key)
    *earlier, last = attempts_of(state, act)
    moved = (*earlier, replace(last, deadline=now + (last.deadline - last.started_at)))
    if act.undo and state.undo:
        return run.with_step(replace(state, undo=replace(state.undo, attempts=moved)))
    return run.with_step(replace(state, attempts=moved))


def unmakeable_outcome(act: PerformAttempt, reason: str) -> AttemptOutcome:
    """The outcome of an attempt that this server cannot make. An undo is tried again, because another version of the
    server may be able to make it; the outcome of an attempt that a killed server may have made is unknown."""
    if act.undo:
        return AttemptOutcome("failed", error=reason)
    return AttemptOutcome("unknown" if act.resumed else "rejected", error=reason)


def ended_between(before: Run, after: Run) -> Iterator[tuple[str, str]]:
    """The action and the command id of each attempt that was in flight in `before` and has ended in `after`."""
    for old, new in zip(before.steps, after.steps, strict=True):
        if old is new:
            continue
        pairs = [(new.action, old.attempts, new.attempts)]
        if old.undo and new.undo:
            pairs.append((new.undo.action, old.undo.attempts, new.undo.attempts))
        for action, attempts_before, attempts_after in pairs:
            if not action or not attempts_before or attempts_before[-1].status != "running":
                continue
            last = attempts_before[-1]
            if all(attempt.status != "running" for attempt in attempts_after if attempt.number == last.number):
                yield action, last.command_id


async def outcome_of(name: str, call: Call, work: Work, now: datetime, metrics: telemetry.Metrics) -> AttemptOutcome:
    """How the call ends: every way it can end is made an `AttemptOutcome`."""
    limit = max((call.deadline - now + GRACE).total_seconds(), 0.0)
    try:
        async with asyncio.timeout(limit):
            return AttemptOutcome("applied", await work(call))
    except errors.TemporaryFailure as failure:
        return AttemptOutcome("failed", failure.output, str(failure), failure.is_begun)
    except errors.PermanentFailure as failure:
        return AttemptOutcome("rejected", failure.output, str(failure), failure.is_begun)
    except errors.NotSetUp as failure:
        return AttemptOutcome("skipped", failure.output, str(failure))
    except errors.EffectDisproved as failure:
        return AttemptOutcome("failed", failure.output, str(failure), failure.is_begun, may_be_repeated=False)
    except errors.NoLongerWanted as failure:
        return AttemptOutcome("stopped", failure.output, str(failure), failure.is_begun)
    except errors.OutcomeUnknown as failure:
        return AttemptOutcome("unknown", failure.output, str(failure))
    except TimeoutError:
        return AttemptOutcome("unknown", error="the action did not end in time")
    except Exception as failure:  # an action's bug ends its attempt, not the server
        metrics.loop_errors.labels("action").inc()
        log.exception("an action failed in a way that it does not declare", action=name)
        return AttemptOutcome(
            "unknown", error=f"unexpected {type(failure).__name__} in the action; see the server's log"
        )
