"""Permission to act, if several servers share a database: only while the session is confirmed to hold the lock.

PostgreSQL ends a session that was silent for the takeover time. So the server counts the time since it sent the last
answered query, also while its process or machine is stopped, and gives up well before.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import sys
import threading
import time
from collections.abc import Callable
from datetime import timedelta

from trainmedic_server import errors, telemetry

EXIT_CODE = 3  # of a former leader that shuts down or cannot restart

_CLOCK = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)  # The first also counts while the machine sleeps.
_ENDED_BY_PEER = getattr(select, "POLLRDHUP", 0)  # Without this event, a session's end is detected by its silence.

log = telemetry.logger(__name__)


def now() -> float:
    return time.clock_gettime(_CLOCK)


def restart_process(reason: str) -> None:
    """Replace this process by its command without unwinding, which could act. The PID stays, so no supervisor delays
    the restart. End the process instead on a shutdown, or if the restart fails.
    """
    # On a shutdown: the command line restores the default handler once it has received the signal.
    if signal.getsignal(signal.SIGTERM) == signal.SIG_DFL:
        os._exit(EXIT_CODE)
    log.critical("this server is no longer the leader and restarts; the new leader continues its runs", why=reason)
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    try:
        os.execv(sys.executable, sys.orig_argv)  # noqa: S606  # no shell is wanted
    except (OSError, ValueError) as error:
        log.critical("cannot restart this server; it ends", error=str(error))
    os._exit(EXIT_CODE)


class Leadership:
    def __init__(
        self, fileno: int, takeover: timedelta, confirmed: float, on_lost: Callable[[str], object] = restart_process
    ) -> None:
        # PostgreSQL ends a session after the takeover time, so stop after two thirds of it, well before another server
        # can have the lock.
        self._limit = takeover.total_seconds() * 2 / 3
        self.heartbeat = takeover.total_seconds() / 10  # Seconds between confirmations.
        self._confirmed = confirmed  # When the last answered query was sent, by `now`.
        self._on_lost = on_lost
        self._lost: str | None = None
        self._ended = False
        self._lock = threading.Lock()
        # A duplicate: the descriptor's number could be reused once the session is closed.
        self._socket = os.dup(fileno)
        self._wake, self._waker = os.pipe()
        self._thread = threading.Thread(target=self._watch, name="run-store-leadership", daemon=True)
        self._thread.start()

    @property
    def is_confirmation_due(self) -> bool:
        return now() - self._confirmed >= self.heartbeat

    def confirm(self, asked_at: float) -> None:
        self._confirmed = max(self._confirmed, asked_at)

    def require(self) -> None:
        """If this server may not act, call `on_lost` unless that was done, and raise StoreUnavailable if it returns."""
        silent = now() - self._confirmed
        if self._lost is None and silent > self._limit:
            self.lose(f"PostgreSQL has not answered for {silent:.0f} s")
        if self._lost is not None:
            raise errors.StoreUnavailable(f"this server is no longer the leader: {self._lost}")

    def lose(self, reason: str) -> None:
        with self._lock:
            if self._lost is not None or self._ended:
                return
            self._lost = reason
        self._on_lost(reason)

    def end(self) -> None:
        with self._lock:
            self._ended = True
        os.write(self._waker, b"x")
        if threading.current_thread() is not self._thread:
            self._thread.join()
        for descriptor in (self._socket, self._wake, self._waker):
            os.close(descriptor)

    def _watch(self) -> None:
        poller = select.poll()
        poller.register(self._socket, _ENDED_BY_PEER)
        poller.register(self._wake, select.POLLIN)
        while not self._ended and self._lost is None:
            events = poller.poll(self._limit / 10 * 1000)
            if any(descriptor == self._socket for descriptor, _ in events):
                self.lose("PostgreSQL has ended the session")
            elif not self._ended and (silent := now() - self._confirmed) > self._limit:
                self.lose(f"PostgreSQL has not answered for {silent:.0f} s")
