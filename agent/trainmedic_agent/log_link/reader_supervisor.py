"""Start and supervision of the log reader.

It is restarted after a pause, which doubles from 1 s to 60 s, and killed if it answers no heartbeats.
"""

from __future__ import annotations

import contextlib
import logging
import subprocess
import threading
import time
from collections.abc import Callable

from trainmedic_agent.counters import AgentCounters
from trainmedic_agent.log_link.agent_end import AgentEnd
from trainmedic_agent.log_link.reader_process import ReaderChild

log = logging.getLogger(__name__)

FIRST_PAUSE, LONGEST_PAUSE = 1.0, 60.0
SETTLED_SECONDS = 60.0  # age at which a connected child resets the pause
CONNECT_SECONDS = 60.0  # age at which a child without connection is killed
STOPPED_SECONDS = 2.0  # seconds after which a reader stopped by a signal is killed
_LOOK_SECONDS = 0.25  # between looks at the child
_BEAT_SECONDS = 1.0  # between heartbeats
_END_SECONDS = 1.0  # for a stopping child to end by itself
_KILL_SECONDS = 2.0  # for a killed child to end


class ReaderSupervisor:
    def __init__(
        self,
        link: AgentEnd,
        start_child: Callable[[], ReaderChild] | None,
        counters: AgentCounters,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        """`start_child` is None if another program starts the reader."""
        self._link = link
        self._start_child = start_child
        self._counters = counters
        self._monotonic = monotonic
        self._child: ReaderChild | None = None
        self._stopped_at: float | None = None  # since when a signal has stopped the child, monotonic
        self._began_at = self._beat_at = float("-inf")
        self._start_at = float("-inf")
        self._pause = FIRST_PAUSE
        self._starts = 0
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="log-reader", daemon=True)

    @property
    def restarts(self) -> int:
        return max((self._starts if self._start_child is not None else self._link.generation) - 1, 0)

    def start(self) -> None:
        self._thread.start()

    def halt(self) -> None:
        self._stopping.set()

    def stop(self) -> None:
        self.halt()
        # End the child before the thread that started it: the kernel kills it with that thread.
        child = self._child
        if child is not None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                child.wait(_END_SECONDS)
            self._end(child)
        self._thread.join(_KILL_SECONDS)

    def round(self) -> None:
        now = self._monotonic()
        if self._start_child is not None:
            self._watch_child(now)
        if now - self._beat_at >= _BEAT_SECONDS:
            self._beat_at = now
            # `beat` kills only the connected process.
            if not self._link.beat() and self._child is not None:
                self._end(self._child)

    def _run(self) -> None:
        while not self._stopping.is_set():
            try:
                self.round()
            except Exception:  # thread boundary: a failed start must not end the supervision
                log.exception("supervision of the log reader continues after an unexpected error")
                self._counters.loop_errors.add("log-reader")
                self._stopping.wait(1.0)
            self._stopping.wait(_LOOK_SECONDS)
        child = self._child
        if child is not None:
            child.wait()

    def _watch_child(self, now: float) -> None:
        child = self._child
        if child is not None and child.poll() is None:
            if not self._link.is_connected and now - self._began_at > CONNECT_SECONDS:
                log.warning("ending log reader", extra={"reason": "it did not connect"})
                self._end(child)
            elif self._link.is_connected and now - self._began_at > SETTLED_SECONDS:
                self._pause = FIRST_PAUSE
            self._end_if_stopped(child, now)
            return
        if child is not None:
            log.warning(
                "log reader ended; restarting it",
                extra={"status": child.returncode, "seconds": self._pause},
            )
            self._end(child)  # its own child may be stopped, and would hold the reader's database
            self._child = None
            self._link.drop()
            self._start_at = now + self._pause
            self._pause = min(self._pause * 2, LONGEST_PAUSE)
        if now >= self._start_at:
            self._start(now)

    def _end_if_stopped(self, child: ReaderChild, now: float) -> None:
        if not child.is_stopped:
            self._stopped_at = None
        elif self._stopped_at is None:
            self._stopped_at = now
        elif now - self._stopped_at >= STOPPED_SECONDS:
            log.warning("ending log reader", extra={"reason": "a signal has stopped the opener"})
            self._stopped_at = None
            self._end(child)

    def _start(self, now: float) -> None:
        assert self._start_child is not None
        self._starts += 1
        self._began_at = now
        try:
            self._child = self._start_child()
        except OSError as error:
            log.error("cannot start log reader", extra={"reason": error.strerror or str(error)})
            self._start_at = now + self._pause
            self._pause = min(self._pause * 2, LONGEST_PAUSE)

    def _end(self, child: ReaderChild) -> None:
        with contextlib.suppress(OSError):
            child.kill()
        with contextlib.suppress(subprocess.TimeoutExpired):
            child.wait(_KILL_SECONDS)
