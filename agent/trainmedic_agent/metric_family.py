"""Prometheus families from values by label."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric

Values = Iterable[tuple[Sequence[str], float]]  # each with the values of its labels


def gauge(name: str, text: str, labels: Sequence[str], values: Values) -> Metric:
    family = GaugeMetricFamily(name, text, labels=labels)
    for of_labels, value in values:
        family.add_metric(of_labels, value)
    return family


def counter(name: str, text: str, labels: Sequence[str], values: Values) -> Metric:
    family = CounterMetricFamily(name, text, labels=labels)
    for of_labels, value in values:
        family.add_metric(of_labels, value)
    return family


def by_label(values: Mapping[str, float]) -> Iterator[tuple[Sequence[str], float]]:
    for value_of_label, value in sorted(values.items()):
        yield [value_of_label], value
