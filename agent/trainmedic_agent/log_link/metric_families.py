"""Conversion of the reader's metrics, and metrics about the reader."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator

from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric

from trainmedic_agent.log_link.messages import LogMetric, LogSample, MetricKind

_ENDINGS = {MetricKind.COUNTER: "_total", MetricKind.INFO: "_info", MetricKind.GAUGE: ""}
# Limits of `LogMetric` and `LogSample`.
_MOST_SAMPLES = 2000
_LONGEST_VALUE = 256


def to_messages(families: Iterable[Metric]) -> list[LogMetric]:
    kinds = {kind.value: kind for kind in MetricKind}
    return [
        LogMetric(
            family.name,
            kinds[family.type],
            family.documentation,
            [
                LogSample(float(sample.value), {name: value[:_LONGEST_VALUE] for name, value in sample.labels.items()})
                for sample in family.samples[:_MOST_SAMPLES]
            ],
        )
        for family in families
        if family.type in kinds
    ]


def from_messages(metrics: Iterable[LogMetric]) -> Iterator[Metric]:
    names: set[str] = set()
    for metric in metrics:
        if metric.name in names:
            continue
        names.add(metric.name)
        family = Metric(metric.name, metric.text, metric.kind.value)
        for sample in metric.samples:
            family.add_sample(f"{metric.name}{_ENDINGS[metric.kind]}", sample.labels, sample.value)
        yield family


def reader_families(*, is_up: bool, restarts: int, clock_error: float | None, uid: int | None) -> Iterator[Metric]:
    yield GaugeMetricFamily(
        "trainmedic_agent_reader_up", "1 while the log reader process answers the agent.", int(is_up)
    )
    yield CounterMetricFamily("trainmedic_agent_reader_restarts", "Restarts of the log reader process.", restarts)
    if uid is not None:
        yield GaugeMetricFamily(
            "trainmedic_agent_reader_own_user",
            "1 if the log reader process has its own user, 0 if it has root's or the agent's.",
            int(uid not in {0, os.geteuid()}),
        )
    if clock_error is not None:
        yield GaugeMetricFamily(
            "trainmedic_agent_clock_error_seconds",
            "Maximum difference between this node's clock and that of Redis.",
            clock_error,
        )
