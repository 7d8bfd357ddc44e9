"""Execution of one run: plan, commit, act, commit, repeated until nothing is due.

Only its driver changes a run that is open or owes an undo. So runs need no locks.
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

from trainmedic_core import duration
from trainmedic_core.target import Target
from trainmedic_server import errors, telemetry
from trainmedic_server.domain import approval, wait_events
from trainmedic_server.domain import event_kinds as kinds
from trainmedic_server.domain.claim import Claim
from trainmedic_server.domain.event_codec import UNDO_OVER, name_of, recorded
from trainmedic_server.domain.identity import Unresolved
from trainmedic_server.domain.modes import Mode
from trainmedic_server.domain.pause import OperatorPause
from trainmedic_server.domain.run import Decision, Event, OrderKind, Run, Status, StepState
from trainmedic_server.engine import after_resolve, attempt_targets, claims, performing, plan, steps, windows
from trainmedic_server.engine.engine_services import EngineServices
from trainmedic_server.engine.group_follower import GroupFollower
from trainmedic_server.engine.looking import Look, Sight
from trainmedic_server.engine.matching import also_of
from trainmedic_server.engine.plan_values import (
    CALLED_OFF,
    AttemptOutcome,
    Idle,
    Instruction,
    OutsideState,
    PerformAttempt,
    RunDraft,
    RunPlan,
    TakeTarget,
    Wait,
)
from trainmedic_server.engine.recorder import RunSnapshot, Seen, rejections
from trainmedic_server.engine.rollout import StartMembers
from trainmedic_server.engine.turns import TURN
from trainmedic_server.engine.watching import Watching, observe
from trainmedic_server.ports.actions import Call, Clearance
from trainmedic_server.ports.playbooks import CompiledPlaybook

EndedAttempt = tuple[PerformAttempt, AttemptOutcome]
_UNDO_BEGINS = name_of(kinds.UndoStarted)  # kind of event

log = telemetry.logger(__name__)


class Driver:
    def __init__(
        self,
        run: Run,
        playbook: CompiledPlaybook | None,
        outside: OutsideState,
        services: EngineServices,
        received_at: datetime | None,
        then: Instruction | None = None,
    ) -> None:
        self.run = run
        self._outside = outside
        self._services = services
        self._context = services.planning_context(playbook)
        self._received_at = received_at  # of the alert, until the first act; None after a restart
        self._then = then  # Next instruction, of the committed plan. None while planning and during an attempt.
        self._touched_nodes: set[str] = set()  # by this driver's attempts: pauses of these nodes hold the run
        # External changes read during an attempt. The driver stays touched, for the plan after the attempt.
        self._read_in_flight: OutsideState | None = None
        self._times_touched = 0
        self._touched = asyncio.Event()
        self._is_planned = False  # the plan includes all touches
        self._planned: asyncio.Event | None = None  # None if nobody waits for the plan
        self._group = GroupFollower(services, run) if run.is_group and not run.is_limited else None
        self._has_target = True  # False while the run waits without a lock before its first act
        # Done once the lock is acquired. None without a queued claim.
        self._granted: asyncio.Future[None] | None = None
        self._watching: Watching | None = None  # of the present polled wait
        self._new_sight: Sight | None = None  # the wait's result since the last plan
        self._look_once = False  # after a wait without lock, the condition is checked again under the lock

    def touch(self) -> None:
        """Make the driver reload external changes before it plans again."""
        self._touched.set()
        self._is_planned = False
        if self._planned is not None:
            self._planned.clear()
        self._read_in_flight, self._times_touched = None, self._times_touched + 1

    @property
    def snapshot(self) -> RunSnapshot:
        return RunSnapshot(self.run, tuple(self._outside.alerts), tuple(self._outside.orders))

    @property
    def sight(self) -> Sight | None:
        return self._watching.sight if self._watching is not None else None

    @property
    def is_touched(self) -> bool:
        return self._touched.is_set()

    async def reload(self) -> None:
        """Reload the run: after an error, memory may be ahead of the store."""
        self._then = None
        snapshot = await self._services.recorder.snapshot(self.run.id)
        if snapshot is not None:
            self.run = snapshot.run
            self._outside = OutsideState(snapshot.alerts, snapshot.orders)

    async def take_back_unbegun(self) -> None:
        """Remove a persisted attempt that has not started: the next server would take it for interrupted."""
        # Undos stay: they may be repeated. Resumed attempts stay: an earlier server may have made them.
        act = self._then
        if isinstance(act, PerformAttempt) and not act.undo and not act.resumed:
            draft = self._draft()
            steps.take_back_attempt(draft, act.key)
            await self._commit(draft.plan(Idle()))

    async def wait_until_planned(self) -> None:
        if self._is_planned:
            return
        self._planned = self._planned or asyncio.Event()
        await self._planned.wait()

    # In the run's own task (`engine.workers`). Returns once nothing is due; a later touch makes a new driver.
    async def drive(self) -> None:
        structlog.contextvars.bind_contextvars(run_id=self.run.id, playbook=self.run.playbook)  # only of its own task
        try:
            if self._group is not None and self.run.is_open:
                await self._group.follow()
            if not self.run.is_open or (await self._take_turn() and await self._take_target()):
                self._has_target = not claims.is_unlocked(self.run)
                if self._then is None:
                    await self._plan_next(None)
                while not isinstance(self._then, Idle) or self._touched.is_set():
                    if not isinstance(self._then, (Look, TakeTarget)):
                        self._stop_watching()
                    self._drop_unneeded_target()
                    if isinstance(self._then, PerformAttempt):
                        await self._plan_next((self._then, await self._perform(self._then)))
                    else:
                        await self._carry_out()
                        await self._plan_next(None)
        finally:
            self._stop_watching()
            self._granted, self._look_once, self._new_sight = None, False, None
            if self._group is not None:
                self._group.leave()
            self._services.locks.release(self.run.id)
            self._services.turns.leave(self.run.playbook, self.run.id)
            self._note_planned()

    async def _plan_next(self, ended: EndedAttempt | None) -> None:
        self._then = None
        while self._then is None:
            await self._read_outside()
            draft = self._draft()
            next_plan = plan.advance(draft) if ended is None else plan.conclude_and_advance(draft, *ended)
            if await self._commit(next_plan):  # otherwise plan again with the alert or answer that came
                self._then = next_plan.then
        self._new_sight = None
        self._look_once = isinstance(self._then, Look) and self._then.once

    async def _carry_out(self) -> None:
        match self._then:
            case Look() as look:
                await self._watch(look)
            case TakeTarget(until):
                await self._queue_for_target(until)
            case Wait(until):
                self._release_if_closed()
                await self._wait_for_change(until)
                if self._group is not None:
                    self._group.allow_next_start()
            case StartMembers() as order:
                await self._start_members(order)

    async def _start_members(self, order: StartMembers) -> None:
        assert self._group is not None
        assert self._context.playbook is not None
        self._services.fence()
        touches = self._times_touched
        started = await self._group.start(order, self.run, self._context.playbook, self._outside)
        self._then = None
        if touches != self._times_touched:  # the members may not know what the parent has not read yet
            self._services.touch(started)

    def _draft(self) -> RunDraft:
        group = self._group.progress if self._group is not None else None
        return RunDraft(
            self.run,
            self._outside,
            self._context,
            self._now(),
            group,
            has_target=self._has_target,
            look_once=self._look_once,
            sight=self._new_sight,
        )

    async def _watch(self, look: Look) -> None:  # until a plan is needed: news, the deadline, or a look of `once`
        if self._watching is None or self._watching.sight.key != look.key:
            self._stop_watching()
            self._watching = Watching(look.key)
        watching = self._watching
        while not (self._touched.is_set() or self._has_member_news()) and self._now() < look.deadline:
            if watching.task is None:
                due = watching.sight.due(look, self._now())
                if self._now() < due:
                    await self._wait_for_change(min(due, look.deadline))
                    continue
                self._services.fence()
                watching.begin(observe(self._services, self._draft(), look))
            assert watching.task is not None
            await self._wait_for_change(look.deadline, watching.task)
            if watching.task.done() and (watching.take(look) or look.once):
                self._new_sight = watching.sight
                return
        if not look.once:  # the deadline, a touch or member news needs a plan
            self._new_sight = watching.sight

    def _has_member_news(self) -> bool:
        return self._group is not None and self._group.news.is_set()

    def _stop_watching(self) -> None:
        if self._watching is not None:
            self._watching.stop()
            self._watching = None

    async def _queue_for_target(self, until: datetime | None) -> None:
        locks, claim = self._services.locks, claims.of_run(self.run, self._services.actions)
        if self._granted is None:
            locks.release(self.run.id)  # its empty claim from `claims.at_start`, if still held
            if not locks.try_acquire(self.run.id, claim):
                self._granted = locks.wait(self.run.id, claim)
                holder = locks.blocker(self.run.id, claim)
                waiting = replace(self.run, status=Status.WAITING, waiting_on="target")
                await self._commit(RunPlan(waiting, (self._event(kinds.WaitingForTarget(holder)),), TakeTarget(until)))
        if self._granted is not None:
            await self._wait_for_change(until, self._granted)
            if not self._granted.done():
                self._new_sight = self.sight
                return
        if await self._update_targets():
            self._granted = None
            return  # the next plan takes them again
        self._granted, self._has_target, self._look_once = None, True, claims.is_unlocked(self.run)

    def _drop_unneeded_target(self) -> None:
        """End a wait for the lock if the new plan has none, and unlock while the run only waits."""
        if self._granted is not None and not isinstance(self._then, TakeTarget):
            self._has_target = self._granted.done()
            self._granted = None
            if not self._has_target:
                self._services.locks.release(self.run.id)
        if self._has_target and not self._look_once and self.run.is_open and claims.is_unlocked(self.run):
            self._services.locks.release(self.run.id)
            self._has_target = False

    async def _take_turn(self) -> bool:
        """Wait until ``max_concurrent`` lets the run begin. Return False if the run was closed instead."""
        guards = self._context.playbook.definition.guards if self._context.playbook is not None else None
        if guards is None or guards.queue is None or guards.max_concurrent is None:
            return True
        if self.run.parent is not None or self.run.is_limited:  # these runs do not count
            return True
        name, most = self.run.playbook, guards.max_concurrent
        turn = self._services.turns.enter(name, self.run.id, most, at_once=plan.has_begun(self.run))
        if turn.done():
            return True
        until = self.run.created_at + guards.queue
        why = f"{most} runs of the playbook are open"
        waiting = replace(self.run, status=Status.WAITING, waiting_on=TURN, message=why)
        await self._commit(RunPlan(waiting, (self._event(wait_events.WaitingForTurn(why)),), Wait()))
        while not turn.done():
            await self._read_outside()
            if self._outside.last(OrderKind.CANCEL, OrderKind.UNDO):
                return True  # planning closes it
            refused = self._refused_before_turn(until, most)
            if refused is None:
                await self._wait_for_change(until, turn)
            elif await self._commit(plan.cancel_or_not_start(self._draft(), *refused)):
                return False
        return True

    def _refused_before_turn(self, until: datetime, most: int) -> tuple[str, Decision] | None:
        stale = plan.why_stale(self._draft())
        if stale is not None:
            return stale, Decision.STALE
        if self._now() < until:
            return None
        waited = duration.write_rounded(until - self.run.created_at)
        return f"waited {waited} for its turn; at most {most} runs may be open", Decision.CONCURRENCY_LIMITED

    async def _take_target(self) -> bool:
        """Lock the target. Return False if the run was closed while it waited."""
        while True:
            claim = claims.at_start(self.run, self._services.actions)
            if not self._services.locks.try_acquire(self.run.id, claim):
                may_plan = await self._wait_for_target(claim)
                if may_plan is not None:
                    return may_plan
            if claim.nothing or not await self._update_targets():
                return True

    async def _wait_for_target(self, claim: Claim) -> bool | None:
        """Return None once the claim is locked, True if the run no longer needs it, False if the run was closed."""
        granted = self._services.locks.wait(self.run.id, claim)
        holder = self._services.locks.blocker(self.run.id, claim)
        waiting = replace(self.run, status=Status.WAITING, waiting_on="target")
        await self._commit(RunPlan(waiting, (self._event(kinds.WaitingForTarget(holder)),), Wait()))
        while True:
            await self._read_outside()
            if self._outside.last(OrderKind.CANCEL, OrderKind.UNDO):
                return True  # planning closes it, which needs no target
            refused = self._refused_in_queue()
            if refused is not None:
                if await self._commit(plan.cancel_or_not_start(self._draft(), *refused)):
                    return False
                continue
            if granted.done():
                return None
            until = None  # a run that has begun waits at any age
            if not plan.has_begun(self.run):
                # Stale means older than the maximum age, hence the millisecond.
                newest = plan.newest_beginning(self.run, self._outside, self._context)
                until = newest + self._context.max_age + timedelta(milliseconds=1)
            await self._wait_for_change(until, granted)

    async def _update_targets(self) -> bool:
        """Refresh the run's further targets, or close it. Return whether to lock again."""
        run, playbook = self.run, self._context.playbook
        if playbook is None or run.is_group or _keeps_targets(run):
            return False
        topology = self._services.topology()
        also = also_of(playbook, run.target, topology, run.also)
        if isinstance(also, Unresolved) or also == run.also:
            return False
        mode, why = self._services.limits.mode_for(run.target, topology, also)
        if Mode.stricter(run.mode, mode) is not run.mode:  # decided again at the alert's next report
            reason = f"the further targets of {run.target_key} have changed, and {why}"
            return not await self._commit(plan.cancel_or_not_start(self._draft(), reason, Decision.TARGET_UNKNOWN))
        self._services.locks.release(run.id)
        content = wait_events.TargetsChanged(tuple(target.key for target in also))
        await self._commit(RunPlan(replace(run, also=also), (self._event(content),), Wait()))
        return True

    def _refused_in_queue(self) -> tuple[str, Decision] | None:
        if plan.has_begun(self.run):
            return None  # it acted before a restart and continues
        if self._outside.breaker is not None:
            reason = f"the target was busy, and then the breaker opened: {self._outside.breaker}"
            return reason, Decision.BREAKER_OPEN
        if self._context.playbook is not None and self.run.parent is None:
            outside = windows.why_outside(self._context.playbook.definition.windows, self._now())
            if outside is not None:
                return f"the target was busy, and now {outside}", Decision.OUTSIDE_WINDOW
        stale = plan.why_stale(self._draft())
        if stale is None:
            return None
        locks, claim = self._services.locks, claims.of_run(self.run, self._services.actions)
        by = ""
        if blocker := locks.blocker(self.run.id, claim):
            by = f" with run {blocker}{'' if locks.is_certain(claim, blocker) else ', or that run has another GPU'}"
        return f"the target was busy{by}, and {stale}", Decision.TARGET_BUSY

    async def _perform(self, act: PerformAttempt) -> AttemptOutcome:
        state = self.run.step(act.key)
        name = (state.undo.action if act.undo and state.undo else state.action) or ""
        holder = f"{self.run.id}/undo" if act.undo else self.run.id
        metrics, actions = self._services.metrics, self._services.actions
        refused = await self._locate_targets(act, name)
        if refused is not None:
            return refused
        targets = attempt_targets.targets_of(self.run, act, actions)
        params = state.undo.params if act.undo and state.undo else state.params
        worked_on = claims.of_attempt(targets, actions.action_class(name), params)
        async with self._services.locks.acting(holder, *worked_on) as waited:
            refused = await self._refusal_before_start(act, targets, waited)
            if refused is not None:
                return refused
            try:
                call = self._call(act)
            except (errors.ConfigurationError, ValueError) as problem:
                return performing.unmakeable_outcome(act, str(problem))
            if await self._is_called_off(act):
                return CALLED_OFF
            began = self._now()
            if self._received_at is not None and not act.undo:
                metrics.alert_to_action_seconds.observe((began - self._received_at).total_seconds())
                self._received_at = None
            self._services.fence()
            self._then = None
            outcome = await performing.outcome_of(
                name, call, performing.work_of(self.run, act, actions, name, metrics), began, metrics
            )
        metrics.step_seconds.labels(name, outcome.status).observe((self._now() - began).total_seconds())
        number = performing.attempts_of(state, act)[-1].number
        log.info("attempt ended", action=name, step=state.id, attempt=number, outcome=outcome.status)
        return outcome

    async def _refusal_before_start(
        self, act: PerformAttempt, targets: Sequence[Target], waited: bool
    ) -> AttemptOutcome | None:
        """Return the outcome of an attempt that must not start. `waited`: for another attempt."""
        actions = self._services.actions
        try:
            touched = attempt_targets.nodes_touched(self.run, act, actions, targets)
            self._touched_nodes |= touched
            if await self._is_called_off(act, waited):
                return CALLED_OFF
            has_acted = steps.has_acted_before(self.run, self.run.step(act.key), actions)
            barred = await self._services.breaker.count_or_bar(self.run, touched, has_acted=has_acted)
        except errors.ConfigurationError as problem:
            return performing.unmakeable_outcome(act, str(problem))
        if barred is not None:
            return _barred_outcome(act, barred)
        if waited:
            # Waiting for another attempt on the target does not count against the timeout.
            later = _with_full_timeout(self.run, act, self._now())
            await self._commit(RunPlan(later, (), act))
        return None

    async def _is_called_off(self, act: PerformAttempt, waited: bool = False) -> bool:
        """Return whether later events cancel the attempt before start; never for undos."""
        if act.undo or not (waited or self._touched.is_set() or self._current_pause() is not None):
            return False
        await self._read_outside(most=10)  # nearly up to date, because the attempt starts next
        return plan.is_called_off(self._draft(), act)

    async def _locate_targets(self, act: PerformAttempt, name: str) -> AttemptOutcome | None:
        """Persist the nodes that a multi-node action determines now. Return an outcome if that failed."""
        action = performing.multi_node_action(self._services.actions, name) if not act.undo else None
        if action is None or self.run.step(act.key).target is not None:  # the catalog rejects such actions on jobs
            return None
        located: list[BaseModel] = []

        async def ask(call: Call) -> Mapping[str, Any]:
            located.append(await action.locate(call))
            return {}

        try:
            call = self._call(act)
        except (errors.ConfigurationError, ValueError) as problem:
            return performing.unmakeable_outcome(act, str(problem))
        outcome = await performing.outcome_of(name, call, ask, self._now(), self._services.metrics)
        if outcome.status != "applied":
            return outcome
        if located[0] is not call.params:  # a destination was added
            draft = self._draft()
            steps.record_location(draft, act.key, located[0].model_dump(mode="json", by_alias=True, exclude_none=True))
            await self._commit(draft.plan(act))
        return None

    def _call(self, act: PerformAttempt) -> Call:
        state = self.run.step(act.key)
        alert = self._outside.alerts[0].alert
        report_wait = functools.partial(self._report_wait, state)
        clearance = functools.partial(self._clearance, state)
        return performing.call_of(self.run, act, self._services.actions, alert, self._now(), report_wait, clearance)

    async def _clearance(self, state: StepState) -> Clearance:
        outside = await self._outside_in_flight()
        if outside.last(OrderKind.CANCEL, OrderKind.UNDO):
            return "stop"
        draft = RunDraft(self.run, outside, self._context, self._now())
        if after_resolve.is_unwanted(draft, state):
            return "resolved"
        return "hold" if self._current_pause() is not None else "go_on"

    async def _outside_in_flight(self) -> OutsideState:
        while self._touched.is_set() and self._read_in_flight is None:
            touches = self._times_touched
            snapshot = await self._services.recorder.snapshot(self.run.id)
            if snapshot is None:
                break
            if touches == self._times_touched:
                self._read_in_flight = OutsideState(snapshot.alerts, snapshot.orders)
        return self._read_in_flight or self._outside

    async def _report_wait(self, state: StepState, reason: str) -> None:
        run = replace(self.run, message=reason) if self.run.is_open else self.run
        await self._commit(RunPlan(run, (self._event(kinds.AttemptWaits(state.id, reason)),), Wait()))

    async def _commit(self, new_plan: RunPlan) -> bool:
        """Make a plan durable, then report outcomes to actions and count a closed run.

        Returns False without storing anything if the plan has not seen an accepted rejection, or an alert that joined a
        run that it closes or undoes: the alert's reply stated that this run handles it.
        """
        before, after = self.run, new_plan.run
        closes = before.is_open and not after.is_open
        takes_back = before.is_open and any(event.kind == _UNDO_BEGINS for event in new_plan.events)
        if after is not before or new_plan.events:
            alerts = len(self._outside.alerts) if closes or takes_back else None
            rejected = rejections(self._outside.orders) if approval.waiting_step(before) is not None else None
            if not await self._services.recorder.record(after, before, new_plan.events, Seen(alerts, rejected)):
                self.touch()
                return False
        self.run = after
        self._services.group_news.tell(after, before)
        for action, command_id in attempt_targets.ended_between(before, after):
            if self._services.actions.action_class(action) is not None:
                self._services.actions.get(action).outcome_saved(command_id)
        self._services.metrics.show_run(before, after)
        if closes:
            self._services.count_closed(after)
            if after.decision is not before.decision:
                self._services.metrics.decisions.labels(after.playbook, str(after.decision)).inc()
        for event in new_plan.events:
            if event.kind in UNDO_OVER:
                self._services.metrics.undos.labels(event.kind.removeprefix("undo_")).inc()
        self._note_planned()
        return True

    async def _read_outside(self, most: int = 1) -> None:
        # At most `most` reads: in an alert storm, each one finds new changes.
        while self._touched.is_set() and (most := most - 1) >= 0:
            # Clear first, so that a change during the read is read next time.
            self._touched.clear()
            self._read_in_flight = None
            snapshot = await self._services.recorder.snapshot(self.run.id)
            if snapshot is not None:
                self._outside = OutsideState(snapshot.alerts, snapshot.orders)
                if self._group is not None:
                    await self._group.wake_members(self._outside)
        if self._group is not None:
            self._group.news.clear()
        self._outside = self._outside.with_switches(self._services.controls(), self._current_pause())

    async def _wait_for_change(self, until: datetime | None, *others: asyncio.Future[Any]) -> None:
        """Return at the first of: a touch, news of members, `until`, the end of one of `others`."""
        waits: set[asyncio.Future[Any]] = {asyncio.ensure_future(self._touched.wait()), *others}
        if self._group is not None:
            waits.add(asyncio.ensure_future(self._group.news.wait()))
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
            self._services.turns.leave(self.run.playbook, self.run.id)

    def _note_planned(self) -> None:
        if not self._touched.is_set():
            self._is_planned = True
            if self._planned is not None:
                self._planned.set()

    def _current_pause(self) -> OperatorPause | None:
        return self._services.pause_of(self.run, self._touched_nodes)

    def _event(self, content: kinds.EventKind) -> Event:
        return recorded(content, self._now(), self.run.id)

    def _now(self) -> datetime:
        return self._services.clock.now()


def _keeps_targets(run: Run) -> bool:  # it has acted on them, or a person was asked about them
    return any(step.attempts or (step.kind == "approve" and step.started_at) for step in run.steps)


def _barred_outcome(act: PerformAttempt, reason: str) -> AttemptOutcome:
    return replace(performing.unmakeable_outcome(act, reason), barred_by=Decision.BREAKER_OPEN)


def _with_full_timeout(run: Run, act: PerformAttempt, now: datetime) -> Run:
    state = run.step(act.key)
    *earlier, last = performing.attempts_of(state, act)
    moved = (*earlier, replace(last, deadline=now + (last.deadline - last.started_at)))
    if act.undo and state.undo:
        return run.with_step(replace(state, undo=replace(state.undo, attempts=moved)))
    return run.with_step(replace(state, attempts=moved))
