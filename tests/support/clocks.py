"""Clocks that a test moves. For the time of day tests use `SystemClock`, the server's own; the engine's tests run in
virtual time (``trainmedic_server.simulation``)."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

START = datetime(2026, 1, 31, 12, 0, tzinfo=UTC)


class ManualClock:
    """Time passes only where somebody sleeps, or where the test sets ``time``."""

    def __init__(self, time: datetime = START) -> None:
        self.time = time

    def now(self) -> datetime:
        return self.time

    def sleep(self, seconds: float) -> None:
        self.time += timedelta(seconds=seconds)

    async def sleep_until(self, when: datetime) -> None:
        self.time = max(self.time, when)


class StoppedClock(ManualClock):
    """Time does not pass, and who waits for it would wait for ever."""

    async def sleep_until(self, when: datetime) -> None:
        raise AssertionError(f"nothing was to wait, and something waits until {when}")
