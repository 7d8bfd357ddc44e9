from __future__ import annotations

from collections.abc import Iterator, Mapping
from enum import StrEnum

from prometheus_client.metrics_core import GaugeMetricFamily, Metric

from trainmedic_agent.counters import Counts
from trainmedic_agent.metric_family import by_label, counter


class LostReason(StrEnum):
    TOO_OLD = "too_old"
    OUT_OF_ORDER = "out_of_order"
    TOO_NEW = "too_new"
    TOO_LARGE = "too_large"  # longer than agent or store accept
    TOO_MANY_JOBS = "too_many_jobs"
    REFUSED = "refused"  # for the reason in the agent's log
    BEHIND = "behind"  # skipped, because too far behind
    DELETED = "deleted"
    TRUNCATED = "truncated"
    OVERWRITTEN = "overwritten"
    """By the kernel."""


COUNTED_IN_BYTES = (
    LostReason.BEHIND,
    LostReason.DELETED,
    LostReason.TRUNCATED,
)  # lines that were never read; `TOO_LARGE` counts in both


class ShipCounters:
    def __init__(self) -> None:
        self.lines: Counts[str] = Counts()  # shipped ones, by source
        self.lost_lines: Counts[str] = Counts(reason for reason in LostReason if reason not in COUNTED_IN_BYTES)
        self.lost_bytes: Counts[str] = Counts((*COUNTED_IN_BYTES, LostReason.TOO_LARGE))
        self.failures: Counts[str] = Counts()
        # Of files, by state, and by why they are not read; not exported here: log reading has the same.
        self.files: Mapping[str, int] = {}
        self.refused: Mapping[str, int] = {}
        self.behind = 0  # bytes that the store lacks
        self.problem = ""  # why the store does not accept lines, otherwise empty

    def families(self) -> Iterator[Metric]:
        counts = (
            ("shipped_lines", "Lines that the store accepted.", "source", self.lines),
            ("ship_lost_lines", "Lines that are not in the store.", "reason", self.lost_lines),
            ("ship_lost_bytes", "Bytes of files that are not in the store.", "reason", self.lost_bytes),
            ("ship_failures", "Failed pushes, which are retried.", "reason", self.failures),
        )
        for name, text, label, values in counts:
            yield counter(f"trainmedic_agent_log_{name}", text, [label], by_label(values.all()))
        yield GaugeMetricFamily(
            "trainmedic_agent_log_ship_behind_bytes", "Bytes in files that the store does not have yet.", self.behind
        )
