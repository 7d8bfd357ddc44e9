"""Driving one run: plan, commit, act, commit, and again, until nothing is due.

One driver owns a run while it is open or owes an undo; nothing else changes it then (``workers`` closes a run after a
restart before it makes a driver). What comes from outside (an alert
that joined or resolved, an operator's order, pause) is written beside the run by whoever brings it; then the driver
is touched, and reads it before it plans again. So there are no locks around runs, and no lost updates.

An attempt is made here too: its call, its targets, and every way it can end. Who calls it: ``workers``. Not here: what
a run does next (``plan``).
"""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Awaitable, Callable, Hashable, Iterator, Mapping, Sequence
from datetime import datetime, timedelta
from typing import Any, cast

import structlog
from msgspec.structs import replace
from pydantic import BaseModel

from trainmedic_core.target import Target
from trainmedic_server import errors, telemetry
from trainmedic_server.domain import approval
from trainmedic_server.domain import event_kinds as kinds
from trainmedic_server.domain.alert import Alert
from trainmedic_server.domain.event_codec import UNDO_OVER, name_of, recorded
from trainmedic_server.domain.pause import OperatorPause
from trainmedic_server.domain.run import Attempt, Decision, Event, OrderKind, Run, Status, StepState
from trainmedic_server.engine import after_resolve, claims, plan, steps
from trainmedic_server.engine.engine_services import EngineServices
from trainmedic_server.engine.plan_values import (
    CALLED_OFF,
    AttemptOutcome,
    Idle,
    Instruction,
    OutsideState,
    PerformAttempt,
    RunDraft,
    RunPlan,
    Wait,
)
from trainmedic_server.engine.recorder import RunSnapshot, Seen, rejections
from trainmedic_server.ports.actions import ON_RECORD, Actions, Call, Clearance, MultiNodeAction, NodeTouchingAction
from trainmedic_server.ports.playbooks import CompiledPlaybook

GRACE = timedelta(seconds=5)
"""How long after its deadline an action may still report before it is cut off."""

EndedAttempt = tuple[PerformAttempt, AttemptOutcome]
Work = Callable[[Call], Awaitable[Mapping[str, Any]]]
_UNDO_BEGINS = name_of(kinds.UndoStarted)

log = telemetry.logger(__name__)


