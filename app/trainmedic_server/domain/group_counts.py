from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from msgspec import Struct

from trainmedic_core import words

_SHOWN = ("succeeded", "failed", "cancelled", "skipped", "observed", "open", "not_begun")


class GroupCounts(Struct, frozen=True):
    """Counts of a group's members, which add up to `total`."""

    total: int
    not_begun: int = 0
    open: int = 0
    succeeded: int = 0
    failed: int = 0
    skipped: int = 0  # Not started, such as vanished, in cooldown, or busy
    cancelled: int = 0
    observed: int = 0
    owing: int = 0
    """Closed with a pending undo; also counted by their status."""
    batch: int | None = None  # Last batch that began, from 1. None before.

    def as_data(self) -> Mapping[str, Any]:  # ``group`` of expressions
        return {name: getattr(self, name) for name in ("total", "succeeded", "failed", "skipped", "not_begun", "batch")}

    def __str__(self) -> str:
        parts = ((getattr(self, name), name.replace("_", " ")) for name in _SHOWN)
        counts = ", ".join(f"{count} {name}" for count, name in parts if count)
        return f"{words.count(self.total, 'member')}: {counts or 'none begun'}"
