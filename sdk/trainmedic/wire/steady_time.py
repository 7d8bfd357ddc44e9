"""Time of day that does not jump with the machine's clock.

After a jump `SteadyTime` continues by the time since boot. After `BELIEVED_AFTER_SECONDS` it follows the clock.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime, timezone
from functools import partial
from typing import Literal

STEP_SECONDS = 60.0  # tolerated difference; NTP corrects less at once
BELIEVED_AFTER_SECONDS = 900.0  # equal to the default maximum age of alerts on which the server acts

log = logging.getLogger(__name__)


since_boot: Callable[[], float] = (
    partial(time.clock_gettime, time.CLOCK_BOOTTIME) if hasattr(time, "CLOCK_BOOTTIME") else time.monotonic
)
"""Seconds since boot, including sleep if supported."""


@dataclass(frozen=True)
class ClockStep:
    seconds: float
    kind: Literal["stepped", "believed", "returned"]
    """``stepped``: not followed yet; ``believed``: followed from now on; ``returned``: it agrees again."""

    def __str__(self) -> str:
        if self.kind == "returned":
            return "the machine's clock agrees with the kept time again"
        change = f"{abs(self.seconds):.0f} s {'forward' if self.seconds > 0 else 'back'}"
        if self.kind == "believed":
            return f"the machine's clock, which was set {change}, is followed from now on"
        return (
            f"the machine's clock was set {change}; the time from before is kept until it has stayed there for "
            f"{BELIEVED_AFTER_SECONDS / 60:.0f} minutes"
        )


def log_step(step: ClockStep) -> None:
    log.warning("trainmedic: %s", step)


class SteadyTime:
    """Time of day of one process. Thread-safe.

    `tell` receives each `ClockStep`.
    """

    def __init__(
        self,
        unix_time: Callable[[], float] = time.time,
        elapsed: Callable[[], float] = since_boot,
        tell: Callable[[ClockStep], None] = log_step,
    ) -> None:
        self.tell = tell
        self._unix_time = unix_time
        self._elapsed = elapsed
        self._lock = threading.Lock()
        # The last trusted reading of the machine's clock, and the time since boot then.
        self._believed = (unix_time(), elapsed())
        # After a step: how far the clock is ahead, and the time since boot when it was noticed.
        self._step: tuple[float, float] | None = None

    @property
    def ahead(self) -> float:
        # Seconds that the machine's clock is ahead, 0 unless it jumped.
        with self._lock:
            return self._step[0] if self._step is not None else 0.0

    def unix_now(self) -> float:
        if self._step is None:
            # No lock, which is half of the cost: each thread's pair of readings is valid.
            shown, elapsed = self._unix_time(), self._elapsed()
            unix, at = self._believed
            if -STEP_SECONDS <= shown - unix - elapsed + at <= STEP_SECONDS:
                self._believed = (shown, elapsed)
                return shown
        with self._lock:
            now, noticed = self._read()
        if noticed is not None:
            self.tell(noticed)
        return now

    def now(self) -> datetime:
        return datetime.fromtimestamp(self.unix_now(), timezone.utc)

    def _read(self) -> tuple[float, ClockStep | None]:
        shown, elapsed = self._unix_time(), self._elapsed()
        kept = self._believed[0] + elapsed - self._believed[1]
        ahead = shown - kept
        if abs(ahead) <= STEP_SECONDS:
            noticed = ClockStep(ahead, "returned") if self._step is not None else None
            self._believed, self._step = (shown, elapsed), None
            return shown, noticed
        if self._step is None or abs(ahead - self._step[0]) > STEP_SECONDS:
            self._step = (ahead, elapsed)
            return kept, ClockStep(ahead, "stepped")
        if elapsed - self._step[1] < BELIEVED_AFTER_SECONDS:
            return kept, None
        self._believed, self._step = (shown, elapsed), None
        return shown, ClockStep(ahead, "believed")


OF_PROCESS = SteadyTime()


def utc_now() -> datetime:
    """Return aware UTC, which does not jump with the machine's clock."""
    return OF_PROCESS.now()
