from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterator, Mapping
from enum import StrEnum

from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric


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
        self._lock = threading.Lock()
        self._lines: Counter[str] = Counter()
        # Start at 0, so that Prometheus sees the first loss as an increase.
        self._lost_lines = Counter({reason.value: 0 for reason in LostReason if reason not in COUNTED_IN_BYTES})
        self._lost_bytes = Counter({reason.value: 0 for reason in (*COUNTED_IN_BYTES, LostReason.TOO_LARGE)})
        self._failures: Counter[str] = Counter()
        # Of files, by state, and by why they are not read; not exported here: log reading has the same.
        self.files: Mapping[str, int] = {}
        self.refused: Mapping[str, int] = {}
        self.behind = 0  # bytes that the store lacks
        self.problem = ""  # why the store does not accept lines, otherwise empty

    def add_shipped(self, lines: Mapping[str, int]) -> None:
        with self._lock:
            self._lines.update(lines)

    def add_lost_lines(self, reason: LostReason, count: int) -> None:
        with self._lock:
            self._lost_lines[reason.value] += count

    def add_lost_bytes(self, reason: LostReason, count: int) -> None:
        if count > 0:
            with self._lock:
                self._lost_bytes[reason.value] += count

    def add_failure(self, reason: str) -> None:
        with self._lock:
            self._failures[reason] += 1

    def families(self) -> Iterator[Metric]:
        with self._lock:
            lines, lost, lost_bytes = dict(self._lines), dict(self._lost_lines), dict(self._lost_bytes)
            failures = dict(self._failures)
        yield _counted("log_shipped_lines", "Lines that the store accepted.", "source", lines)
        yield _counted("log_ship_lost_lines", "Lines that are not in the store.", "reason", lost)
        yield _counted("log_ship_lost_bytes", "Bytes of files that are not in the store.", "reason", lost_bytes)
        yield _counted("log_ship_failures", "Failed pushes, which are retried.", "reason", failures)
        yield GaugeMetricFamily(
            "trainmedic_agent_log_ship_behind_bytes", "Bytes in files that the store does not have yet.", self.behind
        )


def _counted(name: str, text: str, label: str, values: Mapping[str, int]) -> Metric:
    family = CounterMetricFamily(f"trainmedic_agent_{name}", text, labels=[label])
    for key, value in sorted(values.items()):
        family.add_metric([key], value)
    return family
