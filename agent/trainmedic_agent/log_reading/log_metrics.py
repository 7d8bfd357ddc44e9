from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, InfoMetricFamily, Metric

from trainmedic_agent.log_reading.log_counters import LogCounters


def families(counters: LogCounters, near: Callable[[], Mapping[str, int]]) -> Iterator[Metric]:
    """`near`: numbers of lines that nearly matched, by rule."""
    cut = CounterMetricFamily(
        "trainmedic_agent_log_cuts", "Cuts of log reading by budgets of jobs and users.", labels=["what"]
    )
    yield _with(cut, counters.cuts.totals())
    yield InfoMetricFamily("trainmedic_agent_log_rules", "The active log rules.", {"version": counters.rules})
    files = GaugeMetricFamily("trainmedic_agent_log_files", "Followed files.", labels=["source"])
    yield _with(files, counters.files)
    refused = GaugeMetricFamily(
        "trainmedic_agent_log_refused", "Files in log directories that are not read.", labels=["reason"]
    )
    yield _with(refused, counters.refused)
    lines = CounterMetricFamily("trainmedic_agent_log_lines", "Lines that were read.", labels=["source"])
    yield _with(lines, counters.all_lines())
    skipped = CounterMetricFamily(
        "trainmedic_agent_log_lines_skipped",
        "Lines not processed, because a file or job had too many.",
        labels=["source"],
    )
    yield _with(skipped, counters.all_lines_left_out())
    findings = CounterMetricFamily("trainmedic_agent_log_findings", "Findings that began.", labels=["rule"])
    yield _with(findings, counters.all_findings())
    nearly = CounterMetricFamily(
        "trainmedic_agent_log_lines_near",
        "Lines with a rule's literal but no match: a wording may have changed.",
        labels=["rule"],
    )
    yield _with(nearly, near())
    yield from _without_labels(counters)


def _without_labels(counters: LogCounters) -> Iterator[Metric]:
    yield GaugeMetricFamily(
        "trainmedic_agent_log_takes_rights",
        "1 if files are opened with their users' rights, 0 if file modes are compared.",
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
        "Updates of findings dropped for lack of space, or as unreadable.",
        counters.findings_lost,
    )
    yield GaugeMetricFamily(
        "trainmedic_agent_log_findings_waiting",
        "Updates of findings not in Redis yet.",
        counters.findings_waiting,
    )


def _with(
    family: CounterMetricFamily | GaugeMetricFamily, values: Mapping[str, int]
) -> CounterMetricFamily | GaugeMetricFamily:
    for key, value in sorted(values.items()):
        family.add_metric([key], value)
    return family
