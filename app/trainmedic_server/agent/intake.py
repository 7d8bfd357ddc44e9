"""Deals with the node's commands as they arrive: lets a genuine, timely and allowed one through to its worker queue.

The intake itself answers a command that has a wrong signature or node, or that the policy does not allow
(``rejected``), one with an unknown action (``unsupported``), one that came too late (``expired``), and one that cannot
be written down, would wait behind too many others, or could be meant for another agent of the same name (``failed``).
It answers a repeat from the journal.

Called in the thread of the node's command receiver (``trainmedic.wire.receiver``).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from datetime import datetime

from trainmedic.wire import envelope
from trainmedic.wire.receiver import ReceivedCommand
from trainmedic_server.agent.command_runner import CommandRunner
from trainmedic_server.agent.counters import AgentCounters
from trainmedic_server.agent.executors import Executor
from trainmedic_server.agent.journal import Journal
from trainmedic_server.agent.policy import Policy
from trainmedic_server.agent.replies import AgentReplies
from trainmedic_server.agent.worker_queues import Pending, WorkerQueue
from trainmedic_server.catalog.problems import did_you_mean
from trainmedic_server.errors import JournalUnavailable

log = logging.getLogger(__name__)

MOST_WAITING = 1000


class CommandIntake:
    """Gets the node's commands from the receiver, and those of the journal at the start."""

    def __init__(
        self,
        node: str,
        executors: Mapping[str, Executor],
        policy: Policy,
        queues: Mapping[str, WorkerQueue],
        runner: CommandRunner,
        journal: Journal,
        replies: AgentReplies,
        counters: AgentCounters,
        now: Callable[[], datetime],
    ) -> None:
        self._node = node
        self._executors = executors
        self._policy = policy
        self._queues = queues
        self._runner = runner
        self._journal = journal
        self._replies = replies
        self._counters = counters
        self._now = now

    def resume(self) -> None:
        """Enter the commands again that an earlier process took and did not finish. Called before the first receipt."""
        for command in self._journal.open_commands():
            log.info("%s %s was interrupted and is taken up again", command.action, command.id)
            self._enter(Pending(command, command.expires_at, resumed=True))

    # --- what the receiver calls --------------------------------------------------------------------------

    def receive(self, received: ReceivedCommand) -> None:
        """Answer a genuine command, or let it through."""
        try:
            self._receive(received)
        except JournalUnavailable as error:  # nothing has been done
            log.error("%s %s is refused: %s", received.command.action, received.command.id, error)
            self._answer(received, envelope.FAILED, str(error))

    def refuse(self, received: ReceivedCommand, reason: str) -> None:
        """Answer a command with a wrong signature, or for another node."""
        self._answer(received, envelope.REJECTED, reason)

    def note_unreadable(self) -> None:
        """Count a message that is no command; nobody waits for a reply."""
        self._counters.command("", "unreadable")

    def _receive(self, received: ReceivedCommand) -> None:
        command = received.command
        record = self._journal.look_up(command.id)
        if record is not None and record.is_open:
            record = self._runner.extend(command.id, command.expires_at)
            if record is None:  # its outcome will be sent when there is one
                received.drop()
                return
        if record is not None and record.status != envelope.EXPIRED:
            self._replies.repeat(record, received.entry)
            return
        if (refusal := self._refusal(command)) is not None:
            self._answer(received, *refusal)
            return
        self._journal.take(command, self._now())
        self._replies.answer(command.id, envelope.ACCEPTED, {}, received.entry)
        self._enter(Pending(command, command.expires_at))

    def _refusal(self, command: envelope.Command) -> tuple[str, str] | None:
        """Status and reason of the answer to a command that this agent does not carry out; None where it does."""
        if self._now() >= command.expires_at:
            return envelope.EXPIRED, "it came after it had expired"
        if command.action not in self._executors:
            near = did_you_mean(command.action, self._executors)
            return envelope.UNSUPPORTED, f"this agent does not know {command.action}{near}"
        if (refusal := self._policy.refusal(command)) is not None:
            log.warning("%s %s: %s", command.action, command.id, refusal)
            return envelope.REJECTED, refusal
        # What was begun here is taken back here, whoever else has the name by now.
        if command.undo_of is None and (other := self._replies.name_conflict()) is not None:
            reason = f"two agents call themselves {self._node}, the other is {other}; stop one, or give it another name"
            return envelope.FAILED, reason
        if self._runner.waiting() >= MOST_WAITING:
            return envelope.FAILED, f"{MOST_WAITING} commands wait on this node already"
        return None

    def _enter(self, pending: Pending) -> None:
        executor = self._executors.get(pending.command.action)
        # A command of the journal may be of an older agent; any queue brings it to the runner, which answers it.
        queue = self._queues[executor.queue] if executor is not None else next(iter(self._queues.values()))
        self._runner.enter(pending)
        queue.put(pending)

    def _answer(self, received: ReceivedCommand, status: str, reason: str) -> None:
        command = received.command
        self._replies.answer(command.id, status, {"reason": reason}, received.entry)
        # An action's name comes from outside: only those that exist make a series of their own.
        self._counters.command(command.action if command.action in self._executors else "", status)
