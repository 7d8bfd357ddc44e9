"""Playback of a test's lines through the agent's assemblers and trackers and the server's intake, without the
transport.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta

from trainmedic_logs.diagnosis.collecting import Collector
from trainmedic_logs.diagnosis.judge import diagnose
from trainmedic_logs.diagnosis.verdict import Verdict
from trainmedic_logs.domain.finding import Finding, Origin, TimeSource
from trainmedic_logs.domain.finding_codec import FindingUpdate
from trainmedic_logs.domain.known_finding import KnownFinding
from trainmedic_logs.lines.assembly import LineAssembler
from trainmedic_logs.lines.line import Line
from trainmedic_logs.lines.rule import RuleSet
from trainmedic_logs.lines.tracker import FindingTracker
from trainmedic_logs.simulation.log_test_format import JobEntry, LineEntry
from trainmedic_server import telemetry
from trainmedic_server.domain.alert import Alert, AlertStatus, fingerprint
from trainmedic_server.domain.topology import JobTopology, Topology
from trainmedic_server.engine import verdict_alert
from trainmedic_server.engine.finding_alert_sender import FindingAlertSender
from trainmedic_server.engine.finding_intake import FindingIntake
from trainmedic_server.engine.node_watch import NodeWatch
from trainmedic_server.ports.findings import AlertSender
from trainmedic_server.ports.jobs import ArrivedNotice
from trainmedic_server.ports.outside import Clock, Presence
from trainmedic_server.ports.store import RunStore
from trainmedic_server.simulation.virtual_time import BEGINNING

TICK = timedelta(seconds=1)
"""Interval of agent and server while something may be due."""
LAZY_TICK = timedelta(seconds=10)
SETTLE = timedelta(seconds=10)
"""Time after the last line for held-back blocks, and after the failure for the verdict."""
_REPEAT = timedelta(minutes=1)


class _Nobody:
    """Empty presences: the test's job states the places."""

    async def jobs(self) -> list[Presence]:
        return []

    async def agents(self) -> list[Presence]:
        return []

    async def launchers(self) -> list[Presence]:
        return []

    def notices(self) -> Sequence[ArrivedNotice]:
        return ()

    def discard_notices(self, entries: Collection[bytes]) -> None:
        """Do nothing."""


@dataclass
class _NodeReader:
    name: str
    tracker: FindingTracker
    assemblers: dict[Origin, LineAssembler] = field(default_factory=dict)
    places: dict[Origin, int] = field(default_factory=dict)
    sent: int = 0

    def lines(self, origin: Origin, text: str, clock: Clock) -> Iterator[Line]:
        assembler = self.assemblers.setdefault(origin, LineAssembler(origin))
        for physical in text.split("\n"):
            place = self.places.get(origin, 0)
            self.places[origin] = place + len(physical) + 1
            yield from assembler.feed(physical.encode(), clock.now(), place)

    def late_lines(self, clock: Clock) -> Iterator[Line]:
        for assembler in self.assemblers.values():
            yield from assembler.flush(clock.now())

    def update(self, finding: Finding) -> FindingUpdate:
        self.sent += 1
        return FindingUpdate(self.name, "simulated", self.sent, finding)


class LogScenario:
    def __init__(
        self,
        job: JobEntry,
        rules: RuleSet,
        fixtures: Mapping[str, str],
        store: RunStore,
        clock: Clock,
        teller: AlertSender,
        metrics: telemetry.Metrics,
    ) -> None:
        """``teller`` receives alerts of findings."""
        self._job = job
        self._rules = rules
        self._fixtures = fixtures
        self._store = store
        self._clock = clock
        self._readers: dict[str, _NodeReader] = {}
        self._ids: list[str] = []
        self._alerts = teller
        self._fails_at = BEGINNING + job.fails if job.fails is not None else None
        self._collector = Collector(rules)
        for node, ranks in job.nodes.items():
            for rank in ranks:
                self._collector.rank(rank, node=node)
        self._collector.world_size(job.ranks or sum(map(len, job.nodes.values())))
        topology = Topology(jobs=JobTopology(dict.fromkeys(job.nodes, frozenset({job.name}))))
        self._teller = FindingAlertSender(store, teller, clock, metrics, _REPEAT)
        self._intake = FindingIntake(
            store,
            lambda: rules,
            lambda: topology,
            NodeWatch(_Nobody(), store, clock, metrics),
            clock,
            lambda ago: clock.now() - ago,
            metrics,
            self._new_id,
            self._teller.touch,
        )

    async def print(self, entry: LineEntry) -> None:
        text = entry.written(self._fixtures)
        for rank in entry.rank or (None,):
            node = entry.node or (self._job.node_of(rank) if rank is not None else next(iter(self._job.nodes)))
            is_of_job = entry.source in ("training", "launcher", "slurm")
            origin = Origin(
                entry.source,
                node,
                self._job.name if is_of_job else None,
                self._job.attempt if is_of_job else None,
                rank,
                stream=f"{entry.source}-{rank}" if rank is not None else entry.source,
            )
            reader = self._reader(node)
            await self._read(reader, list(reader.lines(origin, text, self._clock)))

    async def tick(self) -> None:
        for reader in self._readers.values():
            await self._read(reader, list(reader.late_lines(self._clock)))
            await self._send(reader, reader.tracker.tick(self._clock.now()))
        await self._intake.check()
        await self._teller.tell()
        if self._fails_at is not None and self._clock.now() >= self._fails_at + SETTLE:
            self._fails_at = None
            await self._send_verdict()

    async def findings(self) -> Sequence[KnownFinding]:
        """Return all findings by their start, including ended ones."""
        known = await self._store.transact(lambda tx: tx.findings.with_ids(self._ids))
        return [known[finding_id] for finding_id in self._ids if finding_id in known]

    def verdict(self) -> Verdict:
        fails = self._job.fails is not None
        return diagnose(self._collector.facts(job=self._job.name, attempt=self._job.attempt, is_known_to_fail=fails))

    async def _read(self, reader: _NodeReader, lines: Sequence[Line]) -> None:
        # The test sets the times, regardless of the lines.
        timed = [line._replace(at=self._clock.now(), time_source=TimeSource.LINE) for line in lines]
        for line in timed:
            self._collector.line(line)
        await self._send(reader, [finding for line in timed for finding in reader.tracker.feed(line)])

    async def _send_verdict(self) -> None:
        verdict = self.verdict().plain()
        labels = verdict_alert.labels_of(self._job.name, verdict)
        said, now = verdict_alert.annotations_of(verdict), self._clock.now()
        await self._alerts.tell([Alert(fingerprint(labels), AlertStatus.FIRING, labels, said, now, None)])

    def _reader(self, node: str) -> _NodeReader:
        if node not in self._readers:
            gpus = self._job.gpus.get(node, {})
            self._readers[node] = _NodeReader(node, FindingTracker(self._rules, gpus.get))
        return self._readers[node]

    async def _send(self, reader: _NodeReader, found: Sequence[Finding]) -> None:
        if found:
            await self._intake.take([reader.update(finding) for finding in found])
            await self._teller.tell()

    def _new_id(self) -> str:
        self._ids.append(f"finding-{len(self._ids) + 1:05}")
        return self._ids[-1]
