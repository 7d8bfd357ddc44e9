"""The threads that carry orders out: one for each lane, so that a long cleanup never holds up a cap.

A lane takes its orders in the order in which they came, and runs its keepers between them. What an order
means is not known here; `WorkerQueue` is handed the function that carries one out (``execution``).
"""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import datetime

from trainmedic.wire import envelope
from trainmedic_server.agent.counters import AgentCounters
from trainmedic_server.agent.executors import PeriodicTask

log = logging.getLogger(__name__)

_AFTER_FAULT = 1.0


@dataclass(slots=True)
class Pending:
    """An order that has been taken and is not concluded. A repeat of its command may give it more time."""

    command: envelope.Command
    expires_at: datetime
    resumed: bool = False


class WorkerQueue:
    """One thread and the orders that wait for it."""

    def __init__(
        self,
        name: str,
        carry_out: Callable[[Pending], None],
        keepers: Sequence[PeriodicTask],
        stopping: threading.Event,
        tally: AgentCounters,
    ) -> None:
        self.name = name
        self._carry_out = carry_out
        self._keepers = keepers
        self._stopping = stopping
        self._tally = tally
        self._queue: queue.SimpleQueue[Pending | None] = queue.SimpleQueue()  # None only wakes the thread up
        self._thread = threading.Thread(target=self._run, name=f"lane-{name}", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def put(self, pending: Pending) -> None:
        self._queue.put(pending)

    def wake(self) -> None:
        """Have it look whether the agent is stopping."""
        self._queue.put(None)

    def join(self, timeout: float) -> bool:
        """Whether the thread has ended by then."""
        self._thread.join(timeout)
        return not self._thread.is_alive()

    def _run(self) -> None:
        while not self._stopping.is_set():
            try:
                pending = self._next()
                if pending is not None and not self._stopping.is_set():
                    self._carry_out(pending)
            except Exception:  # the lane outlives whatever goes wrong in it
                log.exception("the lane %s goes on after an unexpected error", self.name)
                self._tally.fault(self.name)
                self._stopping.wait(_AFTER_FAULT)

    def _next(self) -> Pending | None:
        """The next order; None when a keeper has run or there is something to look at."""
        due = [(keeper.due(), keeper) for keeper in self._keepers]
        waits = [seconds for seconds, _ in due if seconds is not None]
        if waits and min(waits) <= 0:
            for seconds, keeper in due:
                if seconds is not None and seconds <= 0:
                    keeper.run()
            timeout = 0.0
        else:
            timeout = min(waits, default=threading.TIMEOUT_MAX)
        try:
            return self._queue.get(timeout=min(timeout, threading.TIMEOUT_MAX))
        except queue.Empty:
            return None
