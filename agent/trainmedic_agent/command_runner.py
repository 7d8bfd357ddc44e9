"""Admission and execution of a node's commands, with one journaled outcome each.

Refused commands are ``rejected`` (wrong signature or node, or policy), ``unsupported``, ``expired`` or ``failed`` (no
journal, too many waiting commands, or another agent with the same name).
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Mapping
from dataclasses import replace
from datetime import datetime

import redis

from trainmedic.errors import described
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
    OnlyReads,
    RemembersEffects,
    SupportsAbandon,
    SupportsWithdrawal,
)
from trainmedic_agent.own_log import command_fields
from trainmedic_agent.replies import AgentReplies
from trainmedic_agent.worker_queues import WorkerQueue
from trainmedic_core.problems import did_you_mean

log = logging.getLogger(__name__)

_TOO_LATE = "the agent did not reach it in time"
_BEGUN = "an earlier process of the agent may have begun it"
_PERHAPS_BEGUN = f"it had expired when the agent restarted; {_BEGUN}"


class CommandRunner:
    def __init__(
        self, context: AgentContext, executors: Mapping[str, Executor], replies: AgentReplies, stopping: threading.Event
    ) -> None:
        self._context = context
        self._now = context.now
        self._journal = context.journal
        self._executors = executors  # by action
        self._withdrawals = {each.withdrawal for each in executors.values() if isinstance(each, SupportsWithdrawal)}
        self._replies = replies
        self._stopping = stopping
        self._queues: Mapping[str, WorkerQueue] = {}
        self._lock = threading.Lock()
        self._deadlines: dict[str, datetime] = {}  # by unfinished command; a repeat can extend it
        self._withdrawn: set[str] = set()  # unfinished commands, by ID
        # Outcomes that could not be written: in the journal these commands are still open, and resumed at the next
        # start.
        self._unwritten: dict[str, CommandRecord] = {}

    def begin(self, queues: Mapping[str, WorkerQueue]) -> None:
        """Resume commands of an earlier process, before the first command is read. Raises JournalUnavailable."""
        self._queues = queues
        for command in self._journal.open_commands():
            log.info("resuming interrupted command", extra=command_fields(command))
            self._enter(command, resumed=True)

    # --- called by the receiver's thread ---

    def receive(self, received: ReceivedCommand) -> None:
        try:
            self._receive(received)
        except JournalUnavailable as error:  # nothing has been done
            fields = command_fields(received.command, reason=str(error))
            log.error("refusing command: journal unavailable", extra=fields)
            self._turn_away(received, ended(envelope.FAILED, str(error)))

    def refuse(self, received: ReceivedCommand, reason: str) -> None:
        self._replies.refuse(received.command.id, reason, received.entry)
        self._context.counters.commands.add(("", envelope.REJECTED))

    def note_unreadable(self) -> None:
        self._context.counters.commands.add(("", "unreadable"))

    def connected(self, client: redis.Redis) -> None:
        return  # the journal has the agent's state

    def _receive(self, received: ReceivedCommand) -> None:
        command = received.command
        if command.action in self._withdrawals:
            self._withdraw(str(command.params.get("command")))
            received.drop()
            return
        record = self._known(command.id)
        if record is not None and record.status == envelope.EXPIRED:
            record = None  # never applied; it may be sent again with a later deadline
        decision = command_book.admit(
            command, record, self._now(), lambda: self._refusal(command), lambda: self._claim(command)
        )
        if decision.what is Do.CARRY_OUT:
            self._replies.answer(command.id, CommandRecord(envelope.ACCEPTED), received.entry)
            self._enter(command)
        elif decision.outcome is None:
            self._extend(command)
            received.drop()  # the outcome is sent when the command ends
        elif record is None:  # a new command, which is counted
            self._turn_away(received, decision.outcome)
        else:
            self._replies.answer(command.id, decision.outcome, received.entry)

    def _turn_away(self, received: ReceivedCommand, outcome: CommandRecord) -> None:
        command = received.command
        self._replies.answer(command.id, outcome, received.entry)
        # The sender chooses the action's name; only known actions get a series.
        action = command.action if command.action in self._executors else ""
        self._context.counters.commands.add((action, outcome.status))

    def _refusal(self, command: envelope.Command) -> CommandDecision | None:
        if command.action not in self._executors:
            near = did_you_mean(command.action, self._executors)
            return turn_away(envelope.UNSUPPORTED, f"this agent does not know {command.action}{near}")
        if (refusal := self._context.policy.refusal(command)) is not None:
            log.warning("command refused by the policy", extra=command_fields(command, reason=refusal))
            return turn_away(envelope.REJECTED, refusal)
        # An undo is accepted even during a name conflict, because the command was carried out here.
        if command.undo_of is None and (other := self._replies.name_conflict()) is not None:
            node = self._context.node
            reason = f"two agents use the name {node}, the other is {other}; stop one, or rename it"
            return turn_away(envelope.FAILED, reason)
        if len(self._deadlines) >= command_book.MOST_WAITING:
            return turn_away(envelope.FAILED, f"{command_book.MOST_WAITING} commands are already waiting on this node")
        return None

    def _claim(self, command: envelope.Command) -> None:
        if not self._only_reads(command):
            self._journal.claim(command, self._now())

    def _only_reads(self, command: envelope.Command) -> bool:
        return isinstance(self._executors.get(command.action), OnlyReads)

    def _enter(self, command: envelope.Command, resumed: bool = False) -> None:
        with self._lock:
            self._deadlines[command.id] = command.expires_at
            self._unwritten.pop(command.id, None)  # a repeat of a command that had expired: it is open again
        executor = self._executors.get(command.action)
        # An older agent may have accepted an action that is unknown here. Any queue will do: `carry_out` answers it.
        name = executor.queue if executor is not None else next(iter(self._queues))
        accepted = AcceptedCommand(command, resumed, self._stopping.is_set, lambda: command.id in self._withdrawn)
        self._queues[name].put(accepted)

    def _extend(self, command: envelope.Command) -> None:
        with self._lock:
            if command.id in self._deadlines:
                self._deadlines[command.id] = max(self._deadlines[command.id], command.expires_at)

    def _withdraw(self, command_id: str) -> None:
        with self._lock:
            if command_id in self._deadlines:
                self._withdrawn.add(command_id)

    # --- called by the worker queues' threads ---

    def carry_out(self, accepted: AcceptedCommand) -> None:
        """Execute a command. If the agent stops in between, it stays open in the journal."""
        try:
            outcome = self._outcome(accepted)
        except CommandInterrupted as interrupted:
            fields = command_fields(accepted.command, reason=str(interrupted))
            log.info("command will resume at the next start", extra=fields)
            return
        self._report_outcome(accepted.command, outcome)

    def _outcome(self, accepted: AcceptedCommand) -> CommandRecord:
        command = accepted.command
        executor = self._executors.get(command.action)
        if executor is None:  # accepted by another version of the agent
            return ended(envelope.UNSUPPORTED, f"this agent does not know {command.action}")
        with self._lock:
            deadline = self._deadlines[command.id]
        if self._now() >= deadline:
            is_reverted = self._revert_partial_effects(executor, accepted)
            return ended(envelope.EXPIRED, _TOO_LATE) if is_reverted else _doubtful(envelope.EXPIRED, _PERHAPS_BEGUN)
        refusal = self._context.policy.refusal(command)
        if refusal is not None:
            is_reverted = self._revert_partial_effects(executor, accepted)
            rejected = envelope.REJECTED
            return ended(rejected, refusal) if is_reverted else _doubtful(rejected, f"{refusal}; {_BEGUN}")
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
            log.error("command not executed: journal unavailable", extra=command_fields(command, reason=str(error)))
            return ended(envelope.FAILED, str(error))
        except Exception as error:  # boundary: an executor's bug fails its command, not its queue
            log.exception("command failed unexpectedly", extra=command_fields(command))
            self._context.counters.loop_errors.add(executor.queue)
            if self._only_reads(command):
                return ended(envelope.FAILED, described(error))
            return _doubtful(envelope.FAILED, f"{described(error)}; it may have had an effect")

    def _revert_partial_effects(self, executor: Executor, accepted: AcceptedCommand) -> bool:
        """Return whether no effect is left."""
        if not accepted.resumed:
            return True
        if not isinstance(executor, SupportsAbandon):
            return False
        try:
            executor.abandon(accepted)
        except Exception:  # the command is still answered; an operator must check its remains
            log.exception("cannot undo partial effects of command", extra=command_fields(accepted.command))
            self._context.counters.loop_errors.add(executor.queue)
            return False
        return True

    def _is_undoable(self, executor: Executor, command_id: str) -> bool:
        """Return whether the command to be undone may have had an effect.

        A command that never arrived is revoked, so that it cannot act later. Raises CommandFailed while it is running,
        or if the journal may have been lost; JournalUnavailable.
        """
        record = self._known(command_id)
        if record is None and isinstance(executor, RemembersEffects) and executor.remembers(command_id):
            return True
        since = self._journal.whole_since()
        # A failed command may have changed something before it failed.
        effect = command_book.effect_of(record, lambda: undoing.is_covered(command_id, since), CommandEffect.POSSIBLE)
        if record is not None and record.output.get("may_be_done"):
            effect = CommandEffect.POSSIBLE
        if effect is CommandEffect.OPEN:
            raise CommandFailed("the command to undo is still running; try again")
        if effect is CommandEffect.UNKNOWN:
            raise CommandFailed(undoing.unknown_command(f"the agent on node {self._context.node!r}", since))
        if record is None or record.status == envelope.EXPIRED:
            self._journal.revoke(command_id, self._now())
        return effect is CommandEffect.POSSIBLE

    def _known(self, command_id: str) -> CommandRecord | None:
        record = self._journal.look_up(command_id)
        if record is not None and record.is_final:
            return record
        with self._lock:
            if record is None and command_id in self._deadlines:
                return CommandRecord(envelope.ACCEPTED)  # not journaled, because it only reads
            return self._unwritten.get(command_id, record)

    def _report_outcome(self, command: envelope.Command, outcome: CommandRecord) -> None:
        outcome = replace(outcome, output=plain(outcome.output), at=self._now())
        with self._lock:
            # Before the journal is written: after that an expired command can be accepted again, and its new deadline
            # must stay.
            self._deadlines.pop(command.id, None)
            self._withdrawn.discard(command.id)
        if self._only_reads(command):
            self._replies.send_reading(command.id, outcome)
            self._context.counters.commands.add((command.action, outcome.status))
            return
        try:
            self._journal.record_outcome(command.id, outcome)
        except JournalUnavailable as error:
            fields = command_fields(command, status=outcome.status, reason=str(error))
            log.error("cannot journal command outcome", extra=fields)
            with self._lock:
                self._unwritten[command.id] = outcome
        self._replies.send_outcome(command.id, outcome)
        self._context.counters.commands.add((command.action, outcome.status))
        log.info("command answered", extra=command_fields(command, status=outcome.status))


def _doubtful(status: str, reason: str) -> CommandRecord:
    # The server reads `may_be_done`: this status does not exclude an effect.
    return CommandRecord(status, {"reason": reason, "may_be_done": True})
