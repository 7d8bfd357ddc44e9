"""Prometheus metrics of log reading, listed in ``docs/reference/metrics.md``."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, InfoMetricFamily, Metric

from trainmedic_agent.log_reading.log_counters import LogCounters


def families(counters: LogCounters, near: Callable[[], Mapping[str, int]]) -> Iterator[Metric]:
    """Yield all metrics of log reading. `near` returns counts of lines that nearly matched a rule."""
    cut = CounterMetricFamily(
        "trainmedic_agent_log_cuts", "How often a budget of a job or user cut the reading of its logs.", labels=["what"]
    )
    yield _with(cut, counters.cuts.totals())
    yield InfoMetricFamily("trainmedic_agent_log_rules", "The log rules in force.", {"version": counters.rules})
    files = GaugeMetricFamily("trainmedic_agent_log_files", "Files that are followed.", labels=["source"])
    yield _with(files, counters.files)
    refused = GaugeMetricFamily(
        "trainmedic_agent_log_refused", "What lies where logs are read, and is not read.", labels=["reason"]
    )
    yield _with(refused, counters.refused)
    lines = CounterMetricFamily("trainmedic_agent_log_lines", "Lines that were read.", labels=["source"])
    yield _with(lines, counters.all_lines())
    skipped = CounterMetricFamily(
        "trainmedic_agent_log_lines_skipped",
        "Lines that were read and not looked at, because a file had too many.",
        labels=["source"],
    )
    yield _with(skipped, counters.all_lines_left_out())
    findings = CounterMetricFamily("trainmedic_agent_log_findings", "Findings that began.", labels=["rule"])
    yield _with(findings, counters.all_findings())
    nearly = CounterMetricFamily(
        "trainmedic_agent_log_lines_near",
        "Lines with a literal of a rule and none of its patterns: a wording may have changed.",
        labels=["rule"],
    )
    yield _with(nearly, near())
    yield from _alone(counters)


def _alone(counters: LogCounters) -> Iterator[Metric]:
    yield GaugeMetricFamily(
        "trainmedic_agent_log_takes_rights",
        "1 if files are opened with the rights of users, 0 if file modes are compared.",
        float(counters.takes_rights),
    )
    yield CounterMetricFamily(
        "trainmedic_agent_log_skipped_bytes", "Bytes of lines too long or too far behind.", counters.bytes_left_out
    )
    yield CounterMetricFamily(
        "trainmedic_agent_log_truncations", "Files that were truncated while they were read.", counters.truncations
    )
    yield CounterMetricFamily(
        "trainmedic_agent_log_kernel_lines_lost",
        "Lines that the kernel had overwritten before they were read.",
        counters.kernel_lines_lost,
    )
    yield CounterMetricFamily(
        "trainmedic_agent_log_findings_lost",
        "Updates of findings that nobody had taken when there was no more room.",
        counters.findings_lost,
    )
    yield GaugeMetricFamily(
        "trainmedic_agent_log_findings_waiting",
        "Updates of findings that Redis does not have yet.",
        counters.findings_waiting,
    )


def _with(
    family: CounterMetricFamily | GaugeMetricFamily, values: Mapping[str, int]
) -> CounterMetricFamily | GaugeMetricFamily:
    for key, value in sorted(values.items()):
        family.add_metric([key], value)
    return family
