from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection
from datetime import timedelta


class AbsenceDetection:
    """Detector of names that are missing for `counts_after` without interruption.

    ``elapsed`` is a monotonic clock in seconds. More than `latest_look` between two checks restarts the count.
    """

    def __init__(
        self, counts_after: timedelta, latest_look: timedelta, elapsed: Callable[[], float] | None = None
    ) -> None:
        self._counts_after = counts_after.total_seconds()
        self._latest_look = latest_look.total_seconds()
        self._elapsed = elapsed or asyncio.get_running_loop().time
        self._since: dict[str, float] = {}
        self._looked_at: float | None = None

    def forget(self) -> None:
        self._since.clear()
        self._looked_at = None

    def note(self, absent: Collection[str]) -> list[str]:
        """Note all names that are missing now. Return those that count."""
        now, before = self._elapsed(), self._looked_at
        self._looked_at = now
        if before is None or now - before > self._latest_look:
            self._since.clear()
        self._since = {name: self._since.get(name, now) for name in absent}
        return [name for name, since in self._since.items() if since <= now - self._counts_after]
