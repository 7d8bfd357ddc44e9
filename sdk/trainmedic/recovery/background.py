from __future__ import annotations

import logging
import queue
import threading
from typing import Callable

log = logging.getLogger("trainmedic")


class BackgroundThread:
    """Runs tasks in order and logs failures."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._tasks: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._idle = threading.Condition()
        self._pending = 0

    def submit(self, task: Callable[[], None]) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name=self._name, daemon=True)
            self._thread.start()
        with self._idle:
            self._pending += 1
        self._tasks.put(task)

    @property
    def is_idle(self) -> bool:
        return self._pending == 0

    def settle(self, seconds: float) -> bool:
        """Wait for all tasks; return whether they ended within ``seconds``."""
        with self._idle:
            return self._idle.wait_for(lambda: self._pending == 0, seconds)

    def close(self, seconds: float) -> bool:
        """End the thread after its tasks; return whether it ended within ``seconds``."""
        if self._thread is None:
            return True
        self._tasks.put(None)
        self._thread.join(seconds)
        ended, self._thread = not self._thread.is_alive(), None
        return ended

    def _run(self) -> None:
        while (task := self._tasks.get()) is not None:
            try:
                task()
            except Exception:  # Loop boundary: a failed task must not end the following ones.
                log.exception("%s: a task in the background failed", self._name)
            finally:
                with self._idle:
                    self._pending -= 1
                    self._idle.notify_all()
