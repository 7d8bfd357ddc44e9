"""What the API stands on in its tests: history, engine, catalog and their like, in memory, which do as they are told.

Who uses it: ``api_world``, which serves the API before them.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Collection, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import Any

from msgspec.structs import replace

from tests.support.clocks import START
from trainmedic.wire.envelope import new_id
from trainmedic_core.target import Target, TargetKind
from trainmedic_logs.domain.log_search import LogQuery
from trainmedic_server import errors
from trainmedic_server.domain.admission import Admission, PlaybookDecision
from trainmedic_server.domain.alert import Alert, AlertRecord, Delivery, Identity
from trainmedic_server.domain.effect import EffectVerdict
from trainmedic_server.domain.job_life import JobLife, LifeState
from trainmedic_server.domain.pause import EVERYTHING, OperatorPause, PauseOrder, Scope
from trainmedic_server.domain.playbook import Mode, Playbook
from trainmedic_server.domain.run import Controls, Decision, Event, OperatorOrder, OrderKind, Run, Status
from trainmedic_server.domain.upcoming import Upcoming
from trainmedic_server.engine import pausing
from trainmedic_server.engine.admission_changes import ByHand
from trainmedic_server.engine.explanation import ExplainedAlert
from trainmedic_server.engine.manual_runs import Started, StartOrder
from trainmedic_server.ports.logs import LogBatch
from trainmedic_server.ports.outside import Presence
from trainmedic_server.ports.store import ActFilter, HistoryFilter, RunRecord, values_of
from trainmedic_server.ports.tallies import PlaybookTally


@dataclass
class MemoryHistory:
    """Runs and events, newest last."""

    records: dict[str, RunRecord] = field(default_factory=dict)
    events: list[Event] = field(default_factory=list)
    away: bool = False
    streams_open: int = 0
    streams_closed: int = 0

    def append(self, kind: str, run_id: str | None = None, **data: Any) -> Event:
        event = Event(kind, START, run_id, data=data, seq=len(self.events) + 1)
        self.events.append(event)
        return event

    def newest_first(self, conditions: HistoryFilter) -> list[Run]:
        if self.away:
            raise errors.StoreUnavailable("no such file: /secret/place.db")
        return [r.run for r in reversed(self.records.values()) if _is_wanted(r.run, conditions)]

    async def page(self, conditions: HistoryFilter, limit: int, cursor: str | None) -> tuple[list[Run], str | None]:
        runs = self.newest_first(conditions)
        begin = int(cursor) if cursor else 0
        following = begin + limit
        return runs[begin:following], str(following) if following < len(runs) else None

    async def stream(self, conditions: HistoryFilter) -> AsyncIterator[Run]:
        self.streams_open += 1
        try:
            for run in self.newest_first(conditions):
                yield run
        finally:
            self.streams_closed += 1

    async def record(self, run_id: str) -> RunRecord | None:
        if self.away:
            raise errors.StoreUnavailable("away")
        record = self.records.get(run_id)
        return record and replace(record, events=tuple(e for e in self.events if e.run_id == run_id))

    async def events_after(self, seq: int, limit: int, kinds: Collection[str] = ()) -> list[Event]:
        return [event for event in self.events[seq:] if not kinds or event.kind in kinds][:limit]

    async def events_of_jobs(
        self, kinds: Collection[str], since: datetime, until: datetime, limit: int, job: str | None = None
    ) -> list[Event]:
        if self.away:
            raise errors.StoreUnavailable("away")
        chosen = [event for event in self.events if event.run_id is None and event.kind in kinds]
        chosen = [event for event in chosen if since <= event.at < until and job in (None, event.data.get("job"))]
        return sorted(chosen, key=lambda event: event.at)[-limit:]

    async def acts_of_people(self, matching: ActFilter, before: int | None, limit: int) -> list[Event]:
        if self.away:
            raise errors.StoreUnavailable("away")
        chosen = [event for event in reversed(self.events) if event.actor != "trainmedic"]
        chosen = [event for event in chosen if before is None or (event.seq or 0) < before]
        chosen = [event for event in chosen if matching.since is None or event.at >= matching.since]
        chosen = [event for event in chosen if matching.until is None or event.at < matching.until]
        return [event for event in chosen if matching.actor in (None, event.actor)][:limit]

    async def last_seq(self) -> int:
        return len(self.events)

    async def tally(self, since: datetime, until: datetime) -> dict[str, PlaybookTally]:
        tallies: dict[str, PlaybookTally] = {}
        for run in self.newest_first(HistoryFilter(since=since, until=until)):
            tally = tallies.setdefault(run.playbook, PlaybookTally())
            tally.statuses[run.status] += 1
            if run.status is Status.SUCCEEDED and run.ended_at is not None:
                tally.repair_seconds[(run.ended_at - run.created_at).total_seconds()] += 1
        return tallies

    async def effects_between(self, since: datetime, until: datetime, limit: int) -> dict[str, EffectVerdict]:
        return {record.run.id: record.effect.verdict for record in self.records.values() if record.effect}


def _is_wanted(run: Run, conditions: HistoryFilter) -> bool:
    target = run.target or Target(TargetKind.CLUSTER)
    pairs = (
        (conditions.alertname, run.alert_name),
        (conditions.playbook, run.playbook),
        (conditions.status, run.status),
        (conditions.decision, run.decision),
        (conditions.node, target.node),
        (conditions.gpu, target.gpu),
        (conditions.job, target.job),
        (conditions.target, run.target_key),
    )
    in_time = (conditions.since is None or run.created_at >= conditions.since) and (
        conditions.until is None or run.created_at < conditions.until
    )
    is_open = conditions.is_open is None or run.is_open == conditions.is_open
    return in_time and is_open and all(asked is None or has in values_of(asked) for asked, has in pairs)


@dataclass
class MemoryEngine:
    """Starts a run for every alert that names a node, and keeps everything in the history."""

    history: MemoryHistory
    controls: Controls = field(default_factory=Controls)
    mode: Mode = Mode.ENFORCE
    fails_with: Exception | None = None
    deliveries: list[Delivery] = field(default_factory=list)

    async def admit(self, delivery: Delivery) -> Admission:
        if self.fails_with is not None:
            raise self.fails_with
        self.deliveries.append(delivery)
        admitted = []
        for alert in delivery.alerts:
            node = alert.labels.get("node")
            if node is None:
                continue
            run = Run(
                id=new_id(),
                playbook="cool",
                version="v1",
                target=Target(TargetKind.NODE, node=node),
                mode=Mode.ENFORCE,
                status=Status.RUNNING,
                decision=Decision.STARTED,
                alert=alert.identity,
                alert_name=alert.name,
                alert_labels=alert.labels,
                created_at=delivery.received_at,
            )
            record = AlertRecord(alert, delivery.received_at, delivery.received_at)
            self.history.records[run.id] = RunRecord(run, (record,), ())
            self.history.append("run_started", run.id, labels=dict(alert.labels))
            admitted.append(PlaybookDecision(run.id, run.playbook, f"node:{node}", run.decision))
        return Admission(
            delivery.id,
            len(delivery.alerts) + len(delivery.rejected),
            tuple(admitted),
            unmatched=len(delivery.alerts) - len(admitted),
            truncated=delivery.truncated,
            rejected=delivery.rejected,
            ignored=delivery.ignored,
        )

    explained: list[tuple[Alert, datetime | None]] = field(default_factory=list)

    async def explain(self, alerts: Sequence[Alert], at: datetime | None = None) -> tuple[ExplainedAlert, ...]:
        self.explained += [(alert, at) for alert in alerts]
        return tuple(ExplainedAlert(alert, ()) for alert in alerts)

    async def explain_for_a_test(self, alerts: Sequence[Alert]) -> tuple[ExplainedAlert, ...]:
        return tuple(ExplainedAlert(alert, ()) for alert in alerts)

    async def order(
        self,
        run_id: str,
        kind: OrderKind,
        actor: str,
        note: str,
        groups: frozenset[str] = frozenset(),
        *,
        undo: bool = False,
    ) -> Run:
        record = self.history.records.get(run_id)
        if record is None:
            raise errors.NotFound(f"There is no run {run_id}.")
        if not record.run.is_open:
            raise errors.Conflict(f"Run {run_id} is closed.")
        run = replace(record.run, status=Status.CANCELLED, ended_at=START + timedelta(seconds=2))
        order = OperatorOrder(new_id(), run_id, kind, actor, START, note)
        also = (replace(order, id=new_id(), kind=OrderKind.UNDO),) if undo else ()
        self.history.records[run_id] = replace(record, run=run, orders=(*record.orders, order, *also))
        return run

    def leaves_change(self, action: str) -> bool:
        return True

    async def pause(self, actor: str, order: PauseOrder = PauseOrder()) -> tuple[Controls, OperatorPause]:
        self.controls, pause, _ = pausing.begin(self.controls, order, actor, START, new_id)
        return self.controls, pause

    async def resume(self, actor: str, pause_id: str | None = None, scope: Scope = EVERYTHING) -> Controls:
        chosen = pausing.chosen(pause_id, scope, self.controls.pauses)
        self.controls, _ = pausing.end(self.controls, actor, START, chosen)
        return self.controls

    async def upcoming(
        self, run: Run, alerts: Sequence[AlertRecord], orders: Sequence[OperatorOrder] = ()
    ) -> Upcoming | None:
        return Upcoming(step="cap", kind="action", action="gpu.power_limit") if run.is_open else None

    async def start_run(self, order: StartOrder, by: ByHand) -> Started:
        if order.playbook != "cool":
            raise errors.NotFound(f"no playbook {order.playbook} is loaded")
        labels = {"alertname": "StartedByHand", **order.labels}
        run = Run(
            id=new_id(),
            playbook=order.playbook,
            version="v1",
            target=order.target,
            mode=Mode.ENFORCE,
            status=Status.RUNNING,
            decision=Decision.STARTED,
            alert=Identity("by-hand-1", START),
            alert_name="StartedByHand",
            alert_labels=labels,
            created_at=START,
            started_by=by.actor,
        )
        if not order.dry_run:
            self.history.records[run.id] = RunRecord(run, (), ())
        return Started(run, ())

    async def retry(self, run_id: str, by: ByHand) -> Started:
        raise errors.NotFound(f"there is no run {run_id}")

    async def close_breaker(self, actor: str) -> Controls:
        self.controls = replace(self.controls, breaker_open=False)
        return self.controls


@dataclass
class MemoryLives:
    """What is known of jobs: of ``llm-1`` that it is gone, of ``llm-2`` that it is there."""

    ended: list[tuple[str, str, str]] = field(default_factory=list)

    async def end(self, job: str, actor: str, note: str) -> JobLife:
        if job == "llm-2":
            raise errors.Conflict("The job is not gone: it is present.")
        if job not in ("llm-1", "team/llm-1"):
            raise errors.NotFound("No job of that name is known.")
        self.ended.append((job, actor, note))
        return JobLife(job, LifeState.ENDED, START, reason=note)


@dataclass(frozen=True)
class MemoryBook:
    definition: Playbook
    version: str = "v1"
    text: str = "playbook: cool\n"
    source: str = "playbooks/cool.yaml"


@dataclass(frozen=True)
class Problem:
    file: str
    line: int | None
    column: int | None
    message: str


_COOL = Playbook.model_validate(
    {"playbook": "cool", "on": {"alert": "GPUHot"}, "target": "node", "steps": [{"action": "notify"}]}
)


@dataclass
class MemoryCatalog:
    books: list[Any] = field(default_factory=lambda: [MemoryBook(_COOL)])
    problems: list[Problem] = field(default_factory=list)

    def all(self) -> Sequence[Any]:
        return self.books

    def get(self, name: str) -> Any | None:
        return next((book for book in self.books if book.definition.name == name), None)


@dataclass
class Dependency:
    """The run store and the bus, as far as the API asks them."""

    away: type[errors.TrainmedicError] | None = None
    present: list[Presence] = field(default_factory=list)
    """Agents, and jobs unless `present_jobs` names them."""
    present_jobs: list[Presence] | None = None
    is_signed: bool = False

    async def check(self) -> None:
        if self.away:
            raise self.away("connection refused by 10.0.0.1")

    async def agents(self) -> list[Presence]:
        await self.check()
        return self.present

    async def jobs(self) -> list[Presence]:
        await self.check()
        return self.present if self.present_jobs is None else self.present_jobs

    launchers = jobs


@dataclass
class MemoryLogs:
    """Whoever keeps lines: it answers what it is told to, and keeps what it was asked."""

    batches: list[LogBatch | Exception] = field(default_factory=list)
    asked: list[tuple[LogQuery, tuple[str, ...], int | None]] = field(default_factory=list)
    closed: int = 0

    async def search(self, query: LogQuery, nodes: Collection[str], most: int) -> AsyncIterator[LogBatch]:
        self.asked.append((query, tuple(nodes), most))
        async for batch in self._batches():
            yield batch

    async def follow(self, query: LogQuery, nodes: Collection[str]) -> AsyncIterator[LogBatch]:
        self.asked.append((query, tuple(nodes), None))
        async for batch in self._batches():
            yield batch

    async def _batches(self) -> AsyncIterator[LogBatch]:
        try:
            for batch in self.batches:
                if isinstance(batch, Exception):
                    raise batch
                yield batch
        finally:
            self.closed += 1
