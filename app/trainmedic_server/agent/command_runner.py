"""Carries orders out: asks the hand, and concludes with exactly one outcome, in the journal before anywhere else.

Called in the threads of the lanes. What has been taken and is not concluded is on the `CommandRunner`'s board,
so that a repeat of its command finds it.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping
from datetime import datetime
from typing import Any

from trainmedic.wire import envelope
from trainmedic.wire.output import plain
from trainmedic_server.agent.counters import AgentCounters
from trainmedic_server.agent.executors import NOTHING_TO_UNDO, AcceptedCommand, Executor, SupportsAbandon
from trainmedic_server.agent.journal import Journal, JournalEntry
from trainmedic_server.agent.policy import Policy
from trainmedic_server.agent.replies import AgentReplies
from trainmedic_server.agent.worker_queues import Pending
from trainmedic_server.errors import (
    CommandFailed,
    CommandInterrupted,
    CommandNotExecuted,
    CommandRejected,
    CommandUnsupported,
    JournalUnavailable,
)

log = logging.getLogger(__name__)

_STATUS: Mapping[type[CommandNotExecuted], str] = {
    CommandRejected: envelope.REJECTED,
    CommandUnsupported: envelope.UNSUPPORTED,
    CommandFailed: envelope.FAILED,
}
_MAY_HAVE_ACTED = (envelope.APPLIED, envelope.FAILED)


class CommandRunner:
    """What happens to an order in its lane."""

    def __init__(
        self,
        hands: Mapping[str, Executor],
        policy: Policy,
        journal: Journal,
        replies: AgentReplies,
        stopping: threading.Event,
        tally: AgentCounters,
        now: Callable[[], datetime],
    ) -> None:
        self._hands = hands
        self._policy = policy
        self._journal = journal
        self._replies = replies
        self._stopping = stopping
        self._tally = tally
        self._now = now
        self._lock = threading.Lock()
        self._board: dict[str, Pending] = {}
        # Concluded while the journal could not be written: there they are still open, and resumed at the next start.
        self._unwritten: dict[str, JournalEntry] = {}

    def enter(self, pending: Pending) -> None:
        """It has been taken, and goes to its lane."""
        with self._lock:
            self._board[pending.command.id] = pending

    def waiting(self) -> int:
        """How many have been taken and are not concluded."""
        with self._lock:
            return len(self._board)

    def extend(self, command_id: str, expires_at: datetime) -> JournalEntry | None:
        """The command of an open order has come again: it has as much time as that gives it. Returns its
        outcome where it has one that the journal does not know."""
        with self._lock:
            pending = self._board.get(command_id)
            if pending is not None:
                pending.expires_at = max(pending.expires_at, expires_at)
            return self._unwritten.get(command_id)

    def carry_out(self, pending: Pending) -> None:
        """To its end, unless the agent stops in the middle: then it stays open in the journal."""
        try:
            status, output = self._outcome(pending)
        except CommandInterrupted as interrupted:
            log.info("%s %s goes on at the next start: %s", pending.command.action, pending.command.id, interrupted)
            return
        self._conclude(pending, status, output)

    def _outcome(self, pending: Pending) -> tuple[str, Mapping[str, Any]]:
        command = pending.command
        hand = self._hands.get(command.action)
        if hand is None:  # taken by another version of the agent
            return envelope.UNSUPPORTED, {"reason": f"this agent does not know {command.action}"}
        order = AcceptedCommand(command, pending.resumed, self._stopping.is_set)
        if self._now() >= pending.expires_at:
            self._abandon(hand, order)
            return envelope.EXPIRED, {"reason": "the agent did not come to it in time"}
        refusal = self._policy.refusal(command)
        if refusal is not None:
            self._abandon(hand, order)
            return envelope.REJECTED, {"reason": refusal}
        try:
            if command.undo_of is not None and not self._is_undoable(command.undo_of):
                return envelope.APPLIED, NOTHING_TO_UNDO
            return envelope.APPLIED, hand.perform(order)
        except CommandInterrupted:
            raise
        except CommandNotExecuted as refused:
            status = next((_STATUS[kind] for kind in _STATUS if isinstance(refused, kind)), envelope.FAILED)
            return status, {**refused.output, "reason": str(refused)}
        except JournalUnavailable as error:
            log.error("%s %s was not carried out: %s", command.action, command.id, error)
            return envelope.FAILED, {"reason": str(error)}
        except Exception as error:  # a hand's slip is answered like any failure, and does not end its lane
            log.exception("%s %s failed unexpectedly", command.action, command.id)
            self._tally.fault(hand.queue)
            return envelope.FAILED, {"reason": f"{type(error).__name__}: {error}"}

    def _abandon(self, hand: Executor, order: AcceptedCommand) -> None:
        """Nothing of an order stays in force that an earlier process may have begun and this one must not finish."""
        if not order.resumed or not isinstance(hand, SupportsAbandon):
            return
        try:
            hand.abandon(order)
        except Exception:  # the reply says what is true of the order; what is left of it is for a person
            log.exception("what was begun of %s %s could not be taken back", order.command.action, order.command.id)
            self._tally.fault(hand.queue)

    def _is_undoable(self, command_id: str) -> bool:
        """Whether the command that is to be taken back may have had an effect; it bars the way of one that never
        came. Raises CommandFailed where that is not known yet, JournalUnavailable."""
        known = self._journal.look_up(command_id)
        if known is not None and known.is_open:
            with self._lock:
                known = self._unwritten.get(command_id)
            if known is None:
                raise CommandFailed("the command that it takes back is still being carried out; try again")
        if known is None or known.status == envelope.EXPIRED:
            self._journal.revoke(command_id, self._now())
            return False
        return known.status in _MAY_HAVE_ACTED

    def _conclude(self, pending: Pending, status: str, output: Mapping[str, Any]) -> None:
        command = pending.command
        concluded = JournalEntry(command.id, status, self._now(), plain(output))
        try:
            self._journal.conclude(concluded)
        except JournalUnavailable as error:
            log.error("the outcome of %s %s (%s) is not in the journal: %s", command.action, command.id, status, error)
            with self._lock:
                self._unwritten[command.id] = concluded
        with self._lock:
            self._board.pop(command.id, None)
        self._replies.conclude(concluded)
        self._tally.command(command.action, status)
        log.info("%s %s: %s", command.action, command.id, status, extra={"run_id": command.run_id})
