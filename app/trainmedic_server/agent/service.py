"""The agent as a whole: its parts, started in order, and stopped without leaving anything half-done.

What was interrupted is taken up before the first new command is read. On the way down no further command is
begun; what runs has a few seconds to end, and what does not is left in the journal, to be resumed.

Who calls it: ``wiring.agent``, which hands in the hands and keepers.
"""

from __future__ import annotations

import logging
import os
import socket
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

from trainmedic.wire import envelope
from trainmedic.wire.connection import OutageLog, RedisConnection
from trainmedic.wire.receiver import Addressee, CommandReceiver
from trainmedic_server import __version__
from trainmedic_server.agent.command_runner import CommandRunner
from trainmedic_server.agent.counters import AgentCounters
from trainmedic_server.agent.executors import Executor, PeriodicTask
from trainmedic_server.agent.intake import CommandIntake
from trainmedic_server.agent.journal import Journal
from trainmedic_server.agent.policy import Policy, allowed
from trainmedic_server.agent.replies import AgentReplies
from trainmedic_server.agent.worker_queues import WorkerQueue
from trainmedic_server.errors import JournalUnavailable

log = logging.getLogger(__name__)

LANES = ("gpu", "disk", "facts")
STOP_SECONDS = 8.0
"""How long what runs may take to end when the agent is told to."""
_READ_SECONDS = 1.0
_SEND_SECONDS = 2.0
_PRUNE_EVERY = 3600.0


def _utc_now() -> datetime:
    return datetime.now(UTC)


class _Pruning:
    """Keeps the journal from growing for ever."""

    queue = "facts"

    def __init__(self, journal: Journal, now: Callable[[], datetime]) -> None:
        self._journal = journal
        self._now = now
        self._due = now().timestamp() + _PRUNE_EVERY

    def due(self) -> float:
        return self._due - self._now().timestamp()

    def run(self) -> None:
        self._due = self._now().timestamp() + _PRUNE_EVERY
        try:
            self._journal.prune(self._now())
        except JournalUnavailable as error:
            log.warning("old commands could not be forgotten; trying again later: %s", error)


class Agent:
    """One node's agent. `inventory` says what the presence tells of the node's GPUs."""

    def __init__(
        self,
        node: str,
        find_url: Callable[[], str | None],
        signing_key: bytes | None,
        policy: Policy,
        journal: Journal,
        hands: Sequence[Executor],
        keepers: Sequence[PeriodicTask] = (),
        inventory: Callable[[], Mapping[str, Any]] = dict,
        tally: AgentCounters | None = None,
        now: Callable[[], datetime] = _utc_now,
    ) -> None:
        self.node = node
        self.instance = envelope.new_id()
        self._policy = policy
        self._inventory = inventory
        self._stopping = threading.Event()
        by_action = {hand.action: hand for hand in hands}
        self._actions = allowed(policy, by_action)
        tally = tally or AgentCounters()
        outage = OutageLog(f"node {node}", "what is begun goes on")
        writing, receiving = RedisConnection(find_url, outage), RedisConnection(find_url, outage)
        self._replies = AgentReplies(node, self.instance, writing, journal, self._describe, now, tally)
        execution = CommandRunner(by_action, policy, journal, self._replies, self._stopping, tally, now)
        kept: list[PeriodicTask] = [*keepers, _Pruning(journal, now)]
        self._lanes = {
            name: WorkerQueue(
                name, execution.carry_out, [one for one in kept if one.queue == name], self._stopping, tally
            )
            for name in LANES
        }
        self._intake = CommandIntake(
            node,
            by_action,
            policy,
            self._lanes,
            execution,
            journal,
            self._replies,
            tally,
            now,
        )
        addressee = Addressee("node", node, envelope.node_commands(node), "agent", f"node {node}")
        self._receiver = CommandReceiver(receiving, addressee, signing_key, self._intake)

    def start(self) -> None:
        """Raises JournalUnavailable."""
        self._intake.resume()
        for lane in self._lanes.values():
            lane.start()
        self._replies.start()
        self._receiver.start()

    def stop(self) -> bool:
        """End everything; whether nothing was left for the next start."""
        self._receiver.stop(_READ_SECONDS)
        self._stopping.set()
        deadline = time.monotonic() + STOP_SECONDS
        for lane in self._lanes.values():
            lane.wake()
        ended = [lane.name for lane in self._lanes.values() if lane.join(max(deadline - time.monotonic(), 0.0))]
        for name in self._lanes.keys() - set(ended):
            log.warning("the lane %s did not end in time; its order is resumed at the next start", name)
        self._replies.stop(_SEND_SECONDS)
        return len(ended) == len(self._lanes)

    def _describe(self) -> Mapping[str, Any]:
        return {
            "node": self.node,
            "host": socket.gethostname(),
            "pid": os.getpid(),
            "version": __version__,
            "instance": self.instance,
            "actions": self._actions,
            "policy": self._policy.digest or "none",
            **self._inventory(),
        }
