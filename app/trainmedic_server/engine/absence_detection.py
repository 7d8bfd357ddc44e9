"""Who is missing for so long that it counts, as far as the server was there to hear of them.

Who calls it: ``agent_watch`` and ``job_watch``, at each look.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection
from datetime import timedelta


class AbsenceDetection:
    """Whoever is missing for `counts_after` at a stretch is gone, unless there were more than `latest_look` between two
    looks: then the server was held up and could hear nobody, and all begin anew. ``elapsed`` counts seconds and cannot
    be set."""

    def __init__(
        self, counts_after: timedelta, latest_look: timedelta, elapsed: Callable[[], float] | None = None
    ) -> None:
        self._counts_after = counts_after.total_seconds()
        self._latest_look = latest_look.total_seconds()
        self._elapsed = elapsed or asyncio.get_running_loop().time
        self._since: dict[str, float] = {}
        self._looked_at: float | None = None

    def forget(self) -> None:
        """Let the time of whoever is missing begin anew, because Redis did not answer."""
        self._since.clear()
        self._looked_at = None

    def note(self, absent: Collection[str]) -> list[str]:
        """Note who is absent at this look; return those who are gone."""
        now, before = self._elapsed(), self._looked_at
        self._looked_at = now
        if before is None or now - before > self._latest_look:
            self._since.clear()
        self._since = {name: self._since.get(name, now) for name in absent}
        return [name for name, since in self._since.items() if since <= now - self._counts_after]
