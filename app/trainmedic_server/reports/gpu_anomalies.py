"""Times in which GPUs of a training job were nearly idle or their memory nearly full.

Each GPU is judged by its mean over a window of `GpuBound.lasting`. A window counts only if the job trained in 90 % of
it: after its first step, without checkpoints, evaluations and pauses.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta

from trainmedic_core import duration
from trainmedic_server.ports.metric_history import MetricSeries, Points
from trainmedic_server.reports.anomalies import AnomalousGpu, AnomalyRecord
from trainmedic_server.reports.points import whole_second

MOST_NAMED = 8  # GPUs named for an anomaly. All are counted.
_QUERIED_PER_POINT = 4  # The worst GPUs.
_MOST_NOT_TRAINING = 0.1  # Share of a window that checkpoints, evaluations and the like may take.

_WHILE_TRAINING = (
    " and on () (min(min_over_time(training_steps_total{$job}[$lasting])) > 0)"
    " unless on () (sum(increase(training_window_seconds_total{$job}[$lasting])) > $not_training)"
)


@dataclass(frozen=True, slots=True)
class GpuBound:
    kind: str
    limit: float
    lasting: float  # Shortest period of a GPU's mean, in seconds.
    is_over: bool
    summary: str
    """``{count}``: GPUs at one time. ``{span}``: of training. ``{worst}``: the worst mean. ``{gpu}``: its GPU."""


LOW_UTILISATION = GpuBound(
    "gpu_utilization_low",
    limit=50.0,
    lasting=600.0,
    is_over=False,
    summary="{count} GPU(s) were less than {limit} % busy for {span} of training; the least busy: {gpu}, {worst} %",
)
FULL_MEMORY = GpuBound(
    "gpu_memory_full",
    limit=90.0,
    lasting=300.0,
    is_over=True,
    summary="{count} GPU(s) used over {limit} % of their memory for {span} of training; the fullest: {gpu}, {worst} %",
)


def queries(bound: GpuBound, percent: str, window: float) -> tuple[str, str]:
    """Return two PromQL queries: the number of GPUs out of bounds (0 if the job trains and none is), and these GPUs.

    ``percent`` is each GPU's mean over ``$lasting``, ``window`` that period in seconds.
    """
    sign, worst = (">", "topk") if bound.is_over else ("<", "bottomk")
    out = f"({percent} {sign} {bound.limit:g}{_WHILE_TRAINING})"
    none = f"(0 * count({percent}){_WHILE_TRAINING})"
    how_many, which = (
        query.replace("$not_training", f"{_MOST_NOT_TRAINING * window:g}")
        for query in (f"count({out}) or {none}", f"{worst}({_QUERIED_PER_POINT}, {out})")
    )
    return how_many, which


def anomalies(
    bound: GpuBound, counts: Points, worst: Sequence[MetricSeries], every: float, window: float
) -> list[AnomalyRecord]:
    """Interpret the answers to `queries`. Up to two windows without training, as for a checkpoint, end no anomaly."""
    found = []
    for points in _adjacent(counts, 2 * window + every):
        first_at, last_at = points[0][0], points[-1][0]
        # The first mean covers the whole window before its point.
        since, until = whole_second(first_at - max(window, every)), whole_second(last_at)
        gpus = _worst_gpus(worst, first_at, last_at, max if bound.is_over else min)
        if not gpus:
            continue
        first, most = gpus[0], int(max(count for _, count in points))
        summary = bound.summary.format(
            count=most,
            limit=f"{bound.limit:g}",
            span=duration.write_rounded(timedelta(seconds=len(points) * every + max(window - every, 0.0))),
            worst=f"{first.worst:.3g}",
            gpu=f"{first.uuid} on {first.node}" if first.node else first.uuid,
        )
        found.append(AnomalyRecord(bound.kind, since, until, first.worst, bound.limit, summary, gpus, gpu_count=most))
    return found


def _adjacent(counts: Points, most_apart: float) -> Iterator[list[tuple[float, float]]]:
    run: list[tuple[float, float]] = []
    for at, count in counts:
        if run and (not count > 0 or at - run[-1][0] > most_apart):
            yield run
            run = []
        if count > 0:
            run.append((at, count))
    if run:
        yield run


def _worst_gpus(
    series: Sequence[MetricSeries], begin: float, end: float, pick: Callable[[Iterable[float]], float]
) -> tuple[AnomalousGpu, ...]:
    by_gpu: dict[str, AnomalousGpu] = {}
    for each in series:
        values = [value for at, value in each.points if begin <= at <= end and math.isfinite(value)]
        uuid = each.labels.get("uuid", "")
        if not values or not uuid:
            continue
        known = by_gpu.get(uuid)
        worst = pick([*values, *([known.worst] if known is not None else [])])
        by_gpu[uuid] = AnomalousGpu(uuid, each.labels.get("node", ""), worst)
    ordered = sorted(by_gpu.values(), key=lambda gpu: (gpu.worst, gpu.uuid), reverse=pick is max)
    return tuple(ordered[:MOST_NAMED])
