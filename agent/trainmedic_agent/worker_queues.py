"""Worker queues: one thread each, so that a long cleanup never delays a power cap."""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable, Sequence

from trainmedic_agent.counters import AgentCounters
from trainmedic_agent.executors import AcceptedCommand, PeriodicTask

log = logging.getLogger(__name__)

_PAUSE_AFTER_ERROR = 1.0  # seconds, to spare the CPU


class WorkerQueue:
    def __init__(
        self,
        name: str,
        carry_out: Callable[[AcceptedCommand], None],
        tasks: Sequence[PeriodicTask],
        stopping: threading.Event,
        counters: AgentCounters,
    ) -> None:
        self.name = name
        self._carry_out = carry_out
        self._tasks = tasks
        self._stopping = stopping
        self._counters = counters
        self._queue: queue.SimpleQueue[AcceptedCommand | None] = queue.SimpleQueue()  # None only wakes the thread
        self._thread = threading.Thread(target=self._run, name=f"queue-{name}", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def put(self, accepted: AcceptedCommand) -> None:
        self._queue.put(accepted)

    def wake(self) -> None:
        self._queue.put(None)

    def join(self, timeout: float) -> bool:
        self._thread.join(timeout)
        return not self._thread.is_alive()

    def _run(self) -> None:
        while not self._stopping.is_set():
            try:
                accepted = self._next()
                if accepted is not None and not self._stopping.is_set():
                    self._carry_out(accepted)
            except Exception:  # thread boundary: a failed command or task must not stop later ones
                log.exception("worker queue continues after an unexpected error", extra={"queue": self.name})
                self._counters.loop_error(self.name)
                self._stopping.wait(_PAUSE_AFTER_ERROR)

    def _next(self) -> AcceptedCommand | None:
        due = [(seconds, task) for task in self._tasks if (seconds := task.due()) is not None]
        timeout = min((seconds for seconds, _ in due), default=threading.TIMEOUT_MAX)
        if timeout <= 0:
            for seconds, task in due:
                if seconds <= 0:
                    task.run()
            timeout = 0.0  # a command may have arrived while the task ran
        try:
            return self._queue.get(timeout=min(timeout, threading.TIMEOUT_MAX))
        except queue.Empty:
            return None
