"""`Engine`, the engine's interface to the rest of the program."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from datetime import datetime, timedelta
from typing import Any

from msgspec.structs import replace

from trainmedic.wire import envelope
from trainmedic_server import errors, telemetry
from trainmedic_server.domain.admission import Admission
from trainmedic_server.domain.alert import Alert, AlertRecord, Delivery
from trainmedic_server.domain.approval import AskedQuestion
from trainmedic_server.domain.event_codec import recorded
from trainmedic_server.domain.event_kinds import BreakerClosed, LateReply, ServerStarted
from trainmedic_server.domain.pause import EVERYTHING, OperatorPause, PauseOrder, Scope
from trainmedic_server.domain.playbook import Mode
from trainmedic_server.domain.run import Controls, Event, OperatorOrder, OrderKind, Run
from trainmedic_server.domain.topology import Topology
from trainmedic_server.domain.upcoming import HeldBy, Upcoming
from trainmedic_server.engine import claims, explanation, loops, orders, pausing, upcoming
from trainmedic_server.engine.admission_changes import AdmissionChanges, ByHand
from trainmedic_server.engine.breaker import Breaker
from trainmedic_server.engine.engine_services import EngineServices, nothing_to_renew
from trainmedic_server.engine.explanation import ExplainedAlert
from trainmedic_server.engine.group_news import GroupNews
from trainmedic_server.engine.heartbeat import Heartbeat
from trainmedic_server.engine.intake import DeliveryIntake
from trainmedic_server.engine.lease_recovery import LeaseRecovery
from trainmedic_server.engine.leases import LeaseRenewer
from trainmedic_server.engine.locks import TargetLocks
from trainmedic_server.engine.manual_runs import ManualStarter, Started, StartOrder
from trainmedic_server.engine.recorder import Recorder
from trainmedic_server.engine.schedules import Schedules
from trainmedic_server.engine.silent_alerts import SilentAlerts
from trainmedic_server.engine.timeline import HEARTBEAT, Timeline
from trainmedic_server.engine.trying_again import RepeatedRuns
from trainmedic_server.engine.workers import Workers
from trainmedic_server.ports.actions import Actions
from trainmedic_server.ports.alert_map import NO_ALERT_MAP, AlertMap
from trainmedic_server.ports.ending import end_tasks
from trainmedic_server.ports.fence import Fence, no_fence
from trainmedic_server.ports.limits import EngineLimits
from trainmedic_server.ports.outside import AlertSource, Clock, ClockWatch, NoClockWatch
from trainmedic_server.ports.playbooks import Catalog
from trainmedic_server.ports.store import RunStore, Transaction

log = telemetry.logger(__name__)

# 12 h, the most that an ID may be ahead of a clock that was set back. `history_page` searches IDs with a margin of
# 24 h, so half of it is left.
_MOST_AHEAD_MS = 12 * 3_600_000
_MOST_HOLDERS = 5  # Maximum length of the chain of runs that wait for each other's targets, in an answer


class Engine:
    def __init__(
        self,
        store: RunStore,
        catalog: Catalog,
        actions: Actions,
        clock: Clock,
        limits: EngineLimits,
        metrics: telemetry.Metrics,
        topology: Callable[[], Topology] = Topology,
        alert_source: AlertSource | None = None,  # None without an Alertmanager
        fence: Fence = no_fence,
        clock_watch: ClockWatch | None = None,
        alert_map: Callable[[], AlertMap] = lambda: NO_ALERT_MAP,
        renew_topology: Callable[[], Awaitable[None]] = nothing_to_renew,
    ) -> None:
        self._store = store
        self._clock = clock
        self._timeline = timeline = Timeline(clock)
        self._heartbeat = Heartbeat(clock, timeline, clock_watch or NoClockWatch(), metrics)
        self._metrics = metrics
        self._controls = Controls()
        self._pauses_in_force: frozenset[str] = frozenset()  # IDs
        self._recorder = Recorder(store, metrics)

        def controls() -> Controls:
            return self._controls

        self._services = services = EngineServices(
            store=store,
            catalog=catalog,
            recorder=self._recorder,
            breaker=Breaker(self._recorder, clock, timeline, limits, topology, controls, self._put_in_force),
            locks=TargetLocks(lambda: topology().agents),
            actions=actions,
            clock=clock,
            timeline=timeline,
            limits=limits,
            metrics=metrics,
            new_id=self._new_id,
            controls=controls,
            fence=fence,
            on_admitted=self._on_admitted,
            touch=lambda run_ids: self._workers.touch(run_ids),
            group_news=GroupNews(),
            topology=topology,
            alert_map=alert_map,
            renew_topology=renew_topology,
        )
        self._workers = Workers(services)
        self._intake = DeliveryIntake(services)
        self._starter = ManualStarter(services)
        self._schedules = Schedules(services, self.admit)
        self._repeated_runs = RepeatedRuns(services)
        self._silent_alerts = SilentAlerts(services, alert_source)
        lease_recovery = LeaseRecovery(services, alert_source, self._workers.playbook_of)
        self._leases = LeaseRenewer(services, lease_recovery)
        self._loops: list[asyncio.Task[None]] = []
        self._last_id, self._id_lock = (0, 0), threading.Lock()

    def leaves_change(self, action: str) -> bool:
        """Return whether the action changes something. True if unknown, False if it only reverts."""
        action_class = self._services.actions.action_class(action)
        return action_class is None or (action_class.harmful and not getattr(action_class, "gives_back", False))

    @property
    def controls(self) -> Controls:
        return self._controls

    @property
    def mode(self) -> Mode:
        return self._services.limits.mode

    async def upcoming(
        self, run: Run, alerts: Sequence[AlertRecord], orders: Sequence[OperatorOrder] = ()
    ) -> Upcoming | None:
        """Return what the run, or its repetition, does next; None for nothing. Raises StoreUnavailable."""
        playbook = await self._workers.playbook_for_reading(run) if run.is_open else None
        held_by = await self._held_by(run) if run.waiting_on == "target" else None
        sight = self._workers.sight(run.id)
        ahead = upcoming.of_run(run, playbook, alerts, held_by, self._services.topology().verdicts, orders, sight)
        return await self._repeated_runs.after(run, alerts) if ahead is None and not run.is_open else ahead

    async def _held_by(self, run: Run, most: int = _MOST_HOLDERS) -> HeldBy | None:
        """Return the run that it waits for; None if there is none."""
        locks, claim = self._services.locks, claims.of_run(run, self._services.actions)
        blocker = locks.blocker(run.id, claim)
        driven = self._workers.snapshot_of(blocker) if blocker is not None else None
        if driven is None:
            return None
        its_playbook = await self._workers.playbook_for_reading(driven.run)
        waits = driven.run.waiting_on == "target" and most > 1
        behind = await self._held_by(driven.run, most - 1) if waits else None
        verdicts = self._services.topology().verdicts
        ahead = upcoming.of_run(driven.run, its_playbook, driven.alerts, behind, verdicts, driven.orders)
        return upcoming.holder(driven.run, ahead, is_certain=locks.is_certain(claim, driven.run.id))

    async def start(self, took_over_as: str | None = None) -> None:
        """Resume unfinished runs and start the loops. Raises StoreUnavailable.

        `took_over_as`: this server's name in the history; None unless servers share the database.
        """
        down_for = await self._store.transact(self._heartbeat.begin)
        await self._beat(recorded(ServerStarted(took_over_as or None), self._clock.now()))
        await self._workers.recover(down_for)
        works = (
            self._beat_for_ever(),
            self._silent_alerts.run(),
            self._leases.run(),
            self._schedules.run(),
            self._repeated_runs.run(),
        )
        self._loops = [asyncio.create_task(work) for work in works]

    async def stop(self) -> None:
        await end_tasks(self._loops)
        await self._intake.stop()
        await self._workers.stop()
        await self._recorder.stop()

    def admit(self, delivery: Delivery) -> Coroutine[Any, Any, Admission]:
        """Decide on a delivery; durable on return. Raises Saturated or StoreUnavailable."""
        return self._intake.admit(delivery)

    async def explain(self, alerts: Sequence[Alert], at: datetime | None = None) -> tuple[ExplainedAlert, ...]:
        return await explanation.of_server(self._services, alerts, at)

    async def explain_for_a_test(self, alerts: Sequence[Alert]) -> tuple[ExplainedAlert, ...]:
        services = self._services
        mapped = [services.alert_map().apply(alert).alert for alert in alerts]
        return await asyncio.to_thread(
            explanation.explain_for_a_test, services.catalog.for_alert, mapped, services.actions, services.limits
        )

    async def order(
        self,
        run_id: str,
        kind: OrderKind,
        actor: str,
        note: str = "",
        groups: frozenset[str] = frozenset(),
        question: AskedQuestion | None = None,
        *,
        undo: bool = False,
    ) -> Run:
        """Accept an operator command. Return the run's state once it is planned, at the latest after 1 s.

        `undo` also reverts the run's changes. An answer counts only for its `question`. Raises NotFound, Conflict,
        NotEntitled, StoreUnavailable.
        """
        order = OperatorOrder(self._new_id(), run_id, kind, actor, self._clock.now(), note)
        undo_order = replace(order, id=self._new_id(), kind=OrderKind.UNDO) if undo else None
        await self._store.transact(lambda tx: orders.accept(tx, order, groups, question, undo_order))
        self._workers.touch([run_id])
        await self._workers.wait_until_planned(run_id, at_most=1.0)
        run = await self._store.transact(lambda tx: tx.run(run_id))
        if run is None:
            raise errors.NotFound(f"there is no run {run_id}")
        return run

    async def start_run(self, order: StartOrder, by: ByHand) -> Started:
        return await self._starter.start(order, by)

    async def retry(self, run_id: str, by: ByHand) -> Started:
        return await self._starter.retry(run_id, by)

    async def record_late_reply(self, reply: envelope.Reply) -> None:
        """Record a late reply to a command of unknown outcome.

        Its undo is still carried out.
        """

        def work(tx: Transaction) -> None:
            run_id = tx.run_of_command(reply.command_id)
            run = tx.run(run_id) if run_id else None
            if run is not None and _is_unknown(run, reply.command_id) and _may_answer(reply, run):
                content = LateReply(reply.command_id, reply.status, reply.rank, reply.output)
                tx.append([recorded(content, self._clock.now(), run.id, reply.sender or "unknown")])

        await self._store.transact(work)

    async def pause(self, actor: str, order: PauseOrder = PauseOrder()) -> tuple[Controls, OperatorPause]:
        """Hold the runs in the order's scope, or only record them, until its end or `resume`. Undos continue.

        Raises Conflict, StoreUnavailable.
        """
        made: list[OperatorPause] = []

        def change(controls: Controls) -> tuple[Controls, Sequence[Event]]:
            changed, pause, events = pausing.begin(controls, order, actor, self._clock.now(), self._new_id)
            made[:] = [pause]
            return changed, events

        return await self._change(change), made[0]

    async def resume(self, actor: str, pause_id: str | None = None, scope: Scope = EVERYTHING) -> Controls:
        """End a pause by ID or scope; without either, all that hold runs now. Raises NotFound, StoreUnavailable."""

        def change(controls: Controls) -> tuple[Controls, Sequence[Event]]:
            return pausing.end(controls, actor, self._clock.now(), pausing.chosen(pause_id, scope, controls.pauses))

        return await self._change(change)

    async def close_breaker(self, actor: str) -> Controls:
        """Close the breaker and restart its count. This starts no blocked run. Raises StoreUnavailable."""

        def change(controls: Controls) -> tuple[Controls, Sequence[Event]]:
            if not controls.breaker_open:
                return controls, []
            now = self._clock.now()  # within the transaction: acts persisted by now do not count
            closed = replace(
                controls, breaker_open=False, breaker_opened_at=None, breaker_reason=None, breaker_closed_at=now
            )
            return closed, [recorded(BreakerClosed(), now, actor=actor)]

        return await self._change(change)

    def _on_admitted(self, changes: AdmissionChanges) -> None:
        if changes.controls is not None:
            self._put_in_force(changes.controls)
        for started in changes.started:
            self._workers.start(started, changes.outside)
        self._workers.touch(changes.touched)

    async def _change(self, change: Callable[[Controls], tuple[Controls, Sequence[Event]]]) -> Controls:
        def work(tx: Transaction) -> Controls:
            changed, events = change(tx.controls())
            tx.save_controls(changed)
            tx.append(events)
            return changed

        self._put_in_force(await self._store.transact(work))
        return self._controls

    def _put_in_force(self, controls: Controls) -> None:
        before, self._controls = (self._controls.breaker_open, self._pauses_in_force), controls
        self._pauses_in_force = pausing.in_force(controls, self._clock.now())
        self._metrics.paused.set(controls.paused)
        self._metrics.pauses.set(len(self._pauses_in_force))
        self._metrics.breaker_open.set(controls.breaker_open)
        if before != (controls.breaker_open, self._pauses_in_force):
            self._workers.touch_all()

    async def _beat_for_ever(self) -> None:
        sleep = loops.sleeping_by(self._clock)
        await sleep(HEARTBEAT.total_seconds())
        await loops.repeat(self._beat, HEARTBEAT, "heartbeat", self._metrics, sleep=sleep)

    async def _beat(self, *events: Event) -> None:
        def work(tx: Transaction) -> Controls:
            tx.append(events)
            return self._heartbeat.beat(tx)

        self._put_in_force(await self._store.transact(work))
        self._services.locks.look_again()
        if self._heartbeat.note_written():
            self._workers.touch_all()

    def ago(self, span: timedelta) -> datetime:
        """Downtimes do not count."""
        return self._timeline.ago(span)

    def _new_id(self) -> str:
        """Return a UUIDv7 that sorts after all earlier ones of this process, if the clock was set back by less than
        `_MOST_AHEAD_MS`.
        """
        now_ms = int(self._clock.now().timestamp() * 1000)
        with self._id_lock:  # admission calls it from the store's thread
            last_ms, counter = self._last_id
            if now_ms > last_ms or now_ms < last_ms - _MOST_AHEAD_MS:
                self._last_id = (now_ms, 0)
            else:
                self._last_id = (last_ms, counter + 1) if counter < 0xFFF else (last_ms + 1, 0)
            return envelope.new_id(*self._last_id)


def _is_unknown(run: Run, command_id: str) -> bool:
    attempts = [attempt for step in run.steps for attempt in (*step.attempts, *step.undo_attempts)]
    return any(attempt.command_id == command_id and attempt.status == "unknown" for attempt in attempts)


def _may_answer(reply: envelope.Reply, run: Run) -> bool:
    target = run.target
    return target is not None and reply.job in (None, target.job) and reply.node in (None, target.node)
