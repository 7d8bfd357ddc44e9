"""Prometheus queries for the report on a job.

The server's metric ``trainmedic_job_gpu`` names the job's GPUs at each moment.
"""

from __future__ import annotations

import asyncio
import itertools
import math
from collections.abc import Sequence
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from string import Template
from typing import Any

from trainmedic_core import duration
from trainmedic_server.domain.promql import quoted
from trainmedic_server.errors import MetricsUnavailable
from trainmedic_server.ports.metric_history import MetricHistory, MetricSeries, Points
from trainmedic_server.reports import anomalies, cpu_use, efficiency, gpu_anomalies, points
from trainmedic_server.reports.anomalies import AnomalyRecord
from trainmedic_server.reports.bottleneck import MemoryUse, Straggler, step_shares
from trainmedic_server.reports.cpu_use import CpuUse
from trainmedic_server.reports.efficiency import UsualThroughput
from trainmedic_server.reports.goodput import ProgressPoints
from trainmedic_server.reports.gpu_anomalies import GpuBound
from trainmedic_server.reports.job_figures import JobFigures
from trainmedic_server.reports.points import Spread, Stretch

INTERVALS = 720  # Most points of a query.
_GPU_INTERVALS = 120  # Few: Prometheus evaluates each for every GPU.
_SHORTEST_INTERVAL = timedelta(minutes=1)
_BASELINE_WITHIN = timedelta(days=30)
_OTHER_JOB_AFTER_SECONDS = 86_400.0
"""Absence after which a job of this name is another one, as `domain.job_life.KEPT`."""
_FIRST_HOURS = timedelta(hours=6)  # Source of the baseline.
_MOST_QUERIES_AT_ONCE = 4
_SHORTEST_COUNTED = timedelta(minutes=10)  # Shortest part of the period whose scrapes are counted.

# Templates of PromQL. $job matches the job's series, $every is the interval of the points. In those with {over}, which
# str.format fills, braces are doubled, and $$ becomes a dollar sign.

_SCRAPE_COUNT = "max(count_over_time(training_steps_total{$job}[$every]))"
_JOB_GPUS = "max by (uuid) (max_over_time(trainmedic_job_gpu{$job}[$every]))"
# GPUs that were the job's at both ends of the interval. Others were partly used by another job.
_GPUS_THROUGHOUT = (
    "(max by (uuid) (trainmedic_job_gpu{$job}) and max by (uuid) (trainmedic_job_gpu{$job} offset $every))"
)
# dcgm-exporter, for nodes whose agent is not scraped, as in monitoring/rules/gpu.yaml.
_UTILISATION = (
    "({over}_over_time(gpu_utilization_percent[$every]) or label_replace({over}_over_time(DCGM_FI_DEV_GPU_UTIL[$every])"
    ' unless on (node) gpu_utilization_percent{{node!=""}}, "uuid", "$$1", "UUID", "(.*)"))'
)
_MEMORY = (
    "100 * ({over}_over_time(gpu_memory_used_bytes[$every]) / max_over_time(gpu_memory_total_bytes[$every]) or"
    " label_replace({over}_over_time(DCGM_FI_DEV_FB_USED[$every])"
    " / (avg_over_time(DCGM_FI_DEV_FB_USED[$every]) + avg_over_time(DCGM_FI_DEV_FB_FREE[$every]))"
    ' unless on (node) gpu_memory_total_bytes{{node!=""}}, "uuid", "$$1", "UUID", "(.*)"))'
)
_WINDOW_SECONDS = "max by (window) (last_over_time(training_window_seconds_total{$job}[$every]))"
_OWN_SECONDS = "avg_over_time(training_rank_own_seconds{$job}[$every])"


