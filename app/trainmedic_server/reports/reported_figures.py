"""Figures that jobs and agents reported lately, in bounded memory, for people without Prometheus."""

from __future__ import annotations

import asyncio
import itertools
import math
from array import array
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from typing import Any, Generic, TypeVar

from trainmedic.wire import envelope
from trainmedic_server import telemetry
from trainmedic_server.engine import loops
from trainmedic_server.ports.jobs import PresenceSource
from trainmedic_server.ports.outside import Clock, Presence
from trainmedic_server.reports.curves import (
    GPU_CURVES,
    JOB_CURVES,
    RECENT,
    Curve,
    JobCurves,
    NewestCheckpoint,
    NodeGpuReading,
    NodeReadings,
    Source,
)

MOST_JOBS, MOST_GPUS = 1000, 8000  # Each takes up to 5 KB.
MOST_POINTS = 120
FIRST_PERIOD, LONGEST_PERIOD = 5.0, 320.0
"""Seconds between two points; doubled when there are too many points."""
_LOOK_EVERY = timedelta(seconds=5)
_IN_USE = timedelta(minutes=1)  # Entries with a newer report are never replaced.
_SILENCE = 30.0  # Seconds without a report that count as a gap.
_YIELD_AFTER = 100  # Presences between two turns of the event loop's other tasks.
Key = TypeVar("Key", bound=Hashable)


class FigureSeries:
    """Means of several figures by period, oldest first, at most `MOST_POINTS`."""

    def __init__(self, figures: int) -> None:
        self._period = FIRST_PERIOD
        self._starts = array("d")  # Of periods, in seconds since 1970.
        self._means = [array("d") for _ in range(figures)]  # By figure and period.
        self._counts = [0] * figures  # Values in the newest period, by figure.

    def add(self, at: float, values: Sequence[float | None]) -> None:
        """Skip values older than the newest period."""
        if not self._starts or at >= self._starts[-1] + self._period:
            self._make_space()
            start = at - at % self._period
            if not self._starts or start > self._starts[-1]:
                for column in (self._starts, *self._means):
                    column.append(start if column is self._starts else math.nan)
                self._counts = [0] * len(self._counts)
        if at < self._starts[-1]:
            return
        for figure, value in enumerate(values):
            if value is not None:
                means, count = self._means[figure], self._counts[figure] + 1
                # Divided first, because the difference of huge numbers is infinite.
                means[-1] = value if math.isnan(means[-1]) else means[-1] + (value / count - means[-1] / count)
                self._counts[figure] = count

    def points(self, figure: int, begin: float, end: float) -> tuple[tuple[float, float | None], ...]:
        """Return a figure's points, with one of value None in each gap; empty without any value."""
        points: list[tuple[float, float | None]] = []
        for start, mean in zip(self._starts, self._means[figure], strict=True):
            if begin - self._period < start <= end:
                if points and start - points[-1][0] > max(2 * self._period, _SILENCE):
                    points.append((points[-1][0] + self._period, None))
                points.append((start, None if math.isnan(mean) else mean))
        return tuple(points) if any(value is not None for _, value in points) else ()

    def _make_space(self) -> None:
        """Double the period if there are too many points, then drop the oldest."""
        while len(self._starts) >= MOST_POINTS and self._period < LONGEST_PERIOD:
            self._period *= 2
            starts = [start - start % self._period for start in self._starts]
            groups = [list(places) for _, places in itertools.groupby(range(len(starts)), starts.__getitem__)]
            self._starts = array("d", (starts[places[0]] for places in groups))
            self._means = [
                array("d", (_mean(map(means.__getitem__, each)) for each in groups)) for means in self._means
            ]
        for column in (self._starts, *self._means):
            del column[: max(len(column) - MOST_POINTS + 1, 0)]


@dataclass(slots=True)
class _Entry:
    series: FigureSeries
    since: datetime  # First report.
    last: datetime  # Newest report.
    checkpoint: NewestCheckpoint | None = None
    reading: NodeGpuReading | None = None


@dataclass(slots=True)
class _Entries(Generic[Key]):
    most: int  # Entries.
    figures: int  # Number of figures in an entry.
    by_key: dict[Key, _Entry] = field(default_factory=dict)  # The one reported last is last.

    def for_report(self, key: Key, when: datetime) -> _Entry | None:
        """Return the entry, created if missing; None if the report is not newer or all entries are in use."""
        entry = self.by_key.get(key)
        if entry is None:
            oldest = next(iter(self.by_key), None)
            if oldest is not None and len(self.by_key) >= self.most:
                if when - self.by_key[oldest].last < _IN_USE:
                    return None
                del self.by_key[oldest]
            entry = _Entry(FigureSeries(self.figures), when, when)
        elif when <= entry.last:
            return None
        entry.last = when
        self.by_key.pop(key, None)
        self.by_key[key] = entry
        return entry


