"""Deals with the node's commands as they arrive: lets a genuine, timely and allowed one through to its worker queue.

The intake itself answers a command that has a wrong signature or node, or that the policy does not allow
(``rejected``), one with an unknown action (``unsupported``), one that came too late (``expired``), and one that cannot
be written down, would wait behind too many others, or could be meant for another agent of the same name (``failed``).
It answers a repeat from the journal. A withdrawal is passed to the command runner at once, without journal and reply.

Called in the thread of the node's command receiver (``trainmedic.wire.receiver``).
"""

from __future__ import annotations

import logging
from collections.abc import Mapping

import redis

from trainmedic.wire import envelope
from trainmedic.wire.receiver import ReceivedCommand
from trainmedic_server.agent.command_runner import CommandRunner
from trainmedic_server.agent.context import AgentContext
from trainmedic_server.agent.executors import Executor, SupportsWithdrawal
from trainmedic_server.agent.own_log import command_fields
from trainmedic_server.agent.replies import AgentReplies
from trainmedic_server.agent.worker_queues import WorkerQueue
from trainmedic_server.agent_errors import JournalUnavailable
from trainmedic_server.domain.problems import did_you_mean

log = logging.getLogger(__name__)

MOST_WAITING = 1000


class CommandIntake:
    """Gets the node's commands from the receiver, and at the start those of the journal."""

    def __init__(
        self,
        context: AgentContext,
        executors: Mapping[str, Executor],
        queues: Mapping[str, WorkerQueue],
        runner: CommandRunner,
        replies: AgentReplies,
    ) -> None:
        self._context = context
        self._journal = context.journal
        self._executors = executors
        self._withdrawals = {each.withdrawal for each in executors.values() if isinstance(each, SupportsWithdrawal)}
        self._queues = queues
        self._runner = runner
        self._replies = replies

    def reenter_open_commands(self) -> None:
        """Queue again what an earlier process accepted and did not finish. Called before the first command is read."""
        for command in self._journal.open_commands():
            log.info("an interrupted command is taken up again", extra=command_fields(command))
            self._enter(command, resumed=True)

    # --- what the receiver calls --------------------------------------------------------------------------

    def receive(self, received: ReceivedCommand) -> None:
        """Answer a genuine command, or let it through."""
        try:
            self._receive(received)
        except JournalUnavailable as error:  # nothing has been done
            fields = command_fields(received.command, reason=str(error))
            log.error("a command is refused, because it cannot be written down", extra=fields)
            self._answer(received, envelope.FAILED, str(error))

    def refuse(self, received: ReceivedCommand, reason: str) -> None:
        """Answer a command with a wrong signature, or for another node."""
        self._replies.refuse(received.command.id, reason, received.entry)
        self._context.counters.command("", envelope.REJECTED)

    def note_unreadable(self) -> None:
        """Count a message that is no command; it gets no reply."""
        self._context.counters.command("", "unreadable")

    def connected(self, client: redis.Redis) -> None:
        """Do nothing: the agent's memory is its journal, and not in Redis."""

    def _receive(self, received: ReceivedCommand) -> None:
        command = received.command
        if command.action in self._withdrawals:
            self._runner.withdraw(str(command.params.get("command")))
            received.drop()
            return
        record = self._journal.look_up(command.id)
        if record is not None and record.is_open:
            record = self._runner.extend(command.id, command.expires_at)
            if record is None:  # its outcome will be sent when there is one
                received.drop()
                return
        if record is not None and record.status != envelope.EXPIRED:
            self._replies.resend_outcome(record, received.entry)
            return
        if (refusal := self._refusal(command)) is not None:
            self._answer(received, *refusal)
            return
        self._journal.take(command, self._context.now())
        self._replies.answer(command.id, envelope.ACCEPTED, {}, received.entry)
        self._enter(command)

    def _refusal(self, command: envelope.Command) -> tuple[str, str] | None:
        """Status and reason of the answer to a command that this agent does not carry out; None where it does."""
        if self._context.now() >= command.expires_at:
            return envelope.EXPIRED, "it came after it had expired"
        if command.action not in self._executors:
            near = did_you_mean(command.action, self._executors)
            return envelope.UNSUPPORTED, f"this agent does not know {command.action}{near}"
        if (refusal := self._context.policy.refusal(command)) is not None:
            log.warning("a command is refused by the policy", extra=command_fields(command, reason=refusal))
            return envelope.REJECTED, refusal
        # An undo is accepted even during a name conflict, because the command was carried out here.
        if command.undo_of is None and (other := self._replies.name_conflict()) is not None:
            node = self._context.node
            reason = f"two agents call themselves {node}, the other is {other}; stop one, or give it another name"
            return envelope.FAILED, reason
        if self._runner.unfinished() >= MOST_WAITING:
            return envelope.FAILED, f"{MOST_WAITING} commands wait on this node already"
        return None

    def _enter(self, command: envelope.Command, resumed: bool = False) -> None:
        executor = self._executors.get(command.action)
        # A command of the journal may be of an older agent; any queue brings it to the runner, which answers it.
        name = executor.queue if executor is not None else next(iter(self._queues))
        self._queues[name].put(self._runner.accept(command, resumed))

    def _answer(self, received: ReceivedCommand, status: str, reason: str) -> None:
        command = received.command
        self._replies.answer(command.id, status, {"reason": reason}, received.entry)
        # An action's name comes from outside: only those that exist make a series of their own.
        self._context.counters.command(command.action if command.action in self._executors else "", status)
