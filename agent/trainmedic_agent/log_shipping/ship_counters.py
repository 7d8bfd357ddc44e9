"""What shipping counts of itself, and shows as Prometheus metrics. ``docs/reference/metrics.md`` lists them."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterator, Mapping
from enum import StrEnum

from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric


class LostReason(StrEnum):
    """Why lines, or bytes of files, are not in the store."""

    TOO_OLD = "too_old"
    """Older than the policy's ``oldest``, or than the store takes."""
    OUT_OF_ORDER = "out_of_order"
    """So far behind others of its labels that the store did not take it."""
    TOO_NEW = "too_new"
    """The store held its time for one in the future."""
    TOO_LARGE = "too_large"
    """Longer than what is pushed of a line, or than the store takes."""
    TOO_MANY_JOBS = "too_many_jobs"
    """Of more jobs than one node has labels for."""
    REFUSED = "refused"
    """The store did not take it for another reason; the agent's log has its words."""
    BEHIND = "behind"
    """So much more came than the store has taken that reading went on near the end."""
    DELETED = "deleted"
    """The file was deleted before the store had taken it."""
    TRUNCATED = "truncated"
    """The file was truncated before the store had taken it."""
    OVERWRITTEN = "overwritten"
    """The kernel had overwritten it before it was read."""


OF_BYTES = (LostReason.BEHIND, LostReason.DELETED, LostReason.TRUNCATED)
"""Of these nobody has counted the lines."""


class ShipCounters:
    """Counts since the process started, and what is so now. Any thread may call it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._lines: Counter[str] = Counter()
        # From nothing on, so that Prometheus sees the first as an increase.
        self._lost_lines = Counter({reason.value: 0 for reason in LostReason if reason not in OF_BYTES})
        self._lost_bytes = Counter({reason.value: 0 for reason in (*OF_BYTES, LostReason.TOO_LARGE)})
        self._failures: Counter[str] = Counter()
        self.files: Mapping[str, int] = {}
        self.refused: Mapping[str, int] = {}
        """As reading counts them; not shown again."""
        self.behind = 0
        """Bytes that are in files and not in the store."""
        self.problem = ""
        """Why the store takes nothing now; empty where it does."""

    def shipped(self, lines: Mapping[str, int]) -> None:
        """Count lines that the store has taken, by source."""
        with self._lock:
            self._lines.update(lines)

    def lose_lines(self, reason: LostReason, count: int) -> None:
        with self._lock:
            self._lost_lines[reason.value] += count

    def lose_bytes(self, reason: LostReason, count: int) -> None:
        if count > 0:
            with self._lock:
                self._lost_bytes[reason.value] += count

    def fail(self, reason: str) -> None:
        """Count a push that has failed and is made again."""
        with self._lock:
            self._failures[reason] += 1

    def families(self) -> Iterator[Metric]:
        with self._lock:
            lines, lost, lost_bytes = dict(self._lines), dict(self._lost_lines), dict(self._lost_bytes)
            failures = dict(self._failures)
        yield _counted("log_shipped_lines", "Lines that the store has taken.", "source", lines)
        yield _counted("log_ship_lost_lines", "Lines that are not in the store.", "reason", lost)
        yield _counted("log_ship_lost_bytes", "Bytes of files that are not in the store.", "reason", lost_bytes)
        yield _counted("log_ship_failures", "Pushes that failed, and are made again.", "reason", failures)
        yield GaugeMetricFamily(
            "trainmedic_agent_log_ship_behind_bytes", "Bytes in files that the store does not have yet.", self.behind
        )


def _counted(name: str, text: str, label: str, values: Mapping[str, int]) -> Metric:
    family = CounterMetricFamily(f"trainmedic_agent_{name}", text, labels=[label])
    for key, value in sorted(values.items()):
        family.add_metric([key], value)
    return family
