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
            wait = self._run_due_tasks()
            try:
                accepted = self._next(wait)
                if accepted is not None and not self._stopping.is_set():
                    self._carry_out(accepted)
            except Exception:  # thread boundary: a failed command must not stop later ones
                self._log_error()
                self._stopping.wait(_PAUSE_AFTER_ERROR)

    def _run_due_tasks(self) -> float:
        """Return the seconds until the next is due."""
        wait = threading.TIMEOUT_MAX
        for task in self._tasks:
            try:
                seconds = task.due()
                if seconds is not None and seconds <= 0:
                    task.run()
            except Exception:  # a failed task must stop neither commands nor other tasks
                self._log_error()
                seconds = _PAUSE_AFTER_ERROR
            if seconds is not None:
                wait = min(wait, max(seconds, 0.0))  # 0 after a task: a command may have arrived
        return wait

    def _next(self, wait: float) -> AcceptedCommand | None:
        try:
            return self._queue.get(timeout=wait)
        except queue.Empty:
            return None

    def _log_error(self) -> None:
        log.exception("worker queue continues after an unexpected error", extra={"queue": self.name})
        self._counters.loop_errors.add(self.name)
