"""Driving one run: plan, commit, act, commit, and again, until nothing is due.

One driver owns a run while it is open or owes an undo; nothing else changes it then (``workers`` closes a run after a
restart before it makes a driver). What comes from outside (an alert
that joined or resolved, an operator's order, pause) is written beside the run by whoever brings it; then the driver
is touched, and reads it before it plans again. So there are no locks around runs, and no lost updates.

Who calls it: ``workers``. Not here: what a run does next (``plan``), and how an attempt ends (``attempts``).
"""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Mapping, Sequence
from datetime import datetime, timedelta
from typing import Any

import structlog
from msgspec.structs import replace
from pydantic import BaseModel

from trainmedic_server import errors, telemetry
from trainmedic_server.domain import approval
from trainmedic_server.domain.pause import OperatorPause
from trainmedic_server.domain.run import Decision, Event, OrderKind, Run, Status, StepState
from trainmedic_server.domain.target import Target
from trainmedic_server.engine import after_resolve, attempts, claims, plan, steps
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
from trainmedic_server.ports.actions import Call, Clearance
from trainmedic_server.ports.playbooks import CompiledPlaybook

EndedAttempt = tuple[PerformAttempt, AttemptOutcome]

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
        """`then` is what is on record to be done first, and not begun."""
        self.run = run
        self._outside = outside
        self._services = services
        self._context = services.planning_context(playbook)
        self._received_at = received_at
        self._then = then
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
        then, self._then = self._then, None
        if then is None:
            then = await self._next(None)
        while not isinstance(then, Idle) or self._touched.is_set():
            then = await self._next(await self._carry_out(then))

    async def _next(self, ended: EndedAttempt | None) -> Instruction:
        """What to do next, by the outcome of the attempt that has ended and all that came from outside; it is on
        record then."""
        self._then = None
        while True:
            await self._read_outside()
            draft = self._draft()
            next_plan = plan.advance(draft) if ended is None else plan.conclude_and_advance(draft, *ended)
            if await self._commit(next_plan):  # else plan again, with the alert that has joined meanwhile
                return next_plan.then

    async def _carry_out(self, then: Instruction) -> EndedAttempt | None:
        match then:
            case Wait(until):
                self._release_if_closed()
                await self._rest(until)
            case PerformAttempt() as act:
                self._then = act
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
        await self._commit(RunPlan(waiting, (self._event("waiting_for_target", holder=holder),), Wait()))
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
        targets = attempts.targets_of(self.run, act, actions)
        worked_on = claims.of_attempt(targets, actions.action_class(name))
        async with self._services.locks.acting(claim, *worked_on) as waited:
            refused = await self._refused(act, targets, waited)
            if refused is not None:
                return refused
            try:
                call = self._call(act)
            except (errors.ConfigurationError, ValueError) as problem:
                return attempts.unmakeable_outcome(act, str(problem))
            if await self._is_called_off(act):
                return CALLED_OFF
            began = self._now()
            if self._received_at is not None and not act.undo:
                metrics.alert_to_action_seconds.observe((began - self._received_at).total_seconds())
                self._received_at = None
            self._services.fence()
            self._then = None  # begun
            outcome = await self._outcome(name, call, lambda call: actions.get(name).perform(call), began)
        metrics.step_seconds.labels(name, outcome.status).observe((self._now() - began).total_seconds())
        number = attempts.attempts_of(state, act)[-1].number
        log.info("attempt ended", action=name, step=state.id, attempt=number, outcome=outcome.status)
        return outcome

    async def _refused(self, act: PerformAttempt, targets: Sequence[Target], waited: bool) -> AttemptOutcome | None:
        """The outcome of an attempt that must not be made; None where it may, and what it touches is on record."""
        actions = self._services.actions
        try:
            touched = attempts.nodes_touched(self.run, act, actions, targets)
            self._touches |= touched
            if await self._is_called_off(act, waited):
                return CALLED_OFF
            has_acted = steps.has_acted_before(self.run, self.run.step(act.key), actions)
            barred = await self._services.breaker.why_barred(self.run, touched, has_acted=has_acted)
        except errors.ConfigurationError as problem:
            return attempts.unmakeable_outcome(act, str(problem))
        if barred is not None:
            return attempts.barred_outcome(act, barred)
        if waited:
            # The time in which another attempt was in flight on the same target is not taken from this one.
            later = attempts.with_full_timeout(self.run, act, self._now())
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
        action = attempts.multi_node_action(self._services.actions, name) if not act.undo else None
        if action is None:
            return None
        located: list[BaseModel] = []

        async def ask(call: Call) -> Mapping[str, Any]:
            located.append(await action.locate(call))
            return {}

        try:
            call = self._call(act)
        except (errors.ConfigurationError, ValueError) as problem:
            return attempts.unmakeable_outcome(act, str(problem))
        outcome = await self._outcome(name, call, ask, self._now())
        if outcome.status != "applied":
            return outcome
        if located[0] is not call.params:
            draft = self._draft()
            steps.record_location(draft, act.key, located[0].model_dump(mode="json", by_alias=True, exclude_none=True))
            await self._commit(draft.plan(act))
        return None

    async def _outcome(self, name: str, call: Call, work: attempts.Work, now: datetime) -> AttemptOutcome:
        return await attempts.outcome_of(name, call, work, now, self._services.metrics)

    def _call(self, act: PerformAttempt) -> Call:
        state = self.run.step(act.key)
        alert = self._outside.alerts[0].alert
        report_wait = functools.partial(self._report_wait, state)
        clearance = functools.partial(self._clearance, state)
        return attempts.call_of(self.run, act, self._services.actions, alert, self._now(), report_wait, clearance)

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
        await self._commit(RunPlan(run, (self._event("attempt_waits", step=state.id, why=reason),), Wait()))

    async def _commit(self, planned: RunPlan) -> bool:
        """Make a plan durable; then notify the actions whose outcomes are in it, and count a run that closed.

        Returns False, with nothing stored, in two cases. An alert that the plan had not seen has joined, and the plan
        closes the run or begins its undo: the reply to that alert said that this run handles it. A rejection that the
        plan had not seen was accepted, and the run waits for an answer: the question ends by that, and by nothing else.
        """
        before, after = self.run, planned.run
        closes = before.is_open and not after.is_open
        takes_back = before.is_open and any(event.kind == "undo_started" for event in planned.events)
        if after is not before or planned.events:
            alerts = len(self._outside.alerts) if closes or takes_back else None
            rejected = rejections(self._outside.orders) if approval.waiting_step(before) is not None else None
            if not await self._services.recorder.record(after, before, planned.events, Seen(alerts, rejected)):
                self.touch()
                return False
        self.run = after
        for action, command_id in attempts.ended_between(before, after):
            if self._services.actions.action_class(action) is not None:
                self._services.actions.get(action).outcome_saved(command_id)
        self._services.metrics.show_run(before, after)
        if closes:
            self._services.count_closed(after)
            if after.decision is not before.decision:
                self._services.metrics.decisions.labels(after.playbook, str(after.decision)).inc()
        for event in planned.events:
            if event.kind in ("undo_done", "undo_closed"):
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

    def _event(self, kind: str, **data: object) -> Event:
        return Event(kind, self._now(), self.run.id, data=data)

    def _now(self) -> datetime:
        return self._services.clock.now()
