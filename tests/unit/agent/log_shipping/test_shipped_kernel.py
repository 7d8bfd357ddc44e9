"""The kernel's log as a source for a store."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime, timedelta
from typing import Any

from trainmedic_agent.log_reading.line_cutter import PlacedLine
from trainmedic_agent.log_shipping.ship_counters import ShipCounters
from trainmedic_agent.log_shipping.shipped_kernel import ShippedKernel
from trainmedic_logs.domain.finding import Origin

LINES = ("before", "-----BEGIN RSA PRIVATE KEY-----", "secret0", "secret1", "-----END RSA PRIVATE KEY-----", "after")


class _Reader:
    """``/dev/kmsg`` with the first `count` of `LINES`, read from the line `first`."""

    lost = 0

    def __init__(self, first: int, count: int) -> None:
        self._next, self._count = first, count

    def fileno(self) -> None:
        return None

    def read(self) -> list[PlacedLine]:
        first, self._next = self._next, self._count
        return [(at, f"6,{at},{at * 1000000},-;{LINES[at]}".encode()) for at in range(first, self._count)]

    def place_json(self) -> Mapping[str, Any]:
        return {"next": self._next}

    def close(self) -> None: ...


def shipped(first: int, count: int) -> tuple[list[str], int]:
    """Return the texts sent and confirmed by an agent that starts at `first`, and where the next one starts."""
    booted_at = datetime.now(UTC) - timedelta(minutes=1)
    origin = Origin(node="n1", source="kernel", generation="boot")
    kernel = ShippedKernel(_Reader(first, count), origin, booted_at, timedelta(hours=1), {}, ShipCounters())
    kernel.poll(datetime.now(UTC))
    texts = []
    while (entry := kernel.head()) is not None:
        texts.append(entry.text)
        kernel.pop_head()
        kernel.confirm_oldest()
    return texts, kernel.place_json()["next"]


def test_a_private_key_does_not_leave_the_node_over_a_restart() -> None:
    first, place = shipped(0, 3)
    second, end = shipped(place, len(LINES))
    assert "secret" not in "".join([*first, *second])
    assert (second[-1], end) == ("after", len(LINES))
