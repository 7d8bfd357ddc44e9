"""The time of day, which does not jump when the machine's clock does.

Trainmedic's server, agents and jobs decide by the time of day what is too old, and commands carry the moment at which
they expire. So a clock that is set by hours, by a person, by NTP or because it was wrong at boot, must not make
everything old at once, nor hold up what is due. `SteadyTime` follows the machine's clock; where that steps by more
than `STEP_SECONDS`, it goes on by the time since boot, which nobody can set, and says so. Once the machine's clock has
stayed at its new time for `BELIEVED_AFTER_SECONDS`, that is taken for the right one; so it is at every start.

Not here: how long something takes. That is measured by a monotonic clock alone.
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

STEP_SECONDS = 60.0
"""The machine's clock may be this far from where it should be by the time since boot; NTP corrects less at once."""
BELIEVED_AFTER_SECONDS = 900.0
"""Long enough that a mistake is noticed and put right; short enough for a machine that was booted with a wrong clock.
As old may an alert be by default on which the server still acts."""

log = logging.getLogger(__name__)


since_boot: Callable[[], float] = (
    partial(time.clock_gettime, time.CLOCK_BOOTTIME) if hasattr(time, "CLOCK_BOOTTIME") else time.monotonic
)
"""Seconds since the machine was booted. They count while it sleeps, where the system can say that, and cannot be set.
"""


@dataclass(frozen=True)
class ClockStep:
    """What was noticed about the machine's clock."""

    seconds: float
    """By how much it is ahead of the time that was kept so far; less than 0 where it is behind."""
    kind: Literal["stepped", "believed", "returned"]
    """``stepped``: it has jumped, and is not followed yet; ``believed``: it is followed from now on, by a jump of so
    many seconds; ``returned``: it is back at the time that was kept."""

    def __str__(self) -> str:
        if self.kind == "returned":
            return "the machine's clock is back at the time that was kept"
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
    """The time of day of one process. Any thread may ask.

    `tell` is called with each `ClockStep`, in the thread that asked; it must not ask for the time.
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
        # What the machine's clock showed when it was last believed, and the time since boot then.
        self._believed = (unix_time(), elapsed())
        # Where the machine's clock has stepped: how far it is ahead, and the time since boot when that was noticed.
        self._step: tuple[float, float] | None = None

    @property
    def ahead(self) -> float:
        """By how many seconds the machine's clock is ahead of the time that is kept; 0 while it is followed."""
        with self._lock:
            return self._step[0] if self._step is not None else 0.0

    def unix_now(self) -> float:
        """Seconds since 1970."""
        if self._step is None:
            # Without the lock, which is half of the cost: whichever pair of two threads is kept is a true one.
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
        """Aware, and in UTC."""
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
"""The time of this process, which all of its parts share."""


def utc_now() -> datetime:
    """The time of this process, aware and in UTC."""
    return OF_PROCESS.now()
