"""Keeping a cleaning gentle, and ending it in time.

Between its pieces of work the cleaner asks `Pace.goes_on`. That rests, and says when to end: at the deadline,
or when the agent is told to end. While it rests it looks whether anybody waits for the disk, by the kernel's
count of the time in which some task did (PSI, Linux 4.20). Where somebody does, it rests `_MOST_RESTS` times as
long as it worked, so that a reader beside it loses a few percent at most; where nobody does, as long as it
worked. Where the kernel does not count, it is as if somebody always waited.

The thread itself takes a low CPU priority and the lowest I/O priority of the ordinary class,
which the schedulers BFQ and mq-deadline respect; where a disk has none (NVMe often), the pauses alone count.

Neither is the lowest there is. In the idle class of I/O, and at nice 19, work on a busy node hardly gets on,
and it is the busy node whose disk fills and whose training stops when it is full; worse, a thread that waits
for the disk in the idle class may hold a directory's lock or a transaction of the filesystem's journal,
for which everybody else then waits. For the same reason the time that the thread waits for a core is no
work that asks for a pause.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from trainmedic_server.agent.disk import kernel
from trainmedic_server.agent.disk.reasons import Reason

log = logging.getLogger(__name__)

_SPELL = 0.01
"""Seconds of work between two pauses."""
_LONGEST_REST = 2.0
_MOST_RESTS, _FEWEST_RESTS = 16.0, 1.0
"""Times that it rests as long as it worked."""
_NOTICED = 0.05
"""The part of a rest in which somebody waited for the disk, from which on that counts."""
_NICE = 10
"""A tenth of the share that a process of ordinary priority has of a busy core."""


@dataclass(frozen=True, slots=True)
class Time:
    """The clocks that a cleaning reads and sleeps by: seconds since the epoch, a steady clock, the part of that
    in which this thread was ready and another ran, the part in which anybody waited for a disk, and a pause."""

    now: Callable[[], float] = time.time
    steady: Callable[[], float] = time.monotonic
    waited: Callable[[], float] = kernel.waited_for_a_core
    stalled: Callable[[], float] = kernel.stalled_for_a_disk
    sleep: Callable[[float], None] = time.sleep


class Pace:
    """The time of one cleaning. `deadline` is in seconds since the epoch."""

    def __init__(self, clock: Time, deadline: float, is_stopping: Callable[[], bool]) -> None:
        self._clock = clock
        self._deadline = deadline
        self._is_stopping = is_stopping
        self._rests = _MOST_RESTS
        self._begin_spell()
        self.halt: Reason | None = None
        """Why to end; set once, by `goes_on`."""

    def goes_on(self) -> bool:
        """Rest if it is time for it; whether to work on."""
        if self.halt is not None:
            return False
        passed = self._clock.steady() - self._began
        if passed >= _SPELL:
            worked = passed - (self._clock.waited() - self._waited)
            self._rest(min(max(worked, 0.0) * self._rests, _LONGEST_REST))
        if self._is_stopping():
            self.halt = Reason.STOPPING
        elif self._clock.now() >= self._deadline:
            self.halt = Reason.NO_TIME
        return self.halt is None

    def _rest(self, seconds: float) -> None:
        """So long, or twice as long or half as long from now on: as somebody else wants the disk, or nobody does."""
        began, stalled = self._clock.steady(), self._clock.stalled()
        self.wait(seconds)
        passed = self._clock.steady() - began
        if passed <= 0:
            return
        is_wanted = (self._clock.stalled() - stalled) / passed > _NOTICED
        self._rests = min(self._rests * 2, _MOST_RESTS) if is_wanted else max(self._rests / 2, _FEWEST_RESTS)
        self._begin_spell()

    def wait(self, seconds: float) -> None:
        """Do nothing for so long."""
        self._clock.sleep(seconds)
        self._begin_spell()

    def _begin_spell(self) -> None:
        self._began, self._waited = self._clock.steady(), self._clock.waited()


def take_low_priority() -> None:
    """The calling thread yields to everything else, from now on. Best effort: a refusal is logged."""
    try:
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICE)
        kernel.make_io_last()
    except OSError as error:
        log.info("cleaning runs at the agent's own priority: %s", error)
