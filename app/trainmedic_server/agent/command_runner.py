"""Runs commands: calls the executor, and records exactly one outcome, in the journal before anywhere else.

The threads of the worker queues call it. It also knows which commands have been accepted and are unfinished, so that a
repeat of one finds it.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Mapping
from datetime import datetime
from typing import Any

from trainmedic.wire import envelope, undoing
from trainmedic.wire.output import plain
from trainmedic_server.agent.context import AgentContext
from trainmedic_server.agent.executors import (
    AcceptedCommand,
    Executor,
    RemembersEffects,
    SupportsAbandon,
    SupportsWithdrawal,
)
from trainmedic_server.agent.journal import JournalEntry
from trainmedic_server.agent.own_log import command_fields
from trainmedic_server.agent.replies import AgentReplies
from trainmedic_server.agent_errors import (
    CommandFailed,
    CommandInterrupted,
    CommandNotExecuted,
    CommandWithdrawn,
    JournalUnavailable,
)

log = logging.getLogger(__name__)

_MAY_HAVE_ACTED = (envelope.APPLIED, envelope.FAILED)


class CommandRunner:
    """What happens to a command in its worker queue."""

    def __init__(
        self, context: AgentContext, executors: Mapping[str, Executor], replies: AgentReplies, stopping: threading.Event
    ) -> None:
        self._context = context
        self._executors = executors
        self._replies = replies
        self._stopping = stopping
        self._lock = threading.Lock()
        self._deadlines: dict[str, datetime] = {}  # of the unfinished commands; a repeat can put one off
        self._withdrawn: set[str] = set()
        """Unfinished commands for whose outcome no caller waits."""
        # Outcomes that the journal could not take: there the commands are still open, and resumed at the next start.
        self._unwritten: dict[str, JournalEntry] = {}

    def accept(self, command: envelope.Command, resumed: bool = False) -> AcceptedCommand:
        """Count a command of the journal as unfinished, until `carry_out` has recorded its outcome."""
        with self._lock:
            self._deadlines[command.id] = command.expires_at
        return AcceptedCommand(command, resumed, self._stopping.is_set, lambda: command.id in self._withdrawn)

    def withdraw(self, command_id: str) -> None:
        """Note that no caller waits for this command's outcome. Commands that are finished or unknown are ignored."""
        with self._lock:
            if command_id in self._deadlines:
                self._withdrawn.add(command_id)

    def unfinished(self) -> int:
        """How many accepted commands have no outcome yet."""
        with self._lock:
            return len(self._deadlines)

    def extend(self, command_id: str, expires_at: datetime) -> JournalEntry | None:
        """An open command has come again: it now has as much time as the repeat gives it.

        Returns its outcome where there is one that the journal does not know.
        """
        with self._lock:
            if command_id in self._deadlines:
                self._deadlines[command_id] = max(self._deadlines[command_id], expires_at)
            return self._unwritten.get(command_id)

    def carry_out(self, accepted: AcceptedCommand) -> None:
        """Run a command to its end, unless the agent stops in the middle: then it stays open in the journal."""
        try:
            status, output = self._outcome(accepted)
        except CommandInterrupted as interrupted:
            fields = command_fields(accepted.command, reason=str(interrupted))
            log.info("a command goes on at the next start", extra=fields)
            return
        self._report_outcome(accepted.command, status, output)

    def _outcome(self, accepted: AcceptedCommand) -> tuple[str, Mapping[str, Any]]:
        """Return the reply's status and output. Raises CommandInterrupted."""
        command = accepted.command
        executor = self._executors.get(command.action)
        if executor is None:  # another version of the agent has accepted it
            return envelope.UNSUPPORTED, {"reason": f"this agent does not know {command.action}"}
        with self._lock:
            deadline = self._deadlines[command.id]
        if self._context.now() >= deadline:
            self._abandon(executor, accepted)
            return envelope.EXPIRED, {"reason": "the agent did not come to it in time"}
        refusal = self._context.policy.refusal(command)
        if refusal is not None:
            self._abandon(executor, accepted)
            return envelope.REJECTED, {"reason": refusal}
        try:
            if isinstance(executor, SupportsWithdrawal) and accepted.is_withdrawn():
                raise CommandWithdrawn("the server withdrew it")
            if command.undo_of is not None and not self._is_undoable(executor, command.undo_of):
                return envelope.APPLIED, undoing.nothing_to_undo(undoing.NEVER_APPLIED)
            return envelope.APPLIED, executor.perform(accepted)
        except CommandInterrupted:
            raise
        except CommandNotExecuted as error:
            return error.status, {**error.output, "reason": str(error)}
        except JournalUnavailable as error:
            log.error("a command was not carried out", extra=command_fields(command, reason=str(error)))
            return envelope.FAILED, {"reason": str(error)}
        except Exception as error:  # an executor's own error is answered like any failure, and does not end its queue
            log.exception("a command failed unexpectedly", extra=command_fields(command))
            self._context.counters.loop_error(executor.queue)
            return envelope.FAILED, {"reason": f"{type(error).__name__}: {error}"}

    def _abandon(self, executor: Executor, accepted: AcceptedCommand) -> None:
        """Undo what an earlier process may have begun of a command that this one must not finish."""
        if not accepted.resumed or not isinstance(executor, SupportsAbandon):
            return
        try:
            executor.abandon(accepted)
        except Exception:  # the command is answered all the same; a person must deal with what is left of it
            log.exception("what was begun of a command could not be taken back", extra=command_fields(accepted.command))
            self._context.counters.loop_error(executor.queue)

    def _is_undoable(self, executor: Executor, command_id: str) -> bool:
        """Whether the command that is to be taken back may have had an effect.

        Where it never came, it is barred from now on: it may still be on its way, and must not act after its undo.
        Raises CommandFailed while it is being carried out, and where the journal may have been lost since it came;
        JournalUnavailable.
        """
        entry = self._context.journal.look_up(command_id)
        if entry is None and isinstance(executor, RemembersEffects) and executor.remembers(command_id):
            return True
        if entry is not None and entry.is_open:
            with self._lock:
                entry = self._unwritten.get(command_id)
            if entry is None:
                raise CommandFailed("the command that it takes back is still being carried out; try again")
        since = self._context.journal.whole_since()
        if entry is None and not undoing.is_covered(command_id, since):
            raise CommandFailed(undoing.unknown_command(f"the agent on node {self._context.node!r}", since))
        if entry is None or entry.status == envelope.EXPIRED:
            self._context.journal.revoke(command_id, self._context.now())
            return False
        return entry.status in _MAY_HAVE_ACTED

    def _report_outcome(self, command: envelope.Command, status: str, output: Mapping[str, Any]) -> None:
        entry = JournalEntry(command.id, status, self._context.now(), plain(output))
        with self._lock:
            # Before the journal is written: once it has an expired command, the same one can be accepted again, and its
            # new deadline must not be removed here.
            self._deadlines.pop(command.id, None)
            self._withdrawn.discard(command.id)
        try:
            self._context.journal.record_outcome(entry)
        except JournalUnavailable as error:
            fields = command_fields(command, status=status, reason=str(error))
            log.error("the outcome of a command is not in the journal", extra=fields)
            with self._lock:
                self._unwritten[command.id] = entry
        self._replies.send_outcome(entry)
        self._context.counters.command(command.action, status)
        log.info("a command was answered", extra=command_fields(command, status=status))
