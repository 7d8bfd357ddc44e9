"""Action ``prometheus.query``, on the server's own Prometheus."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import Any, ClassVar, cast

from pydantic import BaseModel, Field

from trainmedic_server.actions.base import ActionParams, BasicAction, Irreversible
from trainmedic_server.domain import promql
from trainmedic_server.domain.playbook import PROMETHEUS_QUERY
from trainmedic_server.domain.value_types import NUMBER, TEXTS, Each, Shape
from trainmedic_server.errors import MetricsRefused, MetricsUnavailable, PermanentFailure, TemporaryFailure
from trainmedic_server.ports.actions import Action, Call, Services
from trainmedic_server.ports.metric_history import MetricHistory, MetricSeries

MOST_SERIES = 100
AT_ONCE = 8
"""Queries in flight."""
_STEP = timedelta(seconds=30)  # without effect: each query is for one moment


class PrometheusQueryParams(ActionParams):
    query: str = Field(
        min_length=1, max_length=promql.LONGEST_QUERY, description="PromQL; templates only within quotes."
    )


class PrometheusQuery(Irreversible, BasicAction):
    name: ClassVar[str] = PROMETHEUS_QUERY
    summary: ClassVar[str] = "Look up the present value of a PromQL query in the server's Prometheus."
    harmful: ClassVar[bool] = False
    promql: ClassVar[frozenset[str]] = frozenset({"query"})
    default_timeout: ClassVar[timedelta] = timedelta(minutes=1)
    Params: ClassVar[type[BaseModel]] = PrometheusQueryParams
    outputs: ClassVar[Mapping[str, Shape]] = {
        "value": NUMBER,
        "series": Each({"labels": TEXTS, "value": NUMBER}),
        "count": NUMBER,
        "compared": NUMBER,
    }

    def __init__(self, services: Services) -> None:
        super().__init__(services)
        self._in_flight: dict[str, asyncio.Task[Sequence[MetricSeries]]] = {}
        self._room = asyncio.Semaphore(AT_ONCE)

    async def perform(self, call: Call) -> Mapping[str, Any]:
        metrics = self.services.metrics
        if metrics is None:
            raise PermanentFailure("no Prometheus is set (--prometheus-url)")
        query = cast(PrometheusQueryParams, call.params).query
        try:
            series = await self._shared(metrics, query)
        except MetricsRefused as error:
            raise PermanentFailure(str(error)) from error
        except MetricsUnavailable as error:
            raise TemporaryFailure(str(error)) from error
        samples = [{"labels": dict(each.labels), "value": _value(each)} for each in series[:MOST_SERIES]]
        value = samples[0]["value"] if samples else None
        compared = value if samples else await self._compared(metrics, query)
        return {"value": value, "series": samples, "count": len(series), "compared": compared}

    async def _compared(self, metrics: MetricHistory, query: str) -> float | None:
        """Return the value that failed the query's only comparison, None if unknown."""
        comparisons = promql.comparisons(query)
        if len(comparisons) != 1:
            return None
        try:
            series = await self._shared(metrics, comparisons[0].query)
        except MetricsUnavailable:  # people see this value; no decision needs it
            return None
        return _value(series[0]) if len(series) == 1 else None

    async def _shared(self, metrics: MetricHistory, query: str) -> Sequence[MetricSeries]:
        """Callers of an unanswered query share its answer."""
        task = self._in_flight.get(query)
        if task is None:
            task = self._in_flight[query] = asyncio.create_task(self._ask(metrics, query))
            task.add_done_callback(lambda ended: self._ended(query, ended))
        return await asyncio.shield(task)

    def _ended(self, query: str, task: asyncio.Task[Sequence[MetricSeries]]) -> None:
        del self._in_flight[query]
        if not task.cancelled():
            task.exception()  # read, or asyncio complains if all callers have left

    async def _ask(self, metrics: MetricHistory, query: str) -> Sequence[MetricSeries]:
        async with self._room:
            now = self.services.clock.now()
            return [each for each in await metrics.read(query, now, now, _STEP) if each.points]


def _value(series: MetricSeries) -> float | None:
    value = series.points[-1][1]
    return value if math.isfinite(value) else None


ACTIONS: tuple[type[Action], ...] = (PrometheusQuery,)
