"""The commands of a node: which ones are carried out, and that each has one outcome, in the journal before all else.

A command that is not carried out is answered at once: one with a wrong signature or node, or that the policy does not
allow (``rejected``), one with an unknown action (``unsupported``), one that came too late (``expired``), and one that
cannot be written down, would wait behind too many others, or could be meant for another agent of the same name
(``failed``). A repeat is answered from the journal. A withdrawal is noted, without journal and reply.

The thread of the node's command receiver (``trainmedic.wire.receiver``) hands commands in, and the threads of the
worker queues have them carried out.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Mapping
from dataclasses import replace
from datetime import datetime

import redis

from trainmedic.wire import command_book, envelope, undoing
from trainmedic.wire.command_book import CommandDecision, CommandEffect, CommandRecord, Do, ended, turn_away
from trainmedic.wire.output import plain
from trainmedic.wire.receiver import ReceivedCommand
from trainmedic_agent.context import AgentContext
from trainmedic_agent.errors import (
    CommandFailed,
    CommandInterrupted,
    CommandNotExecuted,
    CommandWithdrawn,
    JournalUnavailable,
)
from trainmedic_agent.executors import (
    AcceptedCommand,
    Executor,
    RemembersEffects,
    SupportsAbandon,
    SupportsWithdrawal,
)
from trainmedic_agent.own_log import command_fields
from trainmedic_agent.replies import AgentReplies
from trainmedic_agent.worker_queues import WorkerQueue
from trainmedic_core.problems import did_you_mean

log = logging.getLogger(__name__)

_TOO_LATE = "the agent did not come to it in time"
_BEGUN = "an earlier process of the agent may have begun it"
_PERHAPS_BEGUN = f"its time was over when the agent started again; {_BEGUN}"


class CommandRunner:
    """The commands of one node, from their arrival to their outcome."""

    def __init__(
        self, context: AgentContext, executors: Mapping[str, Executor], replies: AgentReplies, stopping: threading.Event
    ) -> None:
        self._context = context
        self._now = context.now
        self._journal = context.journal
        self._executors = executors
        self._withdrawals = {each.withdrawal for each in executors.values() if isinstance(each, SupportsWithdrawal)}
        self._replies = replies
        self._stopping = stopping
        self._queues: Mapping[str, WorkerQueue] = {}
        self._lock = threading.Lock()
        self._deadlines: dict[str, datetime] = {}  # of the unfinished commands; a repeat can put one off
        self._withdrawn: set[str] = set()
        """Unfinished commands for whose outcome no caller waits."""
        # Outcomes that the journal could not take: there the commands are still open, and resumed at the next start.
        self._unwritten: dict[str, CommandRecord] = {}

    def begin(self, queues: Mapping[str, WorkerQueue]) -> None:
        """Put commands into these queues from now on, and first what an earlier process accepted and did not finish.

        Called before the first command is read. Raises JournalUnavailable.
        """
        self._queues = queues
        for command in self._journal.open_commands():
            log.info("an interrupted command is taken up again", extra=command_fields(command))
            self._enter(command, resumed=True)

    # --- what the receiver's thread calls -----------------------------------------------------------------

    def receive(self, received: ReceivedCommand) -> None:
        """Answer a genuine command, or let it through."""
        try:
            self._receive(received)
        except JournalUnavailable as error:  # nothing has been done
            fields = command_fields(received.command, reason=str(error))
            log.error("a command is refused, because it cannot be written down", extra=fields)
            self._turn_away(received, ended(envelope.FAILED, str(error)))

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
            self._withdraw(str(command.params.get("command")))
            received.drop()
            return
        record = self._known(command.id)
        if record is not None and record.status == envelope.EXPIRED:
            record = None  # it was never applied, and may come again with more time
        decision = command_book.admit(
            command, record, self._now(), lambda: self._refusal(command), lambda: self._claim(command)
        )
        if decision.what is Do.CARRY_OUT:
            self._replies.answer(command.id, CommandRecord(envelope.ACCEPTED), received.entry)
            self._enter(command)
        elif decision.outcome is None:
            self._extend(command)
            received.drop()  # its outcome will be sent when there is one
        elif record is None:
            self._turn_away(received, decision.outcome)
        else:
            self._replies.answer(command.id, decision.outcome, received.entry)

    def _turn_away(self, received: ReceivedCommand, outcome: CommandRecord) -> None:
        """Answer a command that is not entered, and count it."""
        command = received.command
        self._replies.answer(command.id, outcome, received.entry)
        # An action's name comes from outside: only those that exist make a series of their own.
        self._context.counters.command(command.action if command.action in self._executors else "", outcome.status)

    def _refusal(self, command: envelope.Command) -> CommandDecision | None:
        """Return the answer to a command that this agent does not carry out; None where it does."""
        if command.action not in self._executors:
            near = did_you_mean(command.action, self._executors)
            return turn_away(envelope.UNSUPPORTED, f"this agent does not know {command.action}{near}")
        if (refusal := self._context.policy.refusal(command)) is not None:
            log.warning("a command is refused by the policy", extra=command_fields(command, reason=refusal))
            return turn_away(envelope.REJECTED, refusal)
        # An undo is accepted even during a name conflict, because the command was carried out here.
        if command.undo_of is None and (other := self._replies.name_conflict()) is not None:
            node = self._context.node
            reason = f"two agents call themselves {node}, the other is {other}; stop one, or give it another name"
            return turn_away(envelope.FAILED, reason)
        if len(self._deadlines) >= command_book.MOST_WAITING:
            return turn_away(envelope.FAILED, f"{command_book.MOST_WAITING} commands wait on this node already")
        return None

    def _claim(self, command: envelope.Command) -> None:
        """Enter a command in the journal.

        Only this thread enters any, so a row that is there already is of the same command, which expired. It can be
        open still, where the journal could not take that.
        """
        self._journal.claim(command, self._now())

    def _enter(self, command: envelope.Command, resumed: bool = False) -> None:
        """Count a command of the journal as unfinished, until `carry_out` has recorded its outcome, and queue it."""
        with self._lock:
            self._deadlines[command.id] = command.expires_at
            self._unwritten.pop(command.id, None)  # it had expired; from now on a repeat finds it open
        executor = self._executors.get(command.action)
        # A command of the journal may be of an older agent; any queue brings it to `carry_out`, which answers it.
        name = executor.queue if executor is not None else next(iter(self._queues))
        accepted = AcceptedCommand(command, resumed, self._stopping.is_set, lambda: command.id in self._withdrawn)
        self._queues[name].put(accepted)

    def _extend(self, command: envelope.Command) -> None:
        """Give an open command that has come again as much time as the repeat has."""
        with self._lock:
            if command.id in self._deadlines:
                self._deadlines[command.id] = max(self._deadlines[command.id], command.expires_at)

    def _withdraw(self, command_id: str) -> None:
        """Note that no caller waits for this command's outcome. Commands that are finished or unknown are ignored."""
        with self._lock:
            if command_id in self._deadlines:
                self._withdrawn.add(command_id)

    # --- what the threads of the worker queues call -------------------------------------------------------

    def carry_out(self, accepted: AcceptedCommand) -> None:
        """Run a command to its end, unless the agent stops in the middle: then it stays open in the journal."""
        try:
            outcome = self._outcome(accepted)
        except CommandInterrupted as interrupted:
            fields = command_fields(accepted.command, reason=str(interrupted))
            log.info("a command goes on at the next start", extra=fields)
            return
        self._report_outcome(accepted.command, outcome)

    def _outcome(self, accepted: AcceptedCommand) -> CommandRecord:
        """Carry a command out, and return how it ended. Raises CommandInterrupted."""
        command = accepted.command
        executor = self._executors.get(command.action)
        if executor is None:  # another version of the agent has accepted it
            return ended(envelope.UNSUPPORTED, f"this agent does not know {command.action}")
        with self._lock:
            deadline = self._deadlines[command.id]
        if self._now() >= deadline:
            return ended(envelope.EXPIRED, _TOO_LATE if self._leaves_nothing(executor, accepted) else _PERHAPS_BEGUN)
        refusal = self._context.policy.refusal(command)
        if refusal is not None:
            leaves_nothing = self._leaves_nothing(executor, accepted)
            return ended(envelope.REJECTED, refusal if leaves_nothing else f"{refusal}; {_BEGUN}")
        try:
            if isinstance(executor, SupportsWithdrawal) and accepted.is_withdrawn():
                raise CommandWithdrawn("the server withdrew it")
            if command.undo_of is not None and not self._is_undoable(executor, command.undo_of):
                return CommandRecord(envelope.APPLIED, undoing.nothing_to_undo(undoing.NEVER_APPLIED))
            return CommandRecord(envelope.APPLIED, executor.perform(accepted))
        except CommandInterrupted:
            raise
        except CommandNotExecuted as error:
            return CommandRecord(error.status, {**error.output, "reason": str(error)})
        except JournalUnavailable as error:
            log.error("a command was not carried out", extra=command_fields(command, reason=str(error)))
            return ended(envelope.FAILED, str(error))
        except Exception as error:  # an executor's own error is answered like any failure, and does not end its queue
            log.exception("a command failed unexpectedly", extra=command_fields(command))
            self._context.counters.loop_error(executor.queue)
            return ended(envelope.FAILED, f"{type(error).__name__}: {error}")

    def _leaves_nothing(self, executor: Executor, accepted: AcceptedCommand) -> bool:
        """Undo what an earlier process may have begun of a command that this one must not finish.

        Return whether certainly nothing is left of it.
        """
        if not accepted.resumed:
            return True
        if not isinstance(executor, SupportsAbandon):
            return False
        try:
            executor.abandon(accepted)
        except Exception:  # the command is answered all the same; a person must deal with what is left of it
            log.exception("what was begun of a command could not be taken back", extra=command_fields(accepted.command))
            self._context.counters.loop_error(executor.queue)
            return False
        return True

    def _is_undoable(self, executor: Executor, command_id: str) -> bool:
        """Whether the command that is to be taken back may have had an effect.

        Where it never came, it is barred from now on: it may still be on its way, and must not act after its undo.
        Raises CommandFailed while it is being carried out, and where the journal may have been lost since it came;
        JournalUnavailable.
        """
        record = self._known(command_id)
        if record is None and isinstance(executor, RemembersEffects) and executor.remembers(command_id):
            return True
        since = self._journal.whole_since()
        # An executor that failed may have changed something before.
        effect = command_book.effect_of(record, lambda: undoing.is_covered(command_id, since), CommandEffect.POSSIBLE)
        if effect is CommandEffect.OPEN:
            raise CommandFailed("the command that it takes back is still being carried out; try again")
        if effect is CommandEffect.UNKNOWN:
            raise CommandFailed(undoing.unknown_command(f"the agent on node {self._context.node!r}", since))
        if record is None or record.status == envelope.EXPIRED:
            self._journal.revoke(command_id, self._now())
        return effect is CommandEffect.POSSIBLE

    def _known(self, command_id: str) -> CommandRecord | None:
        """Return the record of a command: the journal's, or the outcome that the journal could not take.

        Raises JournalUnavailable.
        """
        record = self._journal.look_up(command_id)
        if record is None or record.is_final:
            return record
        with self._lock:
            return self._unwritten.get(command_id, record)

    def _report_outcome(self, command: envelope.Command, outcome: CommandRecord) -> None:
        outcome = replace(outcome, output=plain(outcome.output), at=self._now())
        with self._lock:
            # Before the journal is written: once it has an expired command, the same one can be accepted again, and its
            # new deadline must not be removed here.
            self._deadlines.pop(command.id, None)
            self._withdrawn.discard(command.id)
        try:
            self._journal.record_outcome(command.id, outcome)
        except JournalUnavailable as error:
            fields = command_fields(command, status=outcome.status, reason=str(error))
            log.error("the outcome of a command is not in the journal", extra=fields)
            with self._lock:
                self._unwritten[command.id] = outcome
        self._replies.send_outcome(command.id, outcome)
        self._context.counters.command(command.action, outcome.status)
        log.info("a command was answered", extra=command_fields(command, status=outcome.status))
