"""One attempt of an action: what is asked of it, where it works, and every way it can end.

Who calls it: ``driver``, which has the attempt on record before it is made.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from datetime import datetime, timedelta
from typing import Any

from trainmedic_server import errors, telemetry
from trainmedic_server.domain.alert import Alert
from trainmedic_server.domain.run import Attempt, Run
from trainmedic_server.domain.target import Target
from trainmedic_server.engine.plan_values import AttemptOutcome, PerformAttempt
from trainmedic_server.ports.actions import Actions, Call, Clearance, HasPlaces

GRACE = timedelta(seconds=5)
"""How long after its deadline an action may still report before it is cut off."""

Work = Callable[[Call], Awaitable[Mapping[str, Any]]]

log = telemetry.logger(__name__)


def made(run: Run, act: PerformAttempt) -> tuple[Attempt, ...]:
    """The attempts of the step, or of its undo; the last is the one to be made."""
    state = run.step(act.key)
    return state.undo_attempts if act.undo else state.attempts


def call_of(
    run: Run,
    act: PerformAttempt,
    actions: Actions,
    alert: Alert,
    tell: Callable[[str], Awaitable[None]],
    word: Callable[[], Awaitable[Clearance]],
) -> Call:
    """What is asked of the action. Raises ConfigurationError or ValueError where it cannot be asked."""
    state = run.step(act.key)
    undo = state.undo if act.undo else None
    name = undo.action if undo else state.action or ""
    tried = made(run, act)
    attempt = tried[-1]
    repeated = len(tried) > 1 and tried[-2].command_id == attempt.command_id
    spec = actions.spec(name)
    assert run.target is not None
    if spec is None:
        raise errors.ConfigurationError(f"this server has no action {name!r}")
    return Call(
        command_id=attempt.command_id,
        run_id=run.id,
        playbook=run.playbook,
        target=run.target,
        params=spec.Params.model_validate(undo.params if undo else state.params),
        reason=f"{alert.name}: {undo.because}" if undo else alert.name,
        issued_at=attempt.started_at,
        deadline=attempt.deadline,
        alert=alert,
        resumed=act.resumed or repeated,
        undo_of=undo.undo_of if undo else None,
        report_wait=tell,
        clearance=word if undo is None else None,  # nobody holds an undo back
    )


def placed(actions: Actions, name: str) -> HasPlaces | None:
    """The action of this name, if it finds out itself where it works."""
    try:
        action = actions.get(name)
    except errors.PermanentFailure:
        return None  # the attempt tells that there is none
    return action if isinstance(action, HasPlaces) else None


def targets_of(run: Run, act: PerformAttempt, actions: Actions) -> Sequence[Target]:
    """What the attempt works on. One that only reads disturbs nobody on a job's nodes."""
    assert run.target is not None
    state = run.step(act.key)
    undo = state.undo if act.undo else None
    spec = actions.spec(undo.action if undo else state.action or "")
    if spec is None or not spec.harmful or not isinstance(spec, HasPlaces):
        return (run.target,)
    try:
        params = spec.Params.model_validate(undo.params if undo else state.params)
    except ValueError:
        return (run.target,)  # the attempt will not be made
    return (run.target, *spec.places(params))


async def outcome_of(name: str, call: Call, work: Work, now: datetime, metrics: telemetry.Metrics) -> AttemptOutcome:
    """What becomes of the call, every way it can end made an `AttemptOutcome`."""
    limit = max((call.deadline - now + GRACE).total_seconds(), 0.0)
    try:
        async with asyncio.timeout(limit):
            return AttemptOutcome("applied", await work(call))
    except errors.TemporaryFailure as failure:
        return AttemptOutcome("failed", failure.output, str(failure), failure.is_begun)
    except errors.PermanentFailure as failure:
        return AttemptOutcome("rejected", failure.output, str(failure), failure.is_begun)
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
