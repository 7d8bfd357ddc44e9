"""Deals with the node's commands as they are read: lets a genuine, timely and allowed one through to its lane.

What it answers by itself: a wrong signature, version or node, and what the policy does not allow
(``rejected``), an unknown action (``unsupported``), what came too late (``expired``), what cannot be
remembered, would wait behind too many others, or could be meant for another agent of the same name
(``failed``), and repeats, from the journal.

Called in the one thread that follows the stream.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from datetime import datetime
from typing import Any

import redis

from trainmedic.job.receiver import LARGEST_COMMAND
from trainmedic.wire import envelope
from trainmedic.wire.connection import Link
from trainmedic.wire.stream_reader import Follower
from trainmedic_server.agent.command_runner import CommandRunner
from trainmedic_server.agent.counters import AgentCounters
from trainmedic_server.agent.executors import Executor
from trainmedic_server.agent.journal import Journal
from trainmedic_server.agent.policy import Policy
from trainmedic_server.agent.replies import Replies
from trainmedic_server.agent.worker_queues import Pending, WorkerQueue
from trainmedic_server.catalog.problems import did_you_mean
from trainmedic_server.errors import JournalUnavailable

log = logging.getLogger(__name__)

MOST_WAITING = 1000
_CONSUMER = "agent"


class Intake:
    """Follows the stream of the node's commands."""

    def __init__(
        self,
        node: str,
        signing_key: bytes | None,
        link: Link,
        hands: Mapping[str, Executor],
        policy: Policy,
        lanes: Mapping[str, WorkerQueue],
        execution: CommandRunner,
        journal: Journal,
        replies: Replies,
        tally: AgentCounters,
        now: Callable[[], datetime],
    ) -> None:
        self._node = node
        self._key = signing_key
        self._hands = hands
        self._policy = policy
        self._lanes = lanes
        self._execution = execution
        self._journal = journal
        self._replies = replies
        self._tally = tally
        self._now = now
        self._follower = Follower(link, envelope.node_commands(node), _CONSUMER, f"node {node}", self._take)

    def resume(self) -> None:
        """Put what an earlier process took and did not finish into its lane again. Before `start`."""
        for command in self._journal.open_commands():
            log.info("%s %s was interrupted and is taken up again", command.action, command.id)
            self._enter(Pending(command, command.expires_at, resumed=True))

    def start(self) -> None:
        self._follower.start()

    def stop(self, timeout: float) -> None:
        self._follower.stop(timeout)

    def _take(self, client: redis.Redis, entry: bytes, fields: Mapping[bytes, bytes]) -> None:
        try:
            raw = envelope.body_of(fields, b"command")
            if len(raw) > LARGEST_COMMAND:
                raise envelope.EnvelopeError("the command is too large")
            command = envelope.Command.decode(raw)
        except envelope.EnvelopeError as error:
            log.warning("an unreadable message was found among the commands and is ignored: %s", error)
            self._tally.command("", "unreadable")
            self._follower.drop(client, entry)
            return
        try:
            envelope.verify(raw, fields.get(b"signature"), self._key)
            if command.target.get("node") != self._node:
                raise envelope.EnvelopeError("the command is for another node")
        except envelope.EnvelopeError as error:
            log.warning("refused a command: %s", error)
            self._refuse(command, envelope.REJECTED, str(error), entry)
            return
        try:
            self._receive(client, entry, command)
        except JournalUnavailable as error:
            log.error("%s %s is refused: %s", command.action, command.id, error)
            self._refuse(command, envelope.FAILED, str(error), entry)

    def _receive(self, client: redis.Redis, entry: bytes, command: envelope.Command) -> None:
        """A genuine command. Raises JournalUnavailable, with nothing done."""
        known = self._journal.look_up(command.id)
        if known is not None and known.is_open:
            known = self._execution.extend(command.id, command.expires_at)
            if known is None:  # its outcome will be sent when there is one
                self._follower.drop(client, entry)
                return
        if known is not None and known.status != envelope.EXPIRED:
            self._replies.repeat(known, entry)
            return
        if self._now() >= command.expires_at:
            self._refuse(command, envelope.EXPIRED, "it came after it had expired", entry)
        elif command.action not in self._hands:
            near = did_you_mean(command.action, self._hands)
            self._refuse(command, envelope.UNSUPPORTED, f"this agent does not know {command.action}{near}", entry)
        elif (refusal := self._policy.refusal(command)) is not None:
            log.warning("%s %s: %s", command.action, command.id, refusal)
            self._refuse(command, envelope.REJECTED, refusal, entry)
        elif command.undo_of is None and (rival := self._replies.rival()) is not None:
            reason = f"two agents call themselves {self._node}, the other is {rival}; stop one, or give it another name"
            self._refuse(command, envelope.FAILED, reason, entry)
        elif self._execution.waiting() >= MOST_WAITING:
            self._refuse(command, envelope.FAILED, f"{MOST_WAITING} commands wait on this node already", entry)
        else:
            self._journal.take(command, self._now())
            self._replies.answer(command.id, envelope.ACCEPTED, {}, entry)
            self._enter(Pending(command, command.expires_at))

    def _enter(self, pending: Pending) -> None:
        hand = self._hands.get(pending.command.action)
        lane = self._lanes[hand.queue] if hand is not None else next(iter(self._lanes.values()))
        self._execution.enter(pending)
        lane.put(pending)

    def _refuse(self, command: envelope.Command, status: str, reason: str, entry: bytes) -> None:
        output: Mapping[str, Any] = {"reason": reason}
        self._replies.answer(command.id, status, output, entry)
        # An action's name comes from outside: only those that exist make a series of their own.
        self._tally.command(command.action if command.action in self._hands else "", status)