class JobQueries:
    """Every method raises MetricsUnavailable."""

    def __init__(self, history: MetricHistory, job: str, begin: datetime, end: datetime) -> None:
        self._history = history
        self._job = job
        self._begin = begin
        self._end = end
        self._scrape_interval = timedelta(0)
        self._every = _interval(end - begin, self._scrape_interval)
        self._turns = asyncio.Semaphore(_MOST_QUERIES_AT_ONCE)

    async def figures(self) -> JobFigures:
        """Return empty figures if the job has no metrics in the period."""
        begin, end = self._begin, self._end
        scrapes, part = await self._narrow_to_presence()
        if part > _SHORTEST_COUNTED:
            # The first pass may be coarse, as with hours of a year: repeat it within its result.
            scrapes, part = await self._narrow_to_presence()
        if not scrapes:
            return JobFigures(self._every.total_seconds())
        self._scrape_interval = await self._interval_of_scrapes(scrapes, part)
        self._every = _interval(self._end - self._begin, self._scrape_interval)
        measured = await self._measured(begin, end)
        progress, gpus, throughput, steps, found, cpu = await asyncio.gather(
            self._progress(measured),
            self._gpus(),
            self._throughput(),
            self._step_time(),
            self._anomalies(),
            self._cpu(),
        )
        if not progress.steps:
            return JobFigures(self._every.total_seconds())
        figures = JobFigures(self._every.total_seconds(), progress, anomalies=found, cpu=cpu)
        return replace(figures, **gpus, **throughput, **steps)  # Each has fields of `JobFigures`.

    async def _narrow_to_presence(self) -> tuple[Points, timedelta]:
        """Shorten the period to the job's presence. Return the scrapes in each part, and a part's length."""
        part = max(_interval(self._end - self._begin, timedelta(0)), _SHORTEST_COUNTED)
        parts = math.ceil((self._end - self._begin) / part)
        begin = self._end - parts * part
        scrapes = await self._first_series(_SCRAPE_COUNT, part, begin)
        if scrapes:
            self._begin = max(self._begin, _moment(scrapes[0][0]) - part)
            self._end = _moment(scrapes[-1][0])
        return scrapes, part

    async def _interval_of_scrapes(self, scrapes: Points, part: timedelta) -> timedelta:
        """Use the fullest minute too: a short job fills no part."""
        at, most = max(scrapes, key=lambda point: point[1])
        minute = _interval(part, timedelta(0))
        minutes = await self._first_series(_SCRAPE_COUNT, minute, _moment(at) - part, _moment(at))
        fullest = max((count for _, count in minutes), default=1)
        return min(part / most, minute / fullest) if fullest > 1 else part / most

    async def _measured(self, begin: datetime, end: datetime) -> list[Stretch]:
        # Periods in which Prometheus scraped anything.
        every = _interval(end - begin, self._scrape_interval)
        there = await self._first_series("count(count_over_time(up[$every]))", every, begin, end)
        return points.stretches(there, every.total_seconds())

    async def _progress(self, measured: Sequence[Stretch]) -> ProgressPoints:
        newest = ("training_steps_total", "training_step", "training_step_median_seconds")
        highest = ("training_stall_seconds", "training_hang_limit_seconds")
        (steps, step, seconds, stall, limit), windows = await asyncio.gather(
            self._first_series_of(
                *(f"max(last_over_time({name}{{$job}}[$every]))" for name in newest),
                *(f"max(max_over_time({name}{{$job}}[$every]))" for name in highest),
            ),
            self._series(_WINDOW_SECONDS),
        )
        by_window = {series.labels.get("window", "other"): series.points for series in windows}
        return ProgressPoints(steps, step, seconds, stall, limit, by_window, measured)

    async def _gpus(self) -> dict[str, Any]:
        async def spread_of(metric: str) -> Spread | None:
            query = "{fold}(" + metric + " * on (uuid) group_left () {job_gpus})"
            average, high, low = await asyncio.gather(
                *(
                    self._first_series(query.format(fold=over, over=over, job_gpus=job_gpus), every)
                    for over in ("avg", "max", "min")
                )
            )
            return points.spread(average, high, low, count)

        every = self._gpu_interval
        job_gpus, count = _GPUS_THROUGHOUT, await self._first_series(f"count({_GPUS_THROUGHOUT})", every)
        if not count:
            job_gpus, count = _JOB_GPUS, await self._first_series(f"count({_JOB_GPUS})", every)
        most = max(points.finite(count), default=None)
        if most is None:
            return {}
        try:
            utilisation, memory = await asyncio.gather(spread_of(_UTILISATION), spread_of(_MEMORY))
            low, full = await asyncio.gather(
                self._gpu_anomalies(gpu_anomalies.LOW_UTILISATION, _UTILISATION, job_gpus),
                self._gpu_anomalies(gpu_anomalies.FULL_MEMORY, _MEMORY, job_gpus),
            )
        except MetricsUnavailable as error:
            # Prometheus may refuse queries over thousands of GPUs and answer all others.
            return {"gpus": int(most), "no_gpus": str(error)}
        looked_for = [*low, *full] if utilisation is not None or memory is not None else None
        return {"gpus": int(most), "utilisation": utilisation, "memory": memory, "gpu_anomalies": looked_for}

    @property
    def _gpu_interval(self) -> timedelta:
        return max(self._every, _interval(self._end - self._begin, self._scrape_interval, _GPU_INTERVALS))

    async def _gpu_anomalies(self, bound: GpuBound, metric: str, job_gpus: str) -> list[AnomalyRecord]:
        every = self._gpu_interval
        window = max(every, timedelta(seconds=bound.lasting))
        # Its maximum and minimum cover the same window as the condition.
        percent = (metric.format(over="avg") + f" * on (uuid) group_left () {job_gpus}").replace("$every", "$lasting")
        count, worst = (
            query.replace("$lasting", duration.write(window))
            for query in gpu_anomalies.queries(bound, f"({percent})", window.total_seconds())
        )
        counts, series = await asyncio.gather(self._first_series(count, every), self._series(worst, every))
        return gpu_anomalies.anomalies(bound, counts, series, every.total_seconds(), window.total_seconds())

    async def _throughput(self) -> dict[str, Any]:
        for amount in ("samples", "tokens"):
            metric = f"training_throughput_{amount}_per_second{{$job}}"
            average, high, low = await self._first_series_of(
                *(f"max({over}_over_time({metric}[$every]))" for over in ("avg", "max", "min"))
            )
            measured = points.spread(average, high, low)
            if measured is not None:
                return {"throughput": measured, "unit": f"{amount}/s", "baseline": await self._baseline(amount)}
        return {}

    async def _baseline(self, amount: str) -> UsualThroughput | None:
        declared = await self._first_series(f"max(last_over_time(training_target_{amount}_per_second{{$job}}[$every]))")
        target = efficiency.target(declared[-1][1] if declared else None, declared)
        if target is not None:
            return target
        metric = f"training_throughput_{amount}_per_second{{$job}}"
        return efficiency.baseline(await self._first_hours(f"max(avg_over_time({metric}[$every]))"))

    async def _cpu(self) -> CpuUse | None:
        median, ranks = await asyncio.gather(
            self._first_series("max(avg_over_time(training_cpu_cores{$job}[$every]))"),
            self._series("avg by (rank, rank_node) (avg_over_time(training_rank_cpu_cores{$job}[$every]))"),
        )
        return cpu_use.cpu_use(median, ranks)

    async def _first_hours(self, query: str) -> Points:
        begin = min(self._begin, self._end - _BASELINE_WITHIN)
        coarse = _interval(self._end - begin, timedelta(0))
        there = await self._first_series(_SCRAPE_COUNT, coarse, begin)
        if not there:
            return ()
        first = there[0][0]  # After the last long absence: an earlier job had the same name.
        for (before, _), (after, _) in itertools.pairwise(there):
            if after - before > _OTHER_JOB_AFTER_SECONDS:
                first = after
        started = _moment(first) - coarse
        fine = _interval(_FIRST_HOURS, self._scrape_interval)
        return await self._first_series(query, fine, started, min(started + _FIRST_HOURS + coarse, self._end))

    async def _step_time(self) -> dict[str, Any]:
        names = ("data_seconds", "compute_seconds", "wait_seconds", "step_median_seconds", "own_median_seconds")
        known, ranks, used, retries = await asyncio.gather(
            self._first_series_of(*(f"max(avg_over_time(training_{name}{{$job}}[$every]))" for name in names)),
            self._series(_OWN_SECONDS),
            self._series(
                "max by (memory) (max_over_time(training_memory_used_bytes{$job}[$every])"
                " / max_over_time(training_memory_limit_bytes{$job}[$every]))"
            ),
            self._first_series("max(last_over_time(training_cuda_memory_retries_total{$job}[$every]))"),
        )
        data, compute, wait, step, own = (points.average(values) for values in known)
        most = {series.labels.get("memory"): max(points.finite(series.points), default=None) for series in used}
        return {
            "shares": step_shares(data, compute, wait, step),
            "straggler": _straggler(ranks, own),
            "memory_use": MemoryUse(most.get("cuda"), most.get("host"), points.rise(retries, is_from_zero=False)),
        }

    async def _anomalies(self) -> list[AnomalyRecord]:
        answers = await asyncio.gather(*(self._series(bound.query) for bound in anomalies.BOUNDS))
        every = self._every.total_seconds()
        return [
            anomaly
            for bound, answer in zip(anomalies.BOUNDS, answers, strict=True)
            for series in answer
            for anomaly in anomalies.anomalies(bound, series.points, every)
        ]

    async def _first_series_of(self, *queries: str) -> list[Points]:
        return list(await asyncio.gather(*map(self._first_series, queries)))

    async def _first_series(
        self, query: str, every: timedelta | None = None, begin: datetime | None = None, end: datetime | None = None
    ) -> Points:
        answer = await self._series(query, every, begin, end)
        return answer[0].points if answer else ()

    async def _series(
        self, query: str, every: timedelta | None = None, begin: datetime | None = None, end: datetime | None = None
    ) -> Sequence[MetricSeries]:
        every, begin, last = every or self._every, begin or self._begin, end or self._end
        # Each point covers the interval before it. The last one ends with the period.
        first = last - max((last - begin) // every - 1, 0) * every
        matcher = f"job_name={quoted(self._job)}"
        values = {"job": matcher, "every": duration.write(every)}
        # For queries of `anomalies.BOUNDS`.
        values["gpus"] = Template(_JOB_GPUS).substitute(values)
        async with self._turns:
            return await self._history.read(Template(query).substitute(values), first, last, every)


def _moment(seconds: float) -> datetime:
    return datetime.fromtimestamp(seconds, UTC)


def _interval(length: timedelta, apart: timedelta, most: int = INTERVALS) -> timedelta:
    """Return the shortest interval of a minute or more, in whole seconds, that divides `length` into at most `most`
    parts with at least two scrapes, `apart` from each other.
    """
    seconds = max(length / most, _SHORTEST_INTERVAL, 2.5 * apart).total_seconds()
    return timedelta(seconds=math.ceil(seconds))


def _straggler(ranks: Sequence[MetricSeries], own_median: float | None) -> Straggler | None:
    """Return the slowest rank, None if unknown. Ignore ranks with few points: only the slowest of a moment have one."""
    averages = [(average, series) for series in ranks if (average := points.average(series.points)) is not None]
    if not averages or not own_median:
        return None
    longest = max(len(series.points) for _, series in averages)
    lasting = [(average, series) for average, series in averages if 2 * len(series.points) >= longest]
    average, series = max(lasting, key=lambda pair: pair[0])
    return Straggler(series.labels.get("rank", "?"), series.labels.get("rank_node", "?"), average / own_median)
