"""A limit for an answer that waits for the loop: a loop that hangs never comes to the point where it would answer.

Who uses it: ``verification`` and ``rate_commands``. Not here: what is answered.
"""

from __future__ import annotations

import threading
from typing import Callable

_GRACE = 1.0
"""Seconds after the limit, because a loop that works answers at it by itself."""


class AnswerTimer:
    """Calls a function in a thread of its own when time is up. ``lock`` excludes the training thread from it."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self._timer: threading.Timer | None = None

    def start(self, seconds: float, act: Callable[[], None]) -> None:
        """Call `act` after so many seconds, with the lock held, unless `cancel` is called first."""
        self.cancel()

        def locked() -> None:
            with self.lock:
                if self._timer is timer:
                    act()

        timer = threading.Timer(max(seconds, 0.0) + _GRACE, locked)
        timer.name, timer.daemon = "trainmedic-answer", True
        self._timer = timer
        timer.start()

    def cancel(self) -> None:
        """Call nothing any more."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
