"""Curves of a job and readings of a node's GPUs from Prometheus. Bounded: few points, a few queries."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta

from trainmedic_core import duration
from trainmedic_server.domain.promql import quoted
from trainmedic_server.errors import MetricsUnavailable
from trainmedic_server.ports.metric_history import MetricHistory, MetricSeries

POINTS = 120
"""Most points of a curve."""
NO_PROMETHEUS = "no Prometheus is set (--prometheus-url)"
_SHORTEST = timedelta(seconds=15)
_OF_JOB = (
    ("loss", "", "training_loss"),
    ("throughput", "tokens/s", "training_throughput_tokens_per_second"),
    ("throughput", "samples/s", "training_throughput_samples_per_second"),
    ("learning rate", "", "training_learning_rate"),
)
_OF_NODE = (
    ("temperature_celsius", "gpu_temperature_celsius"),
    ("power_watts", "gpu_power_usage_watts"),
    ("utilization_percent", "gpu_utilization_percent"),
)
_NEWEST = (
    "training_own_median_seconds",
    "training_step",
    "training_checkpoint_step",
    "training_checkpoint_timestamp_seconds",
)
_RECENT = timedelta(minutes=5)
_MOST_RANKS = 64


@dataclass(frozen=True, slots=True)
class Curve:
    name: str
    unit: str
    points: tuple[tuple[float, float | None], ...]
    """(Seconds since 1970, value); None if not finite."""


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


@dataclass(frozen=True, slots=True)
class JobCurves:
    job: str
    since: datetime
    until: datetime
    curves: tuple[Curve, ...]
    """Those with any point."""
    ranks: tuple[RankTime, ...]
    """The slowest ranks, the slowest first. Others are near the median."""
    usual_seconds: float | None
    """Median of all ranks' own times."""
    checkpoint: NewestCheckpoint | None
    """None if Prometheus knows none."""
    unknown: str | None
    """Why there is no checkpoint, if so."""


@dataclass(frozen=True, slots=True)
class NodeGpuReading:
    """Newest values of the last 5 minutes; None for one that is unknown."""

    uuid: str
    temperature_celsius: float | None = None
    power_watts: float | None = None
    utilization_percent: float | None = None


@dataclass(frozen=True, slots=True)
class NodeReadings:
    node: str
    gpus: tuple[NodeGpuReading, ...]
    unknown: str | None


async def of_job(metrics: MetricHistory | None, job: str, begin: datetime, end: datetime) -> JobCurves:
    if metrics is None:
        return _none(job, begin, end, NO_PROMETHEUS)
    every = timedelta(seconds=math.ceil(max((end - begin) / POINTS, _SHORTEST).total_seconds()))
    of_job = f"{{job_name={quoted(job)}}}"
    over = f"{of_job}[{duration.write(max(every, timedelta(minutes=1)))}]"
    lately = f"{of_job}[{duration.write(_RECENT)}]"
    newest = [f"max(last_over_time({metric}{lately}))" for metric in _NEWEST]
    try:
        answers, latest, ranks = await asyncio.gather(
            asyncio.gather(
                *(metrics.read(f"avg(avg_over_time({metric}{over}))", begin, end, every) for _, _, metric in _OF_JOB)
            ),
            asyncio.gather(*(metrics.read(query, end, end, _RECENT) for query in newest)),
            metrics.read(
                f"max by (rank, rank_node) (last_over_time(training_rank_own_seconds{lately}))", end, end, _RECENT
            ),
        )
    except MetricsUnavailable as error:
        return _none(job, begin, end, str(error))
    curves = tuple(
        Curve(name, unit, _finite(answer[0]))
        for (name, unit, _), answer in zip(_OF_JOB, answers, strict=True)
        if answer
    )
    none = "Prometheus has no loss, throughput or learning rate of this job in that time"
    usual, step, saved, saved_at = map(_one, latest)
    timed = [_rank_time(series) for series in ranks if _one([series]) is not None]
    slowest = sorted(timed, key=lambda each: -each.seconds)[:_MOST_RANKS]
    return JobCurves(
        job, begin, end, curves, tuple(slowest), usual, _checkpoint(step, saved, saved_at), None if curves else none
    )


async def of_node(metrics: MetricHistory | None, node: str, now: datetime) -> NodeReadings:
    if metrics is None:
        return NodeReadings(node, (), NO_PROMETHEUS)
    over = f"{{node={quoted(node)}}}[{duration.write(_RECENT)}]"
    try:
        answers = await asyncio.gather(
            *(
                metrics.read(f"max by (uuid) (last_over_time({metric}{over}))", now, now, _RECENT)
                for _, metric in _OF_NODE
            )
        )
    except MetricsUnavailable as error:
        return NodeReadings(node, (), str(error))
    values: dict[str, dict[str, float]] = {}
    for (name, _), answer in zip(_OF_NODE, answers, strict=True):
        for uuid, value in _newest(answer):
            values.setdefault(uuid, {})[name] = value
    gpus = tuple(NodeGpuReading(uuid, **latest) for uuid, latest in sorted(values.items()))
    return NodeReadings(
        node, gpus, None if gpus else "Prometheus has no GPU metrics of this node in the last 5 minutes"
    )


def _none(job: str, begin: datetime, end: datetime, why: str) -> JobCurves:
    return JobCurves(job, begin, end, (), (), None, None, why)


def _one(answer: Sequence[MetricSeries]) -> float | None:
    value = answer[0].points[-1][1] if answer and answer[0].points else math.nan
    return value if math.isfinite(value) else None


def _rank_time(series: MetricSeries) -> RankTime:
    return RankTime(series.labels.get("rank", "?"), series.labels.get("rank_node", ""), series.points[-1][1])


def _checkpoint(step: float | None, saved: float | None, saved_at: float | None) -> NewestCheckpoint | None:
    if saved_at is None:
        return None
    since = int(step - saved) if step is not None and saved is not None and step >= saved else None
    return NewestCheckpoint(None if saved is None else int(saved), datetime.fromtimestamp(saved_at, UTC), since)


def _finite(series: MetricSeries) -> tuple[tuple[float, float | None], ...]:
    return tuple((at, value if math.isfinite(value) else None) for at, value in series.points)


def _newest(answer: Sequence[MetricSeries]) -> list[tuple[str, float]]:
    values = [(series.labels.get("uuid", ""), series.points[-1][1]) for series in answer if series.points]
    return [(uuid, value) for uuid, value in values if uuid and math.isfinite(value)]
