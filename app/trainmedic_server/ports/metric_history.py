"""Past metrics and alert rules."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime, timedelta
from typing import Protocol, TypeAlias

from msgspec import Struct

Points: TypeAlias = Sequence[tuple[float, float]]
"""(Seconds since 1970, value) in time order. Values may be NaN."""

MOST_POINTS = 11_000  # Prometheus's limit for one series in one answer.


class MetricSeries(Struct, frozen=True):
    labels: Mapping[str, str]
    points: Points


class MetricHistory(Protocol):
    async def read(self, query: str, begin: datetime, end: datetime, every: timedelta) -> Sequence[MetricSeries]:
        """Return `query` at `begin` and each `every` after it, up to `end`. Times without a value have no point.

        Raises MetricsUnavailable; ValueError for more than `MOST_POINTS`.
        """
        ...


class AlertRule(Struct, frozen=True):
    expression: str
    labels: Mapping[str, str]  # Values may be Prometheus templates.


class AlertRules(Protocol):
    async def rules_of(self, alertname: str) -> Sequence[AlertRule]:
        """Raises MetricsUnavailable."""
        ...


class MetricsAndRules(MetricHistory, AlertRules, Protocol):
    """Prometheus."""