class Driver:
    """Owns one run. `drive` returns when the run is closed and nothing is due."""

    def __init__(
        self,
        run: Run,
        playbook: CompiledPlaybook | None,
        outside: OutsideState,
        services: EngineServices,
        received_at: datetime | None,
        then: Instruction | None = None,
    ) -> None:
        """`then` is what the run does first, where that is on record with its admission."""
        self.run = run
        self._outside = outside
        self._services = services
        self._context = services.planning_context(playbook)
        self._received_at = received_at
        self._then = then
        """What is on record to be done next, and not begun. None while that is planned, and while an attempt is in
        flight."""
        self._touches: set[str] = set()
        """The nodes that its attempts were found to touch."""
        self._in_flight: OutsideState | None = None
        """External state for the attempt in flight, as of the last touch."""
        self._times_touched = 0
        self._touched = asyncio.Event()
        self._planned = asyncio.Event()

    def touch(self) -> None:
        """Have the driver read what has changed outside before it plans again."""
        self._touched.set()
        self._planned.clear()
        self._in_flight, self._times_touched = None, self._times_touched + 1

    @property
    def snapshot(self) -> RunSnapshot:
        """The run, with the alerts and orders that the driver has read."""
        return RunSnapshot(self.run, tuple(self._outside.alerts), tuple(self._outside.orders))

    @property
    def is_touched(self) -> bool:
        """Whether something has changed outside that the driver has not read yet."""
        return self._touched.is_set()

    async def reload(self) -> None:
        """Take the run as the store has it, because after an error the one in memory may be ahead of it."""
        self._then = None
        snapshot = await self._services.recorder.snapshot(self.run.id)
        if snapshot is not None:
            self.run = snapshot.run
            self._outside = OutsideState(snapshot.alerts, snapshot.orders)

    async def take_back_unbegun(self) -> None:
        """Take the attempt off the record that was not begun, as the server stops: the next one could not know that."""
        act = self._then
        if isinstance(act, PerformAttempt) and not act.undo and not act.resumed:
            draft = self._draft()
            steps.take_back_attempt(draft, act.key)
            await self._commit(draft.plan(Idle()))

    async def planned(self) -> None:
        """Return once the driver has planned with everything that it was touched for."""
        await self._planned.wait()

    async def drive(self) -> None:
        structlog.contextvars.bind_contextvars(run_id=self.run.id, playbook=self.run.playbook)  # its task's alone
        try:
            if not self.run.is_open or await self._take_target():
                await self._carry_through()
        finally:
            self._services.locks.release(self.run.id)
            self._note_planned()

    async def _carry_through(self) -> None:
        if self._then is None:
            await self._plan_next(None)
        while not isinstance(self._then, Idle) or self._touched.is_set():
            await self._plan_next(await self._carry_out())

    async def _plan_next(self, ended: EndedAttempt | None) -> None:
        """Plan what to do next, by the outcome of the attempt that has ended and all that came from outside, and put it
        on record."""
        self._then = None
        while self._then is None:
            await self._read_outside()
            draft = self._draft()
            next_plan = plan.advance(draft) if ended is None else plan.conclude_and_advance(draft, *ended)
            if await self._commit(next_plan):  # else plan again, with the alert that has joined meanwhile
                self._then = next_plan.then

    async def _carry_out(self) -> EndedAttempt | None:
        match self._then:
            case Wait(until):
                self._release_if_closed()
                await self._rest(until)
            case PerformAttempt() as act:
                return act, await self._perform(act)
        return None

    def _draft(self) -> RunDraft:
        return RunDraft(self.run, self._outside, self._context, self._now())

    async def _take_target(self) -> bool:
        """Lock the target, waiting in the queue if need be; False where the run was closed instead."""
        claim = claims.of_run(self.run, self._services.actions)
        if self._services.locks.try_acquire(self.run.id, claim):
            return True
        granted = self._services.locks.wait(self.run.id, claim)
        holder = self._services.locks.blocker(self.run.id, claim)
        waiting = replace(self.run, status=Status.WAITING, waiting_on="target")
        await self._commit(RunPlan(waiting, (self._event(kinds.WaitingForTarget(holder)),), Wait()))
        while True:
            await self._read_outside()
            if self._outside.last(OrderKind.CANCEL, OrderKind.UNDO):
                return True  # planning closes it, and closing needs no target
            refused = self._refused_in_queue()
            if refused is not None:
                if await self._commit(plan.cancel_or_not_start(self._draft(), *refused)):
                    return False
                continue
            if granted.done():
                return True
            # It is stale once it is older than the maximum age, not as old: hence the millisecond.
            newest = plan.newest_beginning(self.run, self._outside)
            await self._rest(newest + self._context.max_age + timedelta(milliseconds=1), granted)

    def _refused_in_queue(self) -> tuple[str, Decision] | None:
        """Why the run, which waits for its target, must not act any more; None where it may."""
        if plan.has_begun(self.run):
            return None  # it had acted before a restart, and goes on
        if self._outside.breaker is not None:
            reason = f"the target was busy, and meanwhile the breaker opened: {self._outside.breaker}"
            return reason, Decision.BREAKER_OPEN
        stale = plan.why_stale(self._draft())
        if stale is None:
            return None
        blocker = self._services.locks.blocker(self.run.id, claims.of_run(self.run, self._services.actions))
        busy = f"the target was busy{f' with run {blocker}' if blocker else ''}, and {stale}"
        return busy, Decision.TARGET_BUSY

    async def _perform(self, act: PerformAttempt) -> AttemptOutcome:
        """Make the attempt that is on record, unless something keeps it from being made, and return how it ended."""
        state = self.run.step(act.key)
        name = (state.undo.action if act.undo and state.undo else state.action) or ""
        claim = f"{self.run.id}/undo" if act.undo else self.run.id
        metrics, actions = self._services.metrics, self._services.actions
        refused = await self._locate(act, name)
        if refused is not None:
            return refused
        targets = _targets_of(self.run, act, actions)
        worked_on = claims.of_attempt(targets, actions.action_class(name))
        async with self._services.locks.acting(claim, *worked_on) as waited:
            refused = await self._refused(act, targets, waited)
            if refused is not None:
                return refused
            try:
                call = self._call(act)
            except (errors.ConfigurationError, ValueError) as problem:
                return _unmakeable_outcome(act, str(problem))
            if await self._is_called_off(act):
                return CALLED_OFF
            began = self._now()
            if self._received_at is not None and not act.undo:
                metrics.alert_to_action_seconds.observe((began - self._received_at).total_seconds())
                self._received_at = None
            self._services.fence()
            self._then = None  # begun
            outcome = await _outcome_of(name, call, lambda call: actions.get(name).perform(call), began, metrics)
        metrics.step_seconds.labels(name, outcome.status).observe((self._now() - began).total_seconds())
        number = _attempts_of(state, act)[-1].number
        log.info("attempt ended", action=name, step=state.id, attempt=number, outcome=outcome.status)
        return outcome

    async def _refused(self, act: PerformAttempt, targets: Sequence[Target], waited: bool) -> AttemptOutcome | None:
        """The outcome of an attempt that must not be made; None where it may, and what it touches is on record."""
        actions = self._services.actions
        try:
            touched = _nodes_touched(self.run, act, actions, targets)
            self._touches |= touched
            if await self._is_called_off(act, waited):
                return CALLED_OFF
            has_acted = steps.has_acted_before(self.run, self.run.step(act.key), actions)
            barred = await self._services.breaker.why_barred(self.run, touched, has_acted=has_acted)
        except errors.ConfigurationError as problem:
            return _unmakeable_outcome(act, str(problem))
        if barred is not None:
            return _barred_outcome(act, barred)
        if waited:
            # The time in which another attempt was in flight on the same target is not taken from this one.
            later = _with_full_timeout(self.run, act, self._now())
            await self._commit(RunPlan(later, (), act))
        return None

    async def _is_called_off(self, act: PerformAttempt, waited: bool = False) -> bool:
        """Whether what has come since it was put on record keeps the attempt from being made; an undo nothing does."""
        if act.undo or not (waited or self._touched.is_set() or self._pause() is not None):
            return False
        await self._read_outside(most=10)
        return plan.is_called_off(self._draft(), act)

    async def _locate(self, act: PerformAttempt, name: str) -> AttemptOutcome | None:
        """Record where the action works, if it finds that out itself; return the outcome of the attempt if it cannot.

        An undo works where its action did, which is recorded already.
        """
        action = _multi_node_action(self._services.actions, name) if not act.undo else None
        if action is None:
            return None
        located: list[BaseModel] = []

        async def ask(call: Call) -> Mapping[str, Any]:
            located.append(await action.locate(call))
            return {}

        try:
            call = self._call(act)
        except (errors.ConfigurationError, ValueError) as problem:
            return _unmakeable_outcome(act, str(problem))
        outcome = await _outcome_of(name, call, ask, self._now(), self._services.metrics)
        if outcome.status != "applied":
            return outcome
        if located[0] is not call.params:
            draft = self._draft()
            steps.record_location(draft, act.key, located[0].model_dump(mode="json", by_alias=True, exclude_none=True))
            await self._commit(draft.plan(act))
        return None

    def _call(self, act: PerformAttempt) -> Call:
        state = self.run.step(act.key)
        alert = self._outside.alerts[0].alert
        report_wait = functools.partial(self._report_wait, state)
        clearance = functools.partial(self._clearance, state)
        return _call_of(self.run, act, self._services.actions, alert, self._now(), report_wait, clearance)

    async def _clearance(self, state: StepState) -> Clearance:
        """Return what has happened since the attempt of this step began. The driver stays touched, because the plan
        after the attempt has to read the change too."""
        outside = await self._outside_in_flight()
        if outside.last(OrderKind.CANCEL, OrderKind.UNDO):
            return "stop"
        draft = RunDraft(self.run, outside, self._context, self._now())
        if after_resolve.is_unwanted(draft, state):
            return "resolved"
        return "hold" if self._pause() is not None else "go_on"

    async def _outside_in_flight(self) -> OutsideState:
        """Return the external state as of the last touch. It is read once for each touch, however often an attempt
        asks."""
        while self._touched.is_set() and self._in_flight is None:
            touches = self._times_touched
            snapshot = await self._services.recorder.snapshot(self.run.id)
            if snapshot is None:
                break
            if touches == self._times_touched:
                self._in_flight = OutsideState(snapshot.alerts, snapshot.orders)
        return self._in_flight or self._outside

    async def _report_wait(self, state: StepState, reason: str) -> None:
        """Record what an attempt waits for, so that people can see why nothing happens."""
        run = replace(self.run, message=reason) if self.run.is_open else self.run
        await self._commit(RunPlan(run, (self._event(kinds.AttemptWaits(state.id, reason)),), Wait()))

    async def _commit(self, planned: RunPlan) -> bool:
        """Make a plan durable; then notify the actions whose outcomes are in it, and count a run that closed.

        Returns False, with nothing stored, in two cases. An alert that the plan had not seen has joined, and the plan
        closes the run or begins its undo: the reply to that alert said that this run handles it. A rejection that the
        plan had not seen was accepted, and the run waits for an answer: the question ends by that, and by nothing else.
        """
        before, after = self.run, planned.run
        closes = before.is_open and not after.is_open
        takes_back = before.is_open and any(event.kind == _UNDO_BEGINS for event in planned.events)
        if after is not before or planned.events:
            alerts = len(self._outside.alerts) if closes or takes_back else None
            rejected = rejections(self._outside.orders) if approval.waiting_step(before) is not None else None
            if not await self._services.recorder.record(after, before, planned.events, Seen(alerts, rejected)):
                self.touch()
                return False
        self.run = after
        for action, command_id in _ended_between(before, after):
            if self._services.actions.action_class(action) is not None:
                self._services.actions.get(action).outcome_saved(command_id)
        self._services.metrics.show_run(before, after)
        if closes:
            self._services.count_closed(after)
            if after.decision is not before.decision:
                self._services.metrics.decisions.labels(after.playbook, str(after.decision)).inc()
        for event in planned.events:
            if event.kind in UNDO_OVER:
                self._services.metrics.undos.labels(event.kind.removeprefix("undo_")).inc()
        self._note_planned()
        return True

    async def _read_outside(self, most: int = 1) -> None:
        while self._touched.is_set() and (most := most - 1) >= 0:  # in an alert storm something comes with every read
            # Cleared before the store is read, so that a change which comes while it is read is read next time.
            self._touched.clear()
            self._in_flight = None
            snapshot = await self._services.recorder.snapshot(self.run.id)
            if snapshot is not None:
                self._outside = OutsideState(snapshot.alerts, snapshot.orders)
        self._outside = self._outside.under(self._services.controls(), self._pause())

    async def _rest(self, until: datetime | None, *others: asyncio.Future[None]) -> None:
        """Wait until touched, until the moment has come, or until one of `others` is done."""
        waits: set[asyncio.Future[Any]] = {asyncio.ensure_future(self._touched.wait()), *others}
        if until is not None:
            waits.add(asyncio.ensure_future(self._services.clock.sleep_until(until)))
        try:
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for wait in waits.difference(others):
                wait.cancel()

    def _release_if_closed(self) -> None:
        if not self.run.is_open:
            self._services.locks.release(self.run.id)

    def _note_planned(self) -> None:
        if not self._touched.is_set():
            self._planned.set()

    def _pause(self) -> OperatorPause | None:
        return self._services.pause_of(self.run, self._touches)

    def _event(self, content: kinds.EventKind) -> Event:
        return recorded(content, self._now(), self.run.id)

    def _now(self) -> datetime:
        return self._services.clock.now()


