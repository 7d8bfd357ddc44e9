"""What was measured in the past: a time series database that answers PromQL."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime, timedelta
from typing import Protocol, TypeAlias

from msgspec import Struct

Points: TypeAlias = Sequence[tuple[float, float]]
"""Seconds since 1970 and value, in order of time. A value may be NaN."""

MOST_POINTS = 11_000
"""Of one series in one answer: Prometheus refuses more."""


class MetricSeries(Struct, frozen=True):
    """One series of an answer."""

    labels: Mapping[str, str]
    points: Points


class MetricHistory(Protocol):
    """Answers questions about the past."""

    async def read(self, query: str, begin: datetime, end: datetime, every: timedelta) -> Sequence[MetricSeries]:
        """Return what `query` was at `begin` and each `every` after it, up to `end`; a time without a value has no
        point. Raises MetricsUnavailable, ValueError where these are more than `MOST_POINTS`."""
        ...


class AlertRule(Struct, frozen=True):
    """A rule by which Prometheus raises alerts."""

    expression: str
    labels: Mapping[str, str]
    """What it adds to its alerts; a value may be a template of Prometheus's."""


class AlertRules(Protocol):
    """Knows by which rules alerts are raised."""

    async def rules_of(self, alertname: str) -> Sequence[AlertRule]:
        """Return the rules that raise alerts of this name. Raises MetricsUnavailable."""
        ...


class MetricsAndRules(MetricHistory, AlertRules, Protocol):
    """A Prometheus."""