class ReportedFigures:
    """Not thread-safe."""

    def __init__(self, presences: PresenceSource, clock: Clock) -> None:
        self._presences = presences
        self._clock = clock
        self._jobs: _Entries[str] = _Entries(MOST_JOBS, len(JOB_CURVES))
        self._gpus: _Entries[tuple[str, str]] = _Entries(MOST_GPUS, len(GPU_CURVES))

    async def watch(self, metrics: telemetry.Metrics) -> None:
        await loops.repeat(self.look, _LOOK_EVERY, "reported figures", metrics)

    async def look(self) -> None:
        """Read all presences once. Raises BusUnavailable."""
        jobs, agents = await asyncio.gather(self._presences.jobs(), self._presences.agents())
        for take, listed in ((self._take_job, jobs), (self._take_agent, agents)):
            for number, presence in enumerate(listed, 1):
                if presence.doubt is None:
                    take(presence, min(presence.last_seen, self._clock.now()))
                if number % _YIELD_AFTER == 0:
                    await asyncio.sleep(0)

    def of_job(self, job: str, begin: datetime, end: datetime, why: str) -> JobCurves | None:
        """Return None without reports since `begin`. `why`: reason not to use Prometheus."""
        entry = self._jobs.by_key.get(job)
        if entry is None or entry.last < begin:
            return None
        curves = _curves(JOB_CURVES, entry.series, begin, end)
        unknown = None if curves else "the job reported no loss, throughput or learning rate in that time"
        return JobCurves(
            job, begin, end, curves, (), None, entry.checkpoint, unknown, Source.REPORTS, max(entry.since, begin), why
        )

    def of_node(self, node: str, since: datetime, now: datetime, why: str) -> NodeReadings | None:
        entries = [entry for (of, _), entry in self._gpus.by_key.items() if of == node and now - entry.last <= RECENT]
        gpus = [
            replace(entry.reading, curves=_curves(GPU_CURVES, entry.series, since, now))
            for entry in entries
            if entry.reading is not None
        ]
        if not gpus:
            return None
        began = max(since, min(entry.since for entry in entries))
        ordered = tuple(sorted(gpus, key=lambda gpu: gpu.uuid))
        return NodeReadings(node, ordered, None, Source.REPORTS, began, why)

    def _take_job(self, job: Presence, when: datetime) -> None:
        entry = self._jobs.for_report(job.name, when)
        if entry is None:
            return
        details = job.details
        losses = details.get("losses")
        loss = losses.get("median") if isinstance(losses, Mapping) else None
        names = ("tokens_per_second", "samples_per_second", "learning_rate")
        entry.series.add(when.timestamp(), [_number(loss), *(_number(details.get(name)) for name in names)])
        entry.checkpoint = _checkpoint(details.get("checkpoint"), _number(details.get("step")))

    def _take_agent(self, agent: Presence, when: datetime) -> None:
        limits = {
            gpu.get("uuid"): _number(gpu.get("power_limit_watts")) for gpu in _mappings(agent.details.get("gpus"))
        }
        for each in _mappings(agent.details.get("gpu_readings")):
            uuid = each.get("uuid")
            if not isinstance(uuid, str) or (entry := self._gpus.for_report((agent.name, uuid), when)) is None:
                continue
            celsius = _number(each.get("temperature_celsius"))
            entry.series.add(when.timestamp(), [celsius, limits.get(uuid)])
            watts, busy = _number(each.get("power_watts")), _number(each.get("utilization_percent"))
            entry.reading = NodeGpuReading(uuid, celsius, watts, busy)


def _curves(
    named: Sequence[tuple[str, str]], series: FigureSeries, begin: datetime, end: datetime
) -> tuple[Curve, ...]:
    curves = (
        Curve(name, unit, series.points(figure, begin.timestamp(), end.timestamp()))
        for figure, (name, unit) in enumerate(named)
    )
    return tuple(curve for curve in curves if curve.points)


def _checkpoint(reported: Any, step: float | None) -> NewestCheckpoint | None:
    if not isinstance(reported, Mapping) or not isinstance(at := reported.get("at"), str):
        return None
    try:
        when = envelope.read_time(at).astimezone(UTC)
    except (envelope.EnvelopeError, ValueError, OverflowError):
        return None
    saved = _number(reported.get("step"))
    return NewestCheckpoint.of(step, saved, when)


def _mappings(value: Any) -> Iterable[Mapping[str, Any]]:
    return (each for each in value if isinstance(each, Mapping)) if isinstance(value, list) else ()


def _number(value: Any) -> float | None:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    try:
        number = float(value)
    except OverflowError:
        return None
    return number if math.isfinite(number) else None


def _mean(values: Iterable[float]) -> float:
    known = [value for value in values if not math.isnan(value)]
    # Not by `fmean`, which raises for a huge sum.
    return sum(value / len(known) for value in known) if known else math.nan
