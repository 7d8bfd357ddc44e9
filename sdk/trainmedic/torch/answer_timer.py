"""Timer that answers a command for a hanging loop."""

from __future__ import annotations

import threading
from typing import Callable

_GRACE = 1.0  # seconds for a working loop to answer by itself at the limit


class AnswerTimer:
    """Calls a function in a thread of its own, with ``lock`` held."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self._timer: threading.Timer | None = None

    def start(self, seconds: float, act: Callable[[], None]) -> None:
        """Call ``act`` shortly after ``seconds``, unless cancelled."""
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
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
