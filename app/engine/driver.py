"""Carrying one run through: plan, commit, act, commit, and again, until nothing is due.

One driver owns a run while it is open or owes an undo; nobody else changes it. What comes from
outside (an alert that joined or resolved, an operator's order, pause) is written by whoever brings
it, and the driver is touched to read it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import datetime, timedelta

import structlog

from app import errors, telemetry
from app.domain.run import Controls, Decision, Event, OrderKind, Run, Status, StepState
from app.engine import plan
from app.engine.locks import TargetLocks
from app.engine.moves import Act, Context, Hold, Idle, Outcome, Plan, Signals
from app.engine.recorder import Recorder
from app.ports import Actions, Book, Call, Clock, Limits

GRACE = timedelta(seconds=5)
"""How long after its deadline an action may still report before it is cut off."""

log = telemetry.logger(__name__)


@dataclass(frozen=True, slots=True)
class Surroundings:
    """What every driver works with."""

    recorder: Recorder
    locks: TargetLocks
    actions: Actions
    clock: Clock
    limits: Limits
    metrics: telemetry.Metrics
    new_id: Callable[[], str]
    controls: Callable[[], Controls]


class Driver:
    """Owns one run. `drive` returns when the run is closed and nothing is due."""

    def __init__(
        self, run: Run, book: Book, signals: Signals, around: Surroundings, received_at: datetime | None
    ) -> None:
        self.run = run
        self._book = book
        self._signals = signals
        self._around = around
        self._context = Context(book, around.actions, around.new_id, around.limits.max_age)
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
        snapshot = await self._around.recorder.snapshot(self.run.id)
        if snapshot is not None:
            self.run = snapshot.run
            self._signals = Signals(snapshot.alerts, snapshot.orders, self._around.controls().paused)

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
                self._around.locks.release(self.run.id)
                await self._tell_turn()

    async def _carry_through(self) -> None:
        await self._take_in_signals()
        move = plan.advance(self.run, self._signals, self._context, self._now())
        while True:
            await self._commit(move)
            match move.then:
                case Idle():
                    if not self._touched.is_set():
                        return
                    outcome = None
                case Hold(until):
                    self._release_if_closed()
                    await self._rest(until)
                    outcome = None
                case Act() as act:
                    outcome = await self._perform(act)
            await self._take_in_signals()
            if outcome is None:
                move = plan.advance(self.run, self._signals, self._context, self._now())
            else:
                move = plan.conclude_and_advance(self.run, act, outcome, self._signals, self._context, self._now())

    async def _take_target(self) -> bool:
        """Hold the target, waiting in the queue if need be; False where the run closed instead."""
        target = self.run.target
        assert target is not None
        if self._around.locks.try_acquire(self.run.id, target):
            return True
        granted = self._around.locks.wait(self.run.id, target)
        holder = self._around.locks.holder(target)
        waiting = replace(self.run, status=Status.WAITING, waiting_on="target")
        await self._commit(Plan(waiting, (self._event("waiting_for_target", holder=holder),), Hold()))
        while True:
            await self._take_in_signals()
            if self._signals.last(OrderKind.CANCEL, OrderKind.UNDO):
                return True  # planning closes it, and closing needs no target
            why = plan.stale(self.run, self._signals, self._around.limits.max_age, self._now())
            if why is not None:
                why = f"the target was busy, and {why}"
                await self._commit(
                    plan.close_stale(self.run, self._signals, self._context, self._now(), why, Decision.TARGET_BUSY)
                )
                return False
            if granted.done():
                return await self._may_still_start()
            newest = max((record.alert.starts_at for record in self._signals.alerts), default=self.run.created_at)
            await self._rest(newest + self._around.limits.max_age + timedelta(milliseconds=1), granted)

    async def _may_still_start(self) -> bool:
        """Whether a run that was queued may begin; False where the breaker opened meanwhile, and closed it."""
        controls = self._around.controls()
        if not controls.breaker_open or self.run.acted_at is not None:
            return True
        why = controls.breaker_reason or "the breaker is open"
        await self._commit(
            plan.close_stale(self.run, self._signals, self._context, self._now(), why, Decision.BREAKER_OPEN)
        )
        return False

    async def _perform(self, act: Act) -> Outcome:
        state = self.run.step(act.key)
        attempts = state.undo.attempts if act.undo and state.undo else state.attempts
        try:
            call, name = self._call(state, act)
        except (errors.ConfigurationError, ValueError) as problem:
            return Outcome("rejected", error=str(problem))
        if self._received_at is not None and not act.undo:
            self._around.metrics.alert_to_action_seconds.observe((self._now() - self._received_at).total_seconds())
            self._received_at = None
        claim = f"{self.run.id}/undo" if act.undo else self.run.id
        async with self._around.locks.acting(claim, call.target):
            began = self._now()
            outcome = await self._attempt(name, call)
        seconds = (self._now() - began).total_seconds()
        self._around.metrics.step_seconds.labels(name, outcome.status).observe(seconds)
        log.info("attempt ended", action=name, step=state.id, attempt=attempts[-1].number, outcome=outcome.status)
        return outcome

    async def _attempt(self, name: str, call: Call) -> Outcome:
        """One call of the action, every way it can end made an `Outcome`."""
        limit = max((call.deadline - self._now() + GRACE).total_seconds(), 0.0)
        try:
            async with asyncio.timeout(limit):
                return Outcome("applied", await self._around.actions.get(name).perform(call))
        except errors.TemporaryFailure as failure:
            return Outcome("failed", failure.output, str(failure))
        except errors.PermanentFailure as failure:
            return Outcome("rejected", failure.output, str(failure))
        except errors.OutcomeUnknown as failure:
            return Outcome("unknown", failure.output, str(failure))
        except TimeoutError:
            return Outcome("unknown", error="the action did not end in time")
        except Exception as failure:  # an action's bug ends its attempt, not the server
            self._around.metrics.loop_errors.labels("action").inc()
            log.exception("an action failed in a way that it does not declare", action=name)
            return Outcome("unknown", error=f"unexpected {type(failure).__name__} in the action; see the server's log")

    def _call(self, state: StepState, act: Act) -> tuple[Call, str]:
        undo = state.undo if act.undo else None
        name = undo.action if undo else state.action or ""
        params = undo.params if undo else state.params
        attempts = undo.attempts if undo else state.attempts
        attempt = attempts[-1]
        repeated = len(attempts) > 1 and attempts[-2].command_id == attempt.command_id
        spec = self._around.actions.spec(name)
        assert self.run.target is not None
        if spec is None:
            raise errors.ConfigurationError(f"run {self.run.id} needs the action {name!r}, which this server lacks")
        first = self._signals.alerts[0].alert
        call = Call(
            command_id=attempt.command_id,
            run_id=self.run.id,
            playbook=self.run.playbook,
            target=self.run.target,
            params=spec.Params.model_validate(params),
            reason=f"{first.name}: {undo.because}" if undo else first.name,
            issued_at=attempt.started_at,
            deadline=attempt.deadline,
            alert=first,
            resumed=act.resumed or repeated,
            undo_of=undo.undo_of if undo else None,
            tell=lambda what: self._tell(state, what),
        )
        return call, name

    async def _tell(self, state: StepState, what: str) -> None:
        """Note what an attempt waits for, so that nobody has to guess why nothing happens."""
        run = replace(self.run, message=what) if self.run.is_open else self.run
        await self._commit(Plan(run, (self._event("attempt_waits", step=state.id, why=what),), Hold()))

    async def _commit(self, move: Plan) -> None:
        """Make a plan durable; then tell the action of outcomes that are, and count what closed."""
        before, self.run = self.run, move.run
        if move.run is not before or move.events:
            await self._around.recorder.record(move.run, before, move.events)
        self._settle(before, move.run)
        self._around.metrics.undos_owed.inc(move.run.owes_undo - before.owes_undo)
        if before.is_open and not move.run.is_open:
            self._around.metrics.open_runs.dec()
            self._around.metrics.runs.labels(move.run.playbook, str(move.run.status)).inc()
            log.info(
                "run closed", status=str(move.run.status), decision=str(move.run.decision), message=move.run.message
            )
        for event in move.events:
            if event.kind in ("undo_done", "undo_failed"):
                self._around.metrics.undos.labels(event.kind.removeprefix("undo_")).inc()
        if not self._touched.is_set():
            await self._tell_turn()

    def _settle(self, before: Run, after: Run) -> None:
        for old, new in zip(before.steps, after.steps, strict=True):
            if old is new:
                continue
            pairs = [(new.action, old.attempts, new.attempts)]
            if old.undo and new.undo:
                pairs.append((new.undo.action, old.undo.attempts, new.undo.attempts))
            for name, was, is_ in pairs:
                if name and was and was[-1].status == "running" and is_[len(was) - 1].status != "running":
                    self._around.actions.get(name).settled(was[-1].command_id)

    async def _take_in_signals(self) -> None:
        paused = self._around.controls().paused
        if self._touched.is_set():
            self._touched.clear()
            snapshot = await self._around.recorder.snapshot(self.run.id)
            if snapshot is not None:
                self._signals = Signals(snapshot.alerts, snapshot.orders, paused)
        elif self._signals.paused != paused:
            self._signals = replace(self._signals, paused=paused)

    async def _rest(self, until: datetime | None, *others: asyncio.Future[None]) -> None:
        """Wait until touched, until the moment has come, or until one of `others` is done."""
        waits: set[asyncio.Future[None]] = {asyncio.ensure_future(self._wait_for_touch()), *others}
        if until is not None:
            waits.add(asyncio.ensure_future(self._around.clock.sleep_until(until)))
        try:
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for wait in waits.difference(others):
                wait.cancel()

    async def _wait_for_touch(self) -> None:
        await self._touched.wait()

    def _release_if_closed(self) -> None:
        if not self.run.is_open:
            self._around.locks.release(self.run.id)

    async def _tell_turn(self) -> None:
        async with self._turns:
            self._turns.notify_all()

    def _event(self, kind: str, **data: object) -> Event:
        return Event(kind, self._now(), self.run.id, data=data)

    def _now(self) -> datetime:
        return self._around.clock.now()
