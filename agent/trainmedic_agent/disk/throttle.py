"""Keeping a cleaning gentle on the disk, and ending it in time.

Between its pieces of work the cleaner calls `Throttle.may_continue`, which rests when it is time to, and says when to
end: at the deadline, or when the agent stops. During a rest it measures whether any task waits for the disk, by the
kernel's count of such time (PSI, Linux 4.20). If one does, the rests grow up to `_MAX_REST_RATIO` times the time
worked, so that a reader beside it loses a few percent at most; otherwise they shrink to the time worked. If the kernel
does not count, it assumes that some task always waits.

The thread itself takes a low CPU priority and the lowest I/O priority of the ordinary class, which the schedulers BFQ
and mq-deadline respect; where a disk has no scheduler (NVMe often), the pauses alone count.

Neither is the lowest priority there is. In the idle class of I/O, and at nice 19, work on a busy node hardly gets on,
and it is the busy node whose disk fills and whose training stops when it is full. Worse, a thread that waits for the
disk in the idle class may hold a directory's lock or a transaction of the filesystem's journal, for which everybody
else then waits. For the same reason the time that the thread waits for a core is no work that asks for a pause.
"""

from __future__ import annotations

import ctypes
import logging
import os
import platform
import threading
import time
from collections.abc import Callable

from msgspec import Struct

from trainmedic.wire import steady_time
from trainmedic_agent.disk.report import Reason

log = logging.getLogger(__name__)

_WORK_SECONDS = 0.01
"""Seconds of work between two pauses."""
_MAX_REST_SECONDS = 2.0
_MAX_REST_RATIO, _MIN_REST_RATIO = 16.0, 1.0
"""How many times as long as it worked the cleaner rests."""
_CONTENTION = 0.05
"""The fraction of a rest with tasks waiting for the disk, above which the disk counts as contended."""
_NICE = 10
"""At this value a process gets a tenth of the share that one of ordinary priority has of a busy core."""

_IOPRIO_SET = {"x86_64": 251, "aarch64": 30}
"""The number of the system call ioprio_set(2), by machine; the C library has no function for it."""
_IOPRIO_WHO_PROCESS, _THIS_THREAD = 1, 0
_IOPRIO_LAST_BEST_EFFORT = 2 << 13 | 7
"""The class "best effort" in the upper bits, and in the lower ones the last of its eight levels."""


def seconds_waited_for_core() -> float:
    """Seconds of the calling thread's life in which it was ready and others ran; 0 where the kernel does not count."""
    try:
        with open("/proc/thread-self/schedstat", encoding="ascii") as file:  # noqa: PTH123
            return int(file.read().split()[1]) / 1e9
    except (OSError, IndexError, ValueError):
        return 0.0


def seconds_stalled_for_disk() -> float:
    """Seconds since the machine began in which some task waited for a disk (proc_pressure(5)).

    Where the kernel does not count, this is the time itself, as if some task always waited.
    """
    try:
        with open("/proc/pressure/io", encoding="ascii") as file:  # noqa: PTH123
            return int(file.readline().rpartition("total=")[2]) / 1e6
    except (OSError, ValueError):
        return time.monotonic()


class Clocks(Struct, frozen=True):
    """The clocks that a cleaning reads, in seconds, and the function by which it sleeps."""

    now: Callable[[], float] = steady_time.OF_PROCESS.unix_now
    """Since the epoch: files do not grow old because the machine's clock was set."""
    steady: Callable[[], float] = time.monotonic
    waited: Callable[[], float] = seconds_waited_for_core
    """The part of the steady time in which this thread was ready and another one ran."""
    stalled: Callable[[], float] = seconds_stalled_for_disk
    """The part of the steady time in which anybody waited for a disk."""
    sleep: Callable[[float], None] = time.sleep


class Throttle:
    """Spreads the work of one cleaning over time. `deadline` is in seconds since the epoch."""

    def __init__(self, clocks: Clocks, deadline: float, is_stopping: Callable[[], bool]) -> None:
        self._clocks = clocks
        self._deadline = deadline
        self._is_stopping = is_stopping
        # It begins with the longest rests, and shortens them while no task waits for the disk.
        self._rest_ratio = _MAX_REST_RATIO
        self._begin_work()
        self.stop_reason: Reason | None = None
        """Why to end; `may_continue` sets it once."""

    def may_continue(self) -> bool:
        """Rest if it is time for it; return whether to go on."""
        if self.stop_reason is not None:
            return False
        passed = self._clocks.steady() - self._began
        if passed >= _WORK_SECONDS:
            worked = passed - (self._clocks.waited() - self._waited)
            self._rest(min(max(worked, 0.0) * self._rest_ratio, _MAX_REST_SECONDS))
        if self._is_stopping():
            self.stop_reason = Reason.STOPPING
        elif self._clocks.now() >= self._deadline:
            self.stop_reason = Reason.NO_TIME
        return self.stop_reason is None

    def wait(self, seconds: float) -> None:
        """Sleep for so many seconds."""
        self._clocks.sleep(seconds)
        self._begin_work()

    def _rest(self, seconds: float) -> None:
        """Rest, then double the ratio of the next rests if a task waited for the disk meanwhile, else halve it."""
        began, stalled = self._clocks.steady(), self._clocks.stalled()
        self.wait(seconds)
        passed = self._clocks.steady() - began
        if passed <= 0:
            return
        is_contended = (self._clocks.stalled() - stalled) / passed > _CONTENTION
        ratio = self._rest_ratio * 2 if is_contended else self._rest_ratio / 2
        self._rest_ratio = min(max(ratio, _MIN_REST_RATIO), _MAX_REST_RATIO)
        self._begin_work()

    def _begin_work(self) -> None:
        self._began, self._waited = self._clocks.steady(), self._clocks.waited()


def take_low_priority() -> None:
    """Make the calling thread yield to everything else from now on. Best effort: a refusal is logged."""
    try:
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICE)
        _take_last_io_priority()
    except OSError as error:
        log.info("cleaning runs at the agent's own priority", extra={"reason": str(error)})


def _take_last_io_priority() -> None:
    """Give the calling thread the lowest I/O priority of its class. Raises OSError."""
    number = _IOPRIO_SET.get(platform.machine())
    if number is None:
        raise OSError(f"no I/O priority is known for {platform.machine()}")
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.syscall(number, _IOPRIO_WHO_PROCESS, _THIS_THREAD, _IOPRIO_LAST_BEST_EFFORT) < 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
