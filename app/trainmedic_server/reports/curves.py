"""Curves of a job and readings of a node's GPUs, with few points and queries."""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from enum import StrEnum

from trainmedic_core import duration
from trainmedic_server.domain.promql import quoted
from trainmedic_server.errors import MetricsUnavailable
from trainmedic_server.ports.metric_history import MetricHistory, MetricSeries

POINTS = 120  # Intervals of a curve, at most.
NO_PROMETHEUS = "no Prometheus is set (--prometheus-url)"
_SHORTEST_INTERVAL = timedelta(seconds=15)
JOB_CURVES = (("loss", ""), ("throughput", "tokens/s"), ("throughput", "samples/s"), ("learning rate", ""))
GPU_CURVES = (("temperature", "°C"), ("power limit", "W"))
GPU_CURVES_OVER = timedelta(hours=1)
# In the order of JOB_CURVES.
_JOB_METRICS = (
    "training_loss",
    "training_throughput_tokens_per_second",
    "training_throughput_samples_per_second",
    "training_learning_rate",
)
# In the order of GPU_CURVES.
_NODE_CURVE_METRICS = ("gpu_temperature_celsius", "gpu_power_limit_watts")
# Fields of NodeGpuReading with their metrics.
_NODE_METRICS = (
    ("temperature_celsius", "gpu_temperature_celsius"),
    ("power_watts", "gpu_power_usage_watts"),
    ("utilization_percent", "gpu_utilization_percent"),
)
_LATEST_METRICS = (
    "training_own_median_seconds",
    "training_step",
    "training_checkpoint_step",
    "training_checkpoint_timestamp_seconds",
)
RECENT = timedelta(minutes=5)  # Maximum age of a known value.
_MOST_RANKS = 64


class Source(StrEnum):
    PROMETHEUS = "prometheus"
    REPORTS = "reports"  # Reports of jobs and agents since the server started.


@dataclass(frozen=True, slots=True)
class Curve:
    name: str
    unit: str
    points: tuple[tuple[float, float | None], ...]
    """(Seconds since 1970, value); None if not finite or not reported."""


@dataclass(frozen=True, slots=True)
class RankTime:
    """A rank's own time in a step, without waiting for others."""

    rank: str
    node: str
    seconds: float


@dataclass(frozen=True, slots=True)
class NewestCheckpoint:
    """Newest complete checkpoint, and how far the job is beyond it."""

    step: int | None
    at: datetime
    steps_since: int | None

    @classmethod
    def of(cls, step: float | None, saved: float | None, at: datetime) -> NewestCheckpoint:
        """`step` is the job's, `saved` the checkpoint's."""
        since = int(step - saved) if step is not None and saved is not None and step >= saved else None
        return cls(None if saved is None else int(saved), at, since)


@dataclass(frozen=True, slots=True)
class JobCurves:
    job: str
    since: datetime
    until: datetime
    curves: tuple[Curve, ...]
    ranks: tuple[RankTime, ...]  # The slowest ones, slowest first.
    usual_seconds: float | None  # Median of all ranks' own time.
    checkpoint: NewestCheckpoint | None
    unknown: str | None  # Why there are no curves.
    source: Source | None = None  # None if nothing is known.
    reported_since: datetime | None = None  # First report used.
    not_prometheus: str | None = None  # Why Prometheus gave no curves.


@dataclass(frozen=True, slots=True)
class NodeGpuReading:
    """Newest values of the last 5 minutes; None for one that is unknown."""

    uuid: str
    temperature_celsius: float | None = None
    power_watts: float | None = None
    utilization_percent: float | None = None
    curves: tuple[Curve, ...] = ()


@dataclass(frozen=True, slots=True)
class NodeReadings:
    node: str
    gpus: tuple[NodeGpuReading, ...]
    unknown: str | None  # Why there are no GPUs.
    source: Source | None = None
    reported_since: datetime | None = None
    not_prometheus: str | None = None


