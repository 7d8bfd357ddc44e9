"""Carrying one run through: plan, commit, act, commit, and again, until nothing is due.

One driver owns a run while it is open or owes an undo; nobody else changes it. What comes from
outside (an alert that joined or resolved, an operator's order, pause) is written by whoever brings
it, and the driver is touched to read it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from typing import Any

import structlog
from pydantic import BaseModel

from trainmedic_server import errors, telemetry
from trainmedic_server.domain.run import Controls, Decision, Event, OrderKind, Run, Status, StepState
from trainmedic_server.engine import attempts, plan, steps
from trainmedic_server.engine.locks import TargetLocks
from trainmedic_server.engine.plan_values import (
    AttemptOutcome,
    Idle,
    OutsideState,
    PerformAttempt,
    PlanningContext,
    RunDraft,
    RunPlan,
    Wait,
)
from trainmedic_server.engine.recorder import Recorder
from trainmedic_server.ports.actions import Actions, Call, Clearance
from trainmedic_server.ports.fence import Fence
from trainmedic_server.ports.limits import EngineLimits
from trainmedic_server.ports.outside import Clock
from trainmedic_server.ports.playbooks import CompiledPlaybook

log = telemetry.logger(__name__)


@dataclass(frozen=True, slots=True)
class DriverServices:
    """What every driver works with."""

    recorder: Recorder
    locks: TargetLocks
    actions: Actions
    clock: Clock
    limits: EngineLimits
    metrics: telemetry.Metrics
    new_id: Callable[[], str]
    controls: Callable[[], Controls]
    fence: Fence
    """Does not return where this server is not the one any more that may act."""

    def planning_context(self, book: CompiledPlaybook | None) -> PlanningContext:
        return PlanningContext(book, self.actions, self.new_id, self.limits.max_age)

    def count_closed(self, run: Run) -> None:
        """Let the metrics and the log tell that a run has closed."""
        self.metrics.open_runs.dec()
        self.metrics.runs.labels(run.playbook, str(run.status)).inc()
        log.info("run closed", status=str(run.status), decision=str(run.decision), message=run.message)


class Driver:
    """Owns one run. `drive` returns when the run is closed and nothing is due."""

    def __init__(
        self,
        run: Run,
        book: CompiledPlaybook | None,
        outside: OutsideState,
        services: DriverServices,
        received_at: datetime | None,
    ) -> None:
        self.run = run
        self._outside = outside
        self._services = services
        self._context = services.planning_context(book)
        self._received_at = received_at
        self._touched = asyncio.Event()
        self._turns = asyncio.Condition()

    def touch(self) -> None:
        """Something outside has changed: read it before the next move."""
        self._touched.set()

    @property
    def is_touched(self) -> bool:
        """Whether there is something that it has not read yet."""
        return self._touched.is_set()

    async def start_over(self) -> None:
        """Take the run as the store has it, after an error left this one in doubt."""
        snapshot = await self._services.recorder.snapshot(self.run.id)
        if snapshot is not None:
            self.run = snapshot.run
            self._outside = OutsideState(snapshot.alerts, snapshot.orders)

    async def turned(self) -> None:
        """Return after the driver has next taken in what it was touched for."""
        async with self._turns:
            await self._turns.wait()

    async def drive(self) -> None:
        with structlog.contextvars.bound_contextvars(run_id=self.run.id, playbook=self.run.playbook):
            try:
                if not self.run.is_open or await self._take_target():
                    await self._carry_through()
            finally:
                self._services.locks.release(self.run.id)
                await self._tell_turn()

    async def _carry_through(self) -> None:
        ended: tuple[PerformAttempt, AttemptOutcome] | None = None
        while True:
            await self._take_in_outside()
            move = self._plan(ended)
            if not await self._commit(move):
                continue
            ended = None
            match move.then:
                case Idle():
                    if not self._touched.is_set():
                        return
                case Wait(until):
                    self._release_if_closed()
                    await self._rest(until)
                case PerformAttempt() as act:
                    outcome = await self._perform(act)
                    ended = (act, outcome) if outcome is not None else None

    def _plan(self, ended: tuple[PerformAttempt, AttemptOutcome] | None) -> RunPlan:
        if ended is None:
            return plan.advance(self.run, self._outside, self._context, self._now())
        return plan.conclude_and_advance(self.run, *ended, self._outside, self._context, self._now())

    async def _take_target(self) -> bool:
        """Hold the target, waiting in the queue if need be; False where the run closed instead."""
        target = self.run.target
        assert target is not None
        if self._services.locks.try_acquire(self.run.id, target):
            return True
        granted = self._services.locks.wait(self.run.id, target)
        holder = self._services.locks.holder(target)
        waiting = replace(self.run, status=Status.WAITING, waiting_on="target")
        await self._commit(RunPlan(waiting, (self._event("waiting_for_target", holder=holder),), Wait()))
        while True:
            await self._take_in_outside()
            if self._outside.last(OrderKind.CANCEL, OrderKind.UNDO):
                return True  # planning closes it, and closing needs no target
            refused = self._refused_in_queue()
            if refused is not None:
                why, decision = refused
                move = plan.call_off(self.run, self._outside, self._context, self._now(), why, decision)
                if await self._commit(move):
                    return False
                continue
            if granted.done():
                return True
            newest = plan.newest_beginning(self.run, self._outside)
            await self._rest(newest + self._context.max_age + timedelta(milliseconds=1), granted)

    def _refused_in_queue(self) -> tuple[str, Decision] | None:
        """Why the run must not act any more when its turn comes; None where it may."""
        if plan.has_begun(self.run):
            return None  # it had acted before a restart, and goes on
        if self._outside.breaker is not None:
            return (
                f"the target was busy, and meanwhile the breaker opened: {self._outside.breaker}",
                Decision.BREAKER_OPEN,
            )
        why = plan.stale(self.run, self._outside, self._context.max_age, self._now())
        return (f"the target was busy, and {why}", Decision.TARGET_BUSY) if why is not None else None

    async def _perform(self, act: PerformAttempt) -> AttemptOutcome | None:
        """Make the attempt that is recorded, and say how it ended; None where it was not made after all."""
        state = self.run.step(act.key)
        name = (state.undo.action if act.undo and state.undo else state.action) or ""
        claim = f"{self.run.id}/undo" if act.undo else self.run.id
        refused = await self._locate(act, name)
        if refused is not None:
            return refused
        async with self._services.locks.acting(
            claim, *attempts.targets_of(self.run, act, self._services.actions)
        ) as waited:
            if not act.undo and self._services.controls().paused and self._is_harmful(name):
                return None  # paused since it was recorded; planning holds it back
            if waited:
                await self._renew_deadline(act)
            try:
                call = self._call(act)
            except (errors.ConfigurationError, ValueError) as problem:
                return self._impossible(act, str(problem))
            if self._received_at is not None and not act.undo:
                self._services.metrics.alert_to_action_seconds.observe(
                    (self._now() - self._received_at).total_seconds()
                )
                self._received_at = None
            self._services.fence()
            began = self._now()
            outcome = await self._outcome(name, call, lambda call: self._services.actions.get(name).perform(call))
        seconds = (self._now() - began).total_seconds()
        self._services.metrics.step_seconds.labels(name, outcome.status).observe(seconds)
        number = attempts.made(self.run, act)[-1].number
        log.info("attempt ended", action=name, step=state.id, attempt=number, outcome=outcome.status)
        return outcome

    async def _locate(self, act: PerformAttempt, name: str) -> AttemptOutcome | None:
        """Have it on record where an action works that finds this out itself; how the attempt ended if it cannot."""
        action = attempts.placed(self._services.actions, name) if not act.undo else None
        if action is None:
            return None
        found: list[BaseModel] = []

        async def ask(call: Call) -> Mapping[str, Any]:
            found.append(await action.locate(call))
            return {}

        try:
            call = self._call(act)
        except (errors.ConfigurationError, ValueError) as problem:
            return self._impossible(act, str(problem))
        outcome = await self._outcome(name, call, ask)
        if outcome.status != "applied":
            return outcome
        if found[0] is not call.params:
            draft = RunDraft(self.run, self._outside, self._context, self._now())
            steps.located(draft, act.key, found[0].model_dump(mode="json", by_alias=True, exclude_none=True))
            await self._commit(RunPlan(draft.run, tuple(draft.events), act))
        return None

    async def _renew_deadline(self, act: PerformAttempt) -> None:
        """Give an attempt that had to wait for another one's end the time that it lost, on record."""
        tried = attempts.made(self.run, act)
        last = tried[-1]
        later = (*tried[:-1], replace(last, deadline=self._now() + (last.deadline - last.started_at)))
        state = self.run.step(act.key)
        if act.undo and state.undo:
            state = replace(state, undo=replace(state.undo, attempts=later))
        else:
            state = replace(state, attempts=later)
        await self._commit(RunPlan(self.run.with_step(state), (), act))

    def _impossible(self, act: PerformAttempt, why: str) -> AttemptOutcome:
        """The attempt cannot be made by this server. An undo is tried again, for another version may be able to."""
        if act.undo:
            return AttemptOutcome("failed", error=why)
        return AttemptOutcome("unknown" if act.resumed else "rejected", error=why)

    def _is_harmful(self, name: str) -> bool:
        action = self._services.actions.spec(name)
        return action is not None and action.harmful

    async def _outcome(self, name: str, call: Call, work: attempts.Work) -> AttemptOutcome:
        return await attempts.outcome_of(name, call, work, self._now(), self._services.metrics)

    def _call(self, act: PerformAttempt) -> Call:
        state = self.run.step(act.key)
        alert = self._outside.alerts[0].alert
        return attempts.call_of(
            self.run, act, self._services.actions, alert, lambda what: self._tell(state, what), self._word
        )

    async def _word(self) -> Clearance:
        """What operators have said since the attempt began. It stays to be taken in: an attempt plans nothing."""
        if self._touched.is_set():
            snapshot = await self._services.recorder.snapshot(self.run.id)
            if snapshot is not None and OutsideState(snapshot.alerts, snapshot.orders).last(OrderKind.CANCEL):
                return "stop"
        return "hold" if self._services.controls().paused else "go_on"

    async def _tell(self, state: StepState, what: str) -> None:
        """Note what an attempt waits for, so that nobody has to guess why nothing happens."""
        run = replace(self.run, message=what) if self.run.is_open else self.run
        await self._commit(RunPlan(run, (self._event("attempt_waits", step=state.id, why=what),), Wait()))

    async def _commit(self, move: RunPlan) -> bool:
        """Make a plan durable; then tell the action of outcomes that are, and count what closed.

        False where nothing was kept, because an alert joined that a run which closes, or begins to
        take back, had not seen.
        """
        before = self.run
        closes = before.is_open and not move.run.is_open
        takes_back = before.is_open and any(event.kind == "undo_started" for event in move.events)
        if move.run is not before or move.events:
            seen = len(self._outside.alerts) if closes or takes_back else None
            if not await self._services.recorder.record(move.run, before, move.events, seen):
                self.touch()
                return False
        self.run = move.run
        self._settle(before, move.run)
        self._services.metrics.undos_owed.inc(move.run.owes_undo - before.owes_undo)
        if closes:
            self._services.count_closed(move.run)
        for event in move.events:
            if event.kind in ("undo_done", "undo_failed"):
                self._services.metrics.undos.labels(event.kind.removeprefix("undo_")).inc()
        if not self._touched.is_set():
            await self._tell_turn()
        return True

    def _settle(self, before: Run, after: Run) -> None:
        for old, new in zip(before.steps, after.steps, strict=True):
            if old is new:
                continue
            pairs = [(new.action, old.attempts, new.attempts)]
            if old.undo and new.undo:
                pairs.append((new.undo.action, old.undo.attempts, new.undo.attempts))
            for name, was, is_ in pairs:
                if not (name and was and was[-1].status == "running" and is_[len(was) - 1].status != "running"):
                    continue
                if self._services.actions.spec(name) is not None:
                    self._services.actions.get(name).outcome_saved(was[-1].command_id)

    async def _take_in_outside(self) -> None:
        if self._touched.is_set():
            self._touched.clear()
            snapshot = await self._services.recorder.snapshot(self.run.id)
            if snapshot is not None:
                self._outside = OutsideState(snapshot.alerts, snapshot.orders)
        self._outside = self._outside.under(self._services.controls())

    async def _rest(self, until: datetime | None, *others: asyncio.Future[None]) -> None:
        """Wait until touched, until the moment has come, or until one of `others` is done."""
        waits: set[asyncio.Future[None]] = {asyncio.ensure_future(self._wait_for_touch()), *others}
        if until is not None:
            waits.add(asyncio.ensure_future(self._services.clock.sleep_until(until)))
        try:
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for wait in waits.difference(others):
                wait.cancel()

    async def _wait_for_touch(self) -> None:
        await self._touched.wait()

    def _release_if_closed(self) -> None:
        if not self.run.is_open:
            self._services.locks.release(self.run.id)

    async def _tell_turn(self) -> None:
        async with self._turns:
            self._turns.notify_all()

    def _event(self, kind: str, **data: object) -> Event:
        return Event(kind, self._now(), self.run.id, data=data)

    def _now(self) -> datetime:
        return self._services.clock.now()
