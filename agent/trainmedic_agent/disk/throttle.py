"""Load limit and time limit of a cleaning.

While tasks wait for the disk (PSI, Linux 4.20), rests grow to `_MAX_REST_RATIO` times the time worked.

The thread takes a low CPU priority and the lowest best-effort I/O priority. Still lower ones could starve it while it
holds a directory lock that others need.
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

_WORK_SECONDS = 0.01  # work between rests
_MAX_REST_SECONDS = 2.0  # a stop is noticed after a rest
_MAX_REST_RATIO, _MIN_REST_RATIO = 16.0, 1.0  # rest time as a multiple of work time
_CONTENTION = 0.05  # fraction of a rest in which tasks wait for the disk, from which on rests grow
_NICE = 10  # a tenth of an ordinary share of a core

_IOPRIO_SET = {"x86_64": 251, "aarch64": 30}  # system call numbers, because the C library has no wrapper
_IOPRIO_WHO_PROCESS, _THIS_THREAD = 1, 0
_IOPRIO_LAST_BEST_EFFORT = 2 << 13 | 7


def seconds_waited_for_core() -> float:
    """Return the seconds runnable without a core, 0 if unknown."""
    try:
        with open("/proc/thread-self/schedstat", encoding="ascii") as file:  # noqa: PTH123
            return int(file.read().split()[1]) / 1e9
    except (OSError, IndexError, ValueError):
        return 0.0


def seconds_stalled_for_disk() -> float:
    """Return the seconds in which tasks waited for a disk (proc_pressure(5)). Without PSI, they seem to wait always."""
    try:
        with open("/proc/pressure/io", encoding="ascii") as file:  # noqa: PTH123
            return int(file.readline().rpartition("total=")[2]) / 1e6
    except (OSError, ValueError):
        return time.monotonic()


class Clocks(Struct, frozen=True):
    now: Callable[[], float] = steady_time.OF_PROCESS.unix_now  # since the epoch, unaffected by clock changes
    steady: Callable[[], float] = time.monotonic
    waited: Callable[[], float] = seconds_waited_for_core
    stalled: Callable[[], float] = seconds_stalled_for_disk
    sleep: Callable[[float], None] = time.sleep


class Throttle:
    """`deadline` in seconds since the epoch."""

    def __init__(self, clocks: Clocks, deadline: float, is_stopping: Callable[[], bool]) -> None:
        self._clocks = clocks
        self._deadline = deadline
        self._is_stopping = is_stopping
        # Begin with the longest rests; they shrink while no task waits for the disk.
        self._rest_ratio = _MAX_REST_RATIO
        self._begin_work()
        self.stop_reason: Reason | None = None

    def may_continue(self) -> bool:
        """Return False if the cleaning must end. Rest first, if due."""
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
        self._clocks.sleep(seconds)
        self._begin_work()

    def _rest(self, seconds: float) -> None:
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
    try:
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICE)
        _take_last_io_priority()
    except OSError as error:
        log.info("cannot lower cleaning priority", extra={"reason": str(error)})


def _take_last_io_priority() -> None:
    number = _IOPRIO_SET.get(platform.machine())
    if number is None:
        raise OSError(f"no I/O priority is known for {platform.machine()}")
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.syscall(number, _IOPRIO_WHO_PROCESS, _THIS_THREAD, _IOPRIO_LAST_BEST_EFFORT) < 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
