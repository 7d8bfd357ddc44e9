"""The agent as a whole: ordered start and clean stop."""

from __future__ import annotations

import logging
import os
import socket
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from msgspec import Struct

from trainmedic.wire import envelope
from trainmedic.wire.receiver import Addressee, CommandReceiver
from trainmedic.wire.steady_time import since_boot
from trainmedic_agent import __version__
from trainmedic_agent.command_runner import CommandRunner
from trainmedic_agent.context import AgentContext
from trainmedic_agent.errors import JournalUnavailable
from trainmedic_agent.executors import Executor, PeriodicTask
from trainmedic_agent.policy import allowed
from trainmedic_agent.replies import AgentReplies
from trainmedic_agent.worker_queues import WorkerQueue

if TYPE_CHECKING:
    from trainmedic_agent.log_link.linked_reading import LinkedReading

log = logging.getLogger(__name__)

QUEUES = ("gpu", "disk", "node", "facts", "logs", "health")  # of every agent; executors may add others
# Seconds for running commands. With the three times below it stays under systemd's 20 s (``packaging/systemd``).
STOP_SECONDS = 8.0
_READ_SECONDS = 1.0
_SEND_SECONDS = 2.0
_LOG_SECONDS = 3.0

_PRUNE_SECONDS = 3600.0  # between prunings of the journal


class AgentParts(Struct, frozen=True):
    """``log_reader`` is None if the policy names no logs."""

    executors: Sequence[Executor] = ()
    tasks: Sequence[PeriodicTask] = ()
    inventory: Callable[[], Mapping[str, Any]] = dict  # fields for the agent's presence
    log_reader: LinkedReading | None = None


class _Pruning:
    """Ages count to the newest command at start plus the time since: a clock set forward prunes nothing early."""

    queue = "facts"

    def __init__(self, context: AgentContext) -> None:
        self._journal = context.journal
        self._now = context.now
        self._newest_at = context.journal.newest_at() or context.now()
        self._began = since_boot()
        self._due = self._began + _PRUNE_SECONDS

    def due(self) -> float:
        return self._due - since_boot()

    def run(self) -> None:
        self._due = since_boot() + _PRUNE_SECONDS
        try:
            at_most = self._newest_at + timedelta(seconds=since_boot() - self._began)
            self._journal.prune(min(self._now(), at_most))
        except JournalUnavailable as error:
            log.warning("cannot prune old commands; retrying later", extra={"reason": str(error)})


class Agent:
    def __init__(self, context: AgentContext, parts: AgentParts) -> None:
        self._context = context
        self._inventory = parts.inventory
        self._log_reader = parts.log_reader
        self._instance = envelope.new_id()
        self._booted_at = envelope.write_time(context.now() - timedelta(seconds=since_boot()))
        self._stopping = threading.Event()
        executors = {executor.action: executor for executor in parts.executors}
        self._actions = allowed(context.policy, executors)
        self._replies = AgentReplies(context, self._instance, context.redis.shared(), self._describe)
        self._runner = CommandRunner(context, executors, self._replies, self._stopping)
        tasks: list[PeriodicTask] = [*parts.tasks, _Pruning(context)]
        self._queues = {
            name: WorkerQueue(
                name,
                self._runner.carry_out,
                [task for task in tasks if task.queue == name],
                self._stopping,
                context.counters,
            )
            for name in dict.fromkeys((*QUEUES, *(executor.queue for executor in parts.executors)))
        }
        name = f"node {context.node}"
        addressee = Addressee("node", context.node, envelope.node_commands(context.node), "agent", name)
        self._receiver = CommandReceiver(context.redis.shared(), addressee, context.signer, self._runner)

    def start(self) -> None:
        """Resume interrupted commands, then start all threads. Raises JournalUnavailable."""
        self._runner.begin(self._queues)
        for worker_queue in self._queues.values():
            worker_queue.start()
        self._replies.start()
        self._receiver.start()
        if self._log_reader is not None:
            self._log_reader.start()

    def stop(self) -> bool:
        """Return False if a command still runs."""
        self._receiver.stop(_READ_SECONDS)
        self._stopping.set()
        if self._log_reader is not None:
            self._log_reader.stop(_LOG_SECONDS)
        deadline = time.monotonic() + STOP_SECONDS
        for worker_queue in self._queues.values():
            worker_queue.wake()
        running = [name for name, each in self._queues.items() if not each.join(max(deadline - time.monotonic(), 0.0))]
        for name in running:
            log.warning("command did not end in time; resuming it at the next start", extra={"queue": name})
        self._replies.stop(_SEND_SECONDS)
        return not running

    def _describe(self) -> Mapping[str, Any]:
        return {
            "node": self._context.node,
            "host": socket.gethostname(),
            "pid": os.getpid(),
            "version": __version__,
            "instance": self._instance,
            "booted_at": self._booted_at,
            "actions": self._actions,
            "policy": self._context.policy.digest or "none",
            **self._inventory(),
            **(self._log_reader.presence() if self._log_reader is not None else {}),
        }
