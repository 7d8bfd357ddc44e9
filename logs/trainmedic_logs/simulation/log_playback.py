"""Playback of a test's lines through the agent's assemblers and trackers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta

from trainmedic_logs.diagnosis.collecting import Collector
from trainmedic_logs.diagnosis.judge import diagnose
from trainmedic_logs.diagnosis.verdict import Verdict
from trainmedic_logs.domain.finding import Finding, Origin, TimeSource
from trainmedic_logs.domain.finding_codec import FindingUpdate
from trainmedic_logs.lines.assembly import LineAssembler
from trainmedic_logs.lines.line import Line
from trainmedic_logs.lines.rule import RuleSet
from trainmedic_logs.lines.tracker import FindingTracker
from trainmedic_logs.simulation.log_test_format import JobEntry, LineEntry

TICK = timedelta(seconds=1)
LAZY_TICK = timedelta(seconds=10)  # once all lines are settled
SETTLE = timedelta(seconds=10)
"""Time after the last line for held-back blocks, and after the failure for the verdict."""


@dataclass
class _NodeReader:
    name: str
    tracker: FindingTracker
    assemblers: dict[Origin, LineAssembler] = field(default_factory=dict)
    places: dict[Origin, int] = field(default_factory=dict)
    sent: int = 0

    def lines(self, origin: Origin, text: str, now: datetime) -> Iterator[Line]:
        assembler = self.assemblers.setdefault(origin, LineAssembler(origin))
        for physical in text.split("\n"):
            place = self.places.get(origin, 0)
            self.places[origin] = place + len(physical) + 1
            yield from assembler.feed(physical.encode(), now, place)

    def late_lines(self, now: datetime) -> Iterator[Line]:
        for assembler in self.assemblers.values():
            yield from assembler.flush(now)

    def update(self, finding: Finding) -> FindingUpdate:
        self.sent += 1
        return FindingUpdate(self.name, "simulated", self.sent, finding)


class LogPlayback:
    def __init__(self, job: JobEntry, rules: RuleSet, fixtures: Mapping[str, str]) -> None:
        self._job = job
        self._rules = rules
        self._fixtures = fixtures
        self._readers: dict[str, _NodeReader] = {}
        self._collector = Collector(rules)
        for node, ranks in job.nodes.items():
            for rank in ranks:
                self._collector.note_rank(rank, node=node)
        self._collector.note_world_size(job.ranks or sum(map(len, job.nodes.values())))

    def print(self, entry: LineEntry, now: datetime) -> Iterator[Sequence[FindingUpdate]]:
        """Yield the findings of each rank, as agents send them."""
        text = entry.written(self._fixtures)
        for rank in entry.rank or (None,):
            node = entry.node or (self._job.node_of(rank) if rank is not None else self._job.first_node)
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
            yield self._read(reader, list(reader.lines(origin, text, now)), now)

    def tick(self, now: datetime) -> Iterator[Sequence[FindingUpdate]]:
        for reader in self._readers.values():
            yield self._read(reader, list(reader.late_lines(now)), now)
            yield [reader.update(finding) for finding in reader.tracker.tick(now)]

    def verdict(self) -> Verdict:
        fails = self._job.fails is not None
        return diagnose(self._collector.facts(job=self._job.name, attempt=self._job.attempt, is_known_to_fail=fails))

    def _read(self, reader: _NodeReader, lines: Sequence[Line], now: datetime) -> Sequence[FindingUpdate]:
        # The test sets the times, regardless of the lines.
        timed = [line._replace(at=now, time_source=TimeSource.LINE) for line in lines]
        for line in timed:
            self._collector.add_line(line)
        return [reader.update(finding) for line in timed for finding in reader.tracker.feed(line)]

    def _reader(self, node: str) -> _NodeReader:
        if node not in self._readers:
            gpus = self._job.gpus.get(node, {})
            self._readers[node] = _NodeReader(node, FindingTracker(self._rules, gpus.get))
        return self._readers[node]
