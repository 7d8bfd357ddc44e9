"""Getting a training loop out of a step that hangs, so that a command can be carried out.

A loop that hangs does not come to the step boundary at which commands are applied. Where a rollback or a stop
waits for it, the main thread is sent a signal whose handler raises `Interrupted` out of the step. That frees
what waits in Python, or in a system call that a signal ends: a lock, a sleep, a socket, a queue of a data
loader. It does not free a thread that is stuck in a library's own loop, such as a CUDA kernel that never ends.

Only the main thread can be interrupted, only between `Interrupter.arm` and `disarm`, and never in this package's
own code. Who calls it: the integrations. Not here: what counts as a hang (``progress``), and what is done after the
interruption (the integration).
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
"""A signal that other programs are unlikely to use. An earlier handler is called for signals that are not ours."""

_PACKAGE = str(Path(__file__).parent.parent) + os.sep
_CHECK_INTERVAL = 0.25
_RETRY_INTERVAL = 5.0

Item = TypeVar("Item")


def fetch(iterator: Iterator[Item]) -> Item:
    """``next(iterator)``, from where it may be interrupted even while no other Python code runs."""
    return next(iterator)


class Interrupter:
    """Interrupts the main thread of one job when it hangs. It does nothing unless it is made on the main thread.

    ``is_worth_it`` says whether a command waits that is worth interrupting a hang for, ``hangs`` whether the loop
    hangs; both are called by a thread of this class, and only after `check_for_hang`. Without ``enabled`` it does
    nothing.
    """

    def __init__(self, is_worth_it: Callable[[], bool], hangs: Callable[[], bool], enabled: bool = True) -> None:
        self._is_worth_it = is_worth_it
        self._hangs = hangs
        self._armed = False
        self._asked = False
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
        """Allow interruptions until `disarm`. It does not nest."""
        self._armed = True

    def disarm(self) -> None:
        self._armed = False
        self._asked = False

    def check_for_hang(self) -> None:
        """Start checking for a hang, because a command has arrived; ends when no command waits. For any thread."""
        self._woken.set()

    def interrupt(self) -> None:
        """Interrupt the main thread now, if it may be. From any thread."""
        if self.works and self._armed and not self._stopping:
            self._asked = True
            signal.pthread_kill(self._main.ident or 0, SIGNAL)

    def close(self) -> None:
        """Restore the signal's earlier handler. For the main thread."""
        self._stopping = True
        self._woken.set()
        if self._thread is not None:
            self._thread.join(2 * _CHECK_INTERVAL)
        if self.works and signal.getsignal(SIGNAL) == self._handle:
            signal.signal(SIGNAL, self._previous if self._previous is not None else signal.SIG_DFL)
        self.works = False

    def _run(self) -> None:
        pause = threading.Event()
        while not self._stopping:
            self._woken.wait()
            self._woken.clear()
            try:
                while self._is_worth_it() and not self._stopping:
                    if self._hangs():
                        self.interrupt()
                    pause.wait(_CHECK_INTERVAL)
            # Every error is caught, because both may read a file system that does not answer; perhaps that is the hang.
            except Exception:
                log.exception("looking for a hang failed; trying again")
                pause.wait(_RETRY_INTERVAL)
                self._woken.set()

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if not self._asked:
            if callable(self._previous):
                self._previous(number, frame)
            return
        if not self._armed or frame is None or _is_ours(frame):
            return  # the loop has reached a boundary by itself, or is about to
        self._asked = False
        raise Interrupted("the training step hung, and a command waits")


def _is_ours(frame: FrameType) -> bool:
    """Whether the thread is in this package's own code, which ends soon and must not be left half done.

    `fetch` is the exception: it is where the loop waits for its data.
    """
    return frame.f_code is not fetch.__code__ and frame.f_code.co_filename.startswith(_PACKAGE)
