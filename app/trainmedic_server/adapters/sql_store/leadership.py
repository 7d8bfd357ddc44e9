"""How long this server may act where several share a database: only while its session is confirmed to hold the lock.

The lock is free as soon as PostgreSQL ends the session, at the earliest when the server has been silent for the
takeover time. So the server counts the time since it sent the last query that was answered, and stops well before.
A session that ends otherwise is noticed at the socket at once. Stopping means, by default, that the process begins
anew, in one step: nothing of what it did continues, and it stands by. What was begun is in the store.

The clock also runs while the process is stopped and while the machine sleeps.
Who calls it: ``writer`` asks and confirms; whatever acts calls `require` first.
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

EXIT_CODE = 3
"""The command line's code for "cannot serve now"."""

_CLOCK = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)
_ENDED_BY_PEER = getattr(select, "POLLRDHUP", 0)  # without such an event, a session's end is found by its silence

log = telemetry.logger(__name__)


def now() -> float:
    """Seconds, by a clock that nothing sets or stops."""
    return time.clock_gettime(_CLOCK)


def begin_anew(reason: str) -> None:
    """Start the process's command again in its place, at once and without unwinding, because unwinding could act.

    All threads end with that, and all files and connections close, as if the process had been killed. Only its id is
    kept, so no supervisor has to start it, or waits longer each time. Where it cannot be started again, or was told to
    end, it ends.
    """
    if signal.getsignal(signal.SIGTERM) == signal.SIG_DFL:  # the command line gives it back when it has been sent
        os._exit(EXIT_CODE)
    log.critical(
        "this server works no more and begins anew; what it had begun, the one that takes over goes on with", why=reason
    )
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    try:
        os.execv(sys.executable, sys.orig_argv)  # noqa: S606  # no shell is wanted
    except (OSError, ValueError) as error:
        log.critical("this server cannot be started again, and ends", error=str(error))
    os._exit(EXIT_CODE)


class Leadership:
    """One server's time as the leader. `fileno` is the session's socket, watched until `end`."""

    def __init__(
        self, fileno: int, takeover: timedelta, confirmed: float, on_lost: Callable[[str], object] = begin_anew
    ) -> None:
        # PostgreSQL ends a session that was silent for the takeover time, so a server gives up after two thirds of it:
        # well before another can have the lock.
        self._limit = takeover.total_seconds() * 2 / 3
        self.heartbeat = takeover.total_seconds() / 10
        """Seconds after which the session is confirmed again."""
        self._confirmed = confirmed
        self._on_lost = on_lost
        self._lost: str | None = None
        self._ended = False
        self._lock = threading.Lock()
        # A descriptor of its own: the session's number could come to mean another file once the session is closed.
        self._socket = os.dup(fileno)
        self._wake, self._waker = os.pipe()
        self._thread = threading.Thread(target=self._watch, name="run-store-leadership", daemon=True)
        self._thread.start()

    @property
    def is_due(self) -> bool:
        """Whether it is time to confirm the session again."""
        return now() - self._confirmed >= self.heartbeat

    def confirm(self, asked_at: float) -> None:
        """Note that the session has answered a query sent at `asked_at`."""
        self._confirmed = max(self._confirmed, asked_at)

    def require(self) -> None:
        """Return if this server may act. Else `on_lost` is called, and StoreUnavailable raised if it returns."""
        silent = now() - self._confirmed
        if self._lost is None and silent > self._limit:
            self.lose(f"PostgreSQL has not answered for {silent:.0f} s")
        if self._lost is not None:
            raise errors.StoreUnavailable(f"this server does not work any more: {self._lost}")

    def lose(self, reason: str) -> None:
        """Stop acting, because the session is over or cannot be relied on. Only the first call counts."""
        with self._lock:
            if self._lost is not None or self._ended:
                return
            self._lost = reason
        self._on_lost(reason)

    def end(self) -> None:
        """Stop watching. The session may be closed then."""
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
