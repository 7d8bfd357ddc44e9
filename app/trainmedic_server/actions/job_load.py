"""Action ``job.load``."""

from __future__ import annotations

import asyncio
import itertools
import math
from collections.abc import Mapping
from datetime import datetime, timedelta
from typing import Any, ClassVar, cast

from pydantic import BaseModel, Field

from trainmedic_core import duration
from trainmedic_core.fields import Duration
from trainmedic_core.target import TargetKind
from trainmedic_server.actions.base import ActionParams, BasicAction, check_wanted, clearance_of
from trainmedic_server.domain import promql
from trainmedic_server.domain.value_types import NUMBER, TEXT, Shape
from trainmedic_server.errors import MetricsUnavailable, PermanentFailure, TemporaryFailure
from trainmedic_server.ports.actions import Action, Call
from trainmedic_server.ports.metric_history import MetricHistory

_LOOK_EVERY = timedelta(seconds=30)  # also the step of range queries
_NEARLY_ALL = 0.9  # share of the samples that must be there: a scrape may fail
_AMOUNTS = ("samples", "tokens")


class JobLoadParams(ActionParams):
    over: Duration = Field(
        timedelta(minutes=10),
        description="The time over which the figures are averaged.",
        ge=timedelta(minutes=1),
        le=timedelta(hours=6),
    )
    fresh: bool = Field(
        False,
        description="Wait first until the job has trained for this time without a break since the step began.",
    )
    least_throughput: float | None = Field(None, ge=0, description="Fail if the throughput is below this, or unknown.")


class JobLoad(BasicAction):
    name: ClassVar[str] = "job.load"
    summary: ClassVar[str] = "Look up a job's throughput and the utilisation of its GPUs, and check the throughput."
    targets: ClassVar[frozenset[TargetKind]] = frozenset({TargetKind.JOB})
    harmful: ClassVar[bool] = False
    default_timeout: ClassVar[timedelta] = timedelta(minutes=1)
    Params: ClassVar[type[BaseModel]] = JobLoadParams
    outputs: ClassVar[Mapping[str, Shape]] = {
        "throughput": NUMBER,
        "unit": TEXT,
        "target": NUMBER,
        "utilization_percent": NUMBER,
        "over_seconds": NUMBER,
    }

    async def perform(self, call: Call) -> Mapping[str, Any]:
        metrics = self.services.metrics
        if metrics is None:
            raise PermanentFailure("no Prometheus is set (--prometheus-url)")
        params = cast(JobLoadParams, call.params)
        try:
            if params.fresh:
                await self._wait_until_trained(metrics, call, params.over)
            output = await _figures(metrics, str(call.target.job), params.over, self.services.clock.now())
        except MetricsUnavailable as error:
            raise TemporaryFailure(str(error)) from error
        least = params.least_throughput
        if least is not None:
            _check_throughput(output, least)
        return output

    async def _wait_until_trained(self, metrics: MetricHistory, call: Call, over: timedelta) -> None:
        clock, ready = self.services.clock, call.issued_at + over
        while True:
            now = clock.now()
            if now >= ready and await _has_trained(metrics, str(call.target.job), over, now):
                return
            if now >= call.deadline:
                raise TemporaryFailure(f"the job has not trained for {duration.write(over)} without a break")
            check_wanted(await clearance_of(call))
            # Sleep until `ready`, but at most five minutes: a run that was ended stops soon.
            await clock.sleep_until(min(max(now + _LOOK_EVERY, min(ready, now + timedelta(minutes=5))), call.deadline))


def _check_throughput(output: Mapping[str, Any], least: float) -> None:
    throughput = output["throughput"]
    if throughput is None:
        raise PermanentFailure(f"the throughput is unknown, and must be at least {least:.4g}", output)
    if throughput < least:
        raise PermanentFailure(f"the throughput is {throughput:.4g} {output['unit']}, under {least:.4g}", output)


async def _has_trained(metrics: MetricHistory, job: str, over: timedelta, now: datetime) -> bool:
    query = f"min(training_steps_total{_matcher(job)})"
    series = await metrics.read(query, now - over, now, _LOOK_EVERY)
    values = [value for _, value in series[0].points] if series else []
    if len(values) < _NEARLY_ALL * (over / _LOOK_EVERY):
        return False
    # A decreasing counter means that the process has restarted, a constant one that it hangs.
    return values[-1] > values[0] > 0 and all(after >= before for before, after in itertools.pairwise(values))


async def _figures(metrics: MetricHistory, job: str, over: timedelta, now: datetime) -> dict[str, Any]:
    window, matcher = duration.write(over), _matcher(job)

    async def newest(query: str) -> float | None:
        series = await metrics.read(query, now, now, _LOOK_EVERY)
        value = series[0].points[-1][1] if series and series[0].points else math.nan
        return value if math.isfinite(value) else None

    rates = [f"max(avg_over_time(training_throughput_{amount}_per_second{matcher}[{window}]))" for amount in _AMOUNTS]
    targets = [f"max(last_over_time(training_target_{amount}_per_second{matcher}[{window}]))" for amount in _AMOUNTS]
    # A recording rule of `monitoring/rules/scaling.yaml`.
    busy = f"max(avg_over_time(job:gpu_utilization_percent{matcher}[{window}]))"
    utilisation, *others = await asyncio.gather(*map(newest, [busy, *rates, *targets]))
    known = [
        (f"{amount}/s", rate, target)
        for amount, rate, target in zip(_AMOUNTS, others[:2], others[2:], strict=True)
        if rate is not None
    ]
    # If a job reports both, use the one for which it declares a target.
    with_target = [each for each in known if each[2] is not None]
    unit, throughput, target = (*with_target, *known, (None, None, None))[0]
    return {
        "throughput": throughput,
        "unit": unit,
        "target": target,
        "utilization_percent": utilisation,
        "over_seconds": over.total_seconds(),
    }


def _matcher(job: str) -> str:
    return f"{{job_name={promql.quoted(job)}}}"


ACTIONS: tuple[type[Action], ...] = (JobLoad,)
