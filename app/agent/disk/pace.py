"""Keeping a cleaning gentle, and ending it in time.

Between its pieces of work the cleaner asks `Pace.goes_on`. That sleeps as long as was worked, so that at
most half of the time is spent on cleaning, and says when to end: at the deadline, or when the agent is
told to end. The thread itself takes the lowest CPU priority and the idle class of I/O priority, which the
schedulers BFQ and mq-deadline respect; where a disk has none (NVMe often), the pauses alone count.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from app.agent.disk import kernel
from app.agent.disk.reasons import Reason

log = logging.getLogger(__name__)

_SPELL = 0.01
"""Seconds of work between two pauses."""
_LONGEST_REST = 1.0


@dataclass(frozen=True, slots=True)
class Time:
    """The clocks that a cleaning reads and sleeps by: seconds since the epoch, a steady clock, a pause."""

    now: Callable[[], float] = time.time
    steady: Callable[[], float] = time.monotonic
    sleep: Callable[[float], None] = time.sleep


class Pace:
    """The time of one cleaning. `deadline` is in seconds since the epoch."""

    def __init__(self, clock: Time, deadline: float, is_stopping: Callable[[], bool]) -> None:
        self._clock = clock
        self._deadline = deadline
        self._is_stopping = is_stopping
        self._since = clock.steady()
        self.halt: Reason | None = None
        """Why to end; set once, by `goes_on`."""

    def goes_on(self) -> bool:
        """Rest if it is time for it; whether to work on."""
        if self.halt is not None:
            return False
        worked = self._clock.steady() - self._since
        if worked >= _SPELL:
            self.wait(min(worked, _LONGEST_REST))
        if self._is_stopping():
            self.halt = Reason.STOPPING
        elif self._clock.now() >= self._deadline:
            self.halt = Reason.NO_TIME
        return self.halt is None

    def wait(self, seconds: float) -> None:
        """Do nothing for so long."""
        self._clock.sleep(seconds)
        self._since = self._clock.steady()


def take_lowest_priority() -> None:
    """The calling thread yields to everything else, from now on. Best effort: a refusal is logged."""
    try:
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 19)
        kernel.make_io_idle()
    except OSError as error:
        log.info("cleaning runs at the agent's own priority: %s", error)
