"""Threads that carry out commands and periodic tasks."""

from __future__ import annotations

import threading

from tests.support.messages import make_command
from trainmedic_agent.counters import AgentCounters
from trainmedic_agent.executors import AcceptedCommand
from trainmedic_agent.worker_queues import WorkerQueue


class Task:
    """Always due."""

    queue = "gpu"

    def __init__(self, error: Exception | None) -> None:
        self._error = error
        self.has_run = threading.Event()

    def due(self) -> float | None:
        return 0.0 if not self.has_run.is_set() or self._error is not None else None

    def run(self) -> None:
        self.has_run.set()
        if self._error is not None:
            raise self._error


def test_a_task_that_always_fails_stops_neither_commands_nor_other_tasks() -> None:
    """Otherwise an error in ending a lease would also keep a cap from being set."""
    failing, sound = Task(RuntimeError("a bug")), Task(None)
    carried_out, stopping, counters = threading.Event(), threading.Event(), AgentCounters()
    worker = WorkerQueue("gpu", lambda _: carried_out.set(), [failing, sound], stopping, counters)
    worker.start()
    try:
        worker.put(AcceptedCommand(make_command("gpu.power_limit")))
        assert carried_out.wait(30)
        assert sound.has_run.wait(30)
        assert counters.loop_errors.all()["gpu"] >= 1
    finally:
        stopping.set()
        worker.wake()
        assert worker.join(30)
