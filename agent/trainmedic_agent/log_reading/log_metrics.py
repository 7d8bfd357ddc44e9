from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, InfoMetricFamily, Metric

from trainmedic_agent.log_reading.log_counters import LogCounters
from trainmedic_agent.metric_family import by_label, counter, gauge


def families(counters: LogCounters, near: Callable[[], Mapping[str, int]]) -> Iterator[Metric]:
    """`near`: numbers of lines that nearly matched, by rule."""
    yield InfoMetricFamily("trainmedic_agent_log_rules", "The active log rules.", {"version": counters.rules})
    files = by_label(counters.files)
    yield gauge("trainmedic_agent_log_files", "Followed files.", ["source"], files)
    refused = by_label(counters.refused)
    yield gauge("trainmedic_agent_log_refused", "Files in log directories that are not read.", ["reason"], refused)
    counts = (
        ("cuts", "Cuts of log reading by budgets of jobs and users.", "what", counters.cuts.totals()),
        ("lines", "Lines that were read.", "source", counters.lines.all()),
        (
            "lines_skipped",
            "Lines not processed, because a file or job had too many.",
            "source",
            counters.lines_left_out.all(),
        ),
        ("findings", "Findings that began.", "rule", counters.findings.all()),
        ("lines_near", "Lines with a rule's literal but no match: a wording may have changed.", "rule", near()),
    )
    for name, text, label, values in counts:
        yield counter(f"trainmedic_agent_log_{name}", text, [label], by_label(values))
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