async def of_job(metrics: MetricHistory | None, job: str, begin: datetime, end: datetime) -> JobCurves:
    if metrics is None:
        return _without_curves(job, begin, end, NO_PROMETHEUS)
    every = timedelta(seconds=math.ceil(max((end - begin) / POINTS, _SHORTEST_INTERVAL).total_seconds()))
    matcher = f"{{job_name={quoted(job)}}}"
    over = f"{matcher}[{duration.write(max(every, timedelta(minutes=1)))}]"
    lately = f"{matcher}[{duration.write(RECENT)}]"
    newest = [f"max(last_over_time({metric}{lately}))" for metric in _LATEST_METRICS]
    try:
        answers, latest, ranks = await asyncio.gather(
            asyncio.gather(
                *(metrics.read(f"avg(avg_over_time({metric}{over}))", begin, end, every) for metric in _JOB_METRICS)
            ),
            asyncio.gather(*(metrics.read(query, end, end, RECENT) for query in newest)),
            metrics.read(
                f"max by (rank, rank_node) (last_over_time(training_rank_own_seconds{lately}))", end, end, RECENT
            ),
        )
    except MetricsUnavailable as error:
        return _without_curves(job, begin, end, str(error))
    curves = tuple(
        Curve(name, unit, _finite_points(answer[0]))
        for (name, unit), answer in zip(JOB_CURVES, answers, strict=True)
        if answer
    )
    usual, step, saved, saved_at = map(_latest_value, latest)  # In the order of _LATEST_METRICS.
    timed = [
        RankTime(series.labels.get("rank", "?"), series.labels.get("rank_node", ""), series.points[-1][1])
        for series in ranks
        if _latest_value([series]) is not None
    ]
    slowest = sorted(timed, key=lambda each: -each.seconds)[:_MOST_RANKS]
    checkpoint = None
    if saved_at is not None:
        with contextlib.suppress(ValueError, OverflowError, OSError):  # no time
            checkpoint = NewestCheckpoint.of(step, saved, datetime.fromtimestamp(saved_at, UTC))
    source = Source.PROMETHEUS if curves or checkpoint is not None or slowest else None
    unknown = None if curves else "Prometheus has no loss, throughput or learning rate of this job in that time"
    return JobCurves(job, begin, end, curves, tuple(slowest), usual, checkpoint, unknown, source, None, unknown)


async def of_node(metrics: MetricHistory | None, node: str, now: datetime) -> NodeReadings:
    if metrics is None:
        return NodeReadings(node, (), NO_PROMETHEUS, not_prometheus=NO_PROMETHEUS)
    matcher = f"{{node={quoted(node)}}}"
    lately = f"{matcher}[{duration.write(RECENT)}]"
    every = GPU_CURVES_OVER / POINTS
    begin = now - GPU_CURVES_OVER
    try:
        answers, curve_answers = await asyncio.gather(
            asyncio.gather(
                *(
                    metrics.read(f"max by (uuid) (last_over_time({metric}{lately}))", now, now, RECENT)
                    for _, metric in _NODE_METRICS
                )
            ),
            asyncio.gather(
                *(
                    metrics.read(f"max by (uuid) (avg_over_time({metric}{matcher}[1m]))", begin, now, every)
                    for metric in _NODE_CURVE_METRICS
                )
            ),
        )
    except MetricsUnavailable as error:
        return NodeReadings(node, (), str(error), not_prometheus=str(error))
    values: dict[str, dict[str, float]] = {}
    for (name, _), answer in zip(_NODE_METRICS, answers, strict=True):
        for uuid, value in _latest_by_uuid(answer):
            values.setdefault(uuid, {})[name] = value
    curves: dict[str, tuple[Curve, ...]] = {}
    for (name, unit), answer in zip(GPU_CURVES, curve_answers, strict=True):
        for series in answer:
            uuid = series.labels.get("uuid", "")
            curves[uuid] = (*curves.get(uuid, ()), Curve(name, unit, _finite_points(series)))
    gpus = tuple(NodeGpuReading(uuid, **latest, curves=curves.get(uuid, ())) for uuid, latest in sorted(values.items()))
    unknown = None if gpus else "Prometheus has no GPU metrics of this node in the last 5 minutes"
    return NodeReadings(node, gpus, unknown, Source.PROMETHEUS if gpus else None, None, unknown)


def _without_curves(job: str, begin: datetime, end: datetime, why: str) -> JobCurves:
    return JobCurves(job, begin, end, (), (), None, None, why, not_prometheus=why)


def _latest_value(answer: Sequence[MetricSeries]) -> float | None:
    value = answer[0].points[-1][1] if answer and answer[0].points else math.nan
    return value if math.isfinite(value) else None


def _finite_points(series: MetricSeries) -> tuple[tuple[float, float | None], ...]:
    return tuple((at, value if math.isfinite(value) else None) for at, value in series.points)


def _latest_by_uuid(answer: Sequence[MetricSeries]) -> list[tuple[str, float]]:
    values = [(series.labels.get("uuid", ""), series.points[-1][1]) for series in answer if series.points]
    return [(uuid, value) for uuid, value in values if uuid and math.isfinite(value)]