def _attempts_of(state: StepState, act: PerformAttempt) -> tuple[Attempt, ...]:
    """The attempts of the step, or of its undo, that are on record; the last is the one to be made."""
    return state.undo_attempts if act.undo else state.attempts


def _call_of(
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
    *earlier, attempt = _attempts_of(state, act)
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


def _multi_node_action(actions: Actions, name: str) -> MultiNodeAction | None:
    """The action of this name, if it finds out itself on which nodes it works."""
    try:
        action = actions.get(name)
    except errors.PermanentFailure:
        return None  # the attempt fails with the reason
    return cast("MultiNodeAction", action) if _has_methods_of(type(action), MultiNodeAction) else None


def _targets_of(run: Run, act: PerformAttempt, actions: Actions) -> Sequence[Target]:
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


def _nodes_touched(run: Run, act: PerformAttempt, actions: Actions, targets: Sequence[Target]) -> set[str]:
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


def _barred_outcome(act: PerformAttempt, reason: str) -> AttemptOutcome:
    """The outcome of an attempt that the breaker keeps from being made."""
    return replace(_unmakeable_outcome(act, reason), barred_by=Decision.BREAKER_OPEN)


def _with_full_timeout(run: Run, act: PerformAttempt, now: datetime) -> Run:
    """The run with the attempt's deadline reset to its full timeout from `now`."""
    state = run.step(act.key)
    *earlier, last = _attempts_of(state, act)
    moved = (*earlier, replace(last, deadline=now + (last.deadline - last.started_at)))
    if act.undo and state.undo:
        return run.with_step(replace(state, undo=replace(state.undo, attempts=moved)))
    return run.with_step(replace(state, attempts=moved))


def _unmakeable_outcome(act: PerformAttempt, reason: str) -> AttemptOutcome:
    """The outcome of an attempt that this server cannot make. An undo is tried again, because another version of the
    server may be able to make it; the outcome of an attempt that a killed server may have made is unknown."""
    if act.undo:
        return AttemptOutcome("failed", error=reason)
    return AttemptOutcome("unknown" if act.resumed else "rejected", error=reason)


def _ended_between(before: Run, after: Run) -> Iterator[tuple[str, str]]:
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


async def _outcome_of(name: str, call: Call, work: Work, now: datetime, metrics: telemetry.Metrics) -> AttemptOutcome:
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
