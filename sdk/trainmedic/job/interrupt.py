"""Interruption of a hanging training step for a rollback or stop.

A signal handler raises `Interrupted` in the main thread. That frees waits in Python and interruptible system calls, not
loops in a library.
"""

from __future__ import annotations

import logging
import os
import signal
import threading
from pathlib import Path
from types import FrameType
from typing import Any, Callable, Iterator, TypeVar

from trainmedic.errors import Interrupted

log = logging.getLogger("trainmedic")

SIGNAL: int = signal.SIGRTMIN + 11 if hasattr(signal, "SIGRTMIN") else signal.SIGUSR2
"""Signal rarely sent by others; theirs goes to the earlier handler."""

_PACKAGE = str(Path(__file__).parent.parent) + os.sep
_CHECK_INTERVAL_S = 0.25
_RETRY_INTERVAL_S = 5.0

Item = TypeVar("Item")


def fetch(iterator: Iterator[Item]) -> Item:
    """Call ``next(iterator)`` in an interruptible frame."""
    return next(iterator)


class Interrupter:
    """Create it on the job's main thread, which it interrupts.

    Another thread calls ``wants_interruption`` (whether a waiting command justifies one) and ``hangs``.
    """

    def __init__(self, wants_interruption: Callable[[], bool], hangs: Callable[[], bool], enabled: bool = True) -> None:
        self._wants_interruption = wants_interruption
        self._hangs = hangs
        self._armed = False
        self._is_requested = False
        self._previous: Any = None
        self._woken = threading.Event()
        self._stopping = False
        self._thread: threading.Thread | None = None
        self._main = threading.main_thread()
        self.works = enabled and threading.current_thread() is self._main and hasattr(signal, "pthread_kill")
        if not self.works:
            return
        self._previous = signal.signal(SIGNAL, self._handle)
        self._thread = threading.Thread(target=self._run, name="trainmedic-interrupter", daemon=True)
        self._thread.start()

    def arm(self) -> None:
        """Allow interruptions until `disarm`; calls do not nest."""
        self._armed = True

    def disarm(self) -> None:
        self._armed = False
        self._is_requested = False

    def check_for_hang(self) -> None:  # called by the receiver's thread when a command arrives
        self._woken.set()

    def interrupt(self) -> None:
        if self.works and self._armed and not self._stopping:
            self._is_requested = True
            signal.pthread_kill(self._main.ident or 0, SIGNAL)

    def close(self) -> None:
        self._stopping = True
        self._woken.set()
        if self._thread is not None:
            self._thread.join(2 * _CHECK_INTERVAL_S)
        if self.works and signal.getsignal(SIGNAL) == self._handle:
            signal.signal(SIGNAL, self._previous if self._previous is not None else signal.SIG_DFL)
        self.works = False

    def _run(self) -> None:
        pause = threading.Event()
        while not self._stopping:
            self._woken.wait()
            self._woken.clear()
            try:
                while self._wants_interruption() and not self._stopping:
                    if self._hangs():
                        self.interrupt()
                    pause.wait(_CHECK_INTERVAL_S)
            # Catch everything: both may read a hanging file system, which may be the hang itself.
            except Exception:
                log.exception("hang detection failed; trying again")
                pause.wait(_RETRY_INTERVAL_S)
                self._woken.set()

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if not self._is_requested:
            if callable(self._previous):
                self._previous(number, frame)
            return
        if not self._armed or frame is None or _is_ours(frame):
            return  # the loop has reached a boundary or is about to
        self._is_requested = False
        raise Interrupted("the training step hung, and a command waits")


def _is_ours(frame: FrameType) -> bool:
    """Return whether this package's code runs, which must be completed."""
    return frame.f_code is not fetch.__code__ and frame.f_code.co_filename.startswith(_PACKAGE)
