"""The machine's own time of day."""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime

# A longer sleep is taken in parts, so that a step of the machine's clock is noticed.
_LONGEST_SLEEP_SECONDS = 30.0


class SystemClock:
    """A `ports.outside.Clock` on the machine's clock. It may be set back or forward while the server runs."""

    def now(self) -> datetime:
        return datetime.now(UTC)

    async def sleep_until(self, when: datetime) -> None:
        """Return at `when`, or at once where it has passed."""
        while (left := (when - self.now()).total_seconds()) > 0:  # noqa: ASYNC110 - there is no event; the time is what is waited for
            await asyncio.sleep(min(left, _LONGEST_SLEEP_SECONDS))
