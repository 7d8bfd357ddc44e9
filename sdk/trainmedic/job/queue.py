"""A job's command queue on rank 0.

It answers commands that need no loop: invalid, expired, interrupted and repeated ones. The undo of a possibly forgotten
command is ``failed`` and stays pending.
"""

from __future__ import annotations

import json
import logging
from collections import deque
from dataclasses import replace
from datetime import datetime
from typing import Any, Callable, Iterable, Mapping, Sequence

import redis

from trainmedic.job.command import JobCommand, OutcomeCallback
from trainmedic.job.handlers import UNSUPPORTED, HandlerRegistry
from trainmedic.job.parameters import Rollback, parse
from trainmedic.job.status_file import waited_before
from trainmedic.wire import command_book, envelope, undoing
from trainmedic.wire.command_book import CommandDecision, CommandEffect, CommandRecord, Do, RankOutcome, ended
from trainmedic.wire.command_memory import CommandMemory
from trainmedic.wire.output import fitting
from trainmedic.wire.receiver import ReceivedCommand
from trainmedic.wire.writer import OutgoingReplies

log = logging.getLogger("trainmedic")

TOO_LATE = "the training loop did not come to it in time"
_INTERRUPTED = "interrupted: the job's process ended while it had the command"
_RECOVERED = "the job's process ended before it could answer; what it has recorded says that the command was applied"
_LONGEST_LOGGED = 500  # characters of parameters, and of an output


class CommandQueue:
    """The receiver's thread calls `receive` and `refuse`; others take commands out and close them."""

    def __init__(
        self,
        job: str,
        host: str,
        memory: CommandMemory,
        handlers: HandlerRegistry,
        put: Callable[[OutgoingReplies], object],
        on_outcome: OutcomeCallback,
    ) -> None:
        self._job = job
        self._memory = memory
        self._handlers = handlers
        self._put = put
        self._on_outcome = on_outcome
        self.arrived: deque[JobCommand] = deque()
        self.waiting: dict[str, JobCommand] = {}  # not answered, arrived ones included
        self.on_arrival: Callable[[], None] = lambda: None
        # Set by the client and the coordinator with several ranks.
        self.ranks: Sequence[int] = (0,)
        self.hosts: Mapping[int, str] = {0: host}
        self.interrupted: dict[str, ReceivedCommand] = {}  # not answered by an earlier process
        self._closed_because: str | None = None
        self._waited_before = waited_before()  # IDs of rollbacks that waited when the last attempt ended

    # --- receiver's thread --------------------------------------------------------------------------------

    def receive(self, received: ReceivedCommand) -> None:
        command, client, memory = received.command, received.client, self._memory
        decision = command_book.admit(
            command,
            memory.look_up(client, command.id),
            envelope.utc_now(),
            lambda: self._reason_to_refuse(received),
            lambda: memory.claim(client, command.id),
        )
        if decision.what is Do.CARRY_OUT:
            self.enter(command, received.entry)
            self._put(OutgoingReplies((self._reply(command.id, 0, (envelope.ACCEPTED, {})),)))
        elif decision.outcome is not None:
            self._reply_of_all(command.id, decision.outcome, received.entry, decision.what is Do.CLOSE)
        elif decision.what is Do.TAKE_OVER:
            self._take_over_or_note_interrupted(received)
        # A repeat (`Do.WAIT`) leaves only the waiting command's own entry on the stream.
        elif decision.what is Do.DROP or not self._extend(received):
            received.drop()

    def refuse(self, received: ReceivedCommand, reason: str) -> None:
        """Reject a foreign or wrongly signed command, without recording its possibly forged ID."""
        reply = self._reply(received.command.id, 0, (envelope.REJECTED, {"reason": reason}))
        self._put(OutgoingReplies((replace(reply, is_to_genuine=False),), received.entry))

    def note_unreadable(self) -> None:
        """Do nothing: unreadable messages get no reply."""

    def connected(self, client: redis.Redis) -> None:
        self._memory.mark_whole(client)

    def enter(self, sent: envelope.Command, entry: bytes) -> None:
        command = JobCommand(sent, parse(sent.action, sent.params), entry, self._on_outcome)
        self.waiting[command.id] = command
        if self._handlers.capabilities.get(command.action) == UNSUPPORTED:
            command.unsupported(self._handlers.refusal_reason(command.action) or "")
        elif self._closed_because is not None:
            command.failed(self._closed_because)
        else:
            self.arrived.append(command)
            self.on_arrival()

    def _reason_to_refuse(self, received: ReceivedCommand) -> CommandDecision | None:
        command = received.command
        if len(self.waiting) >= command_book.MOST_WAITING:
            return command_book.turn_away(envelope.REJECTED, "too many commands wait already")
        try:
            parse(command.action, command.params)
        except ValueError as error:
            return CommandDecision(Do.CLOSE, ended(envelope.REJECTED, str(error)))
        wrong = self._handlers.wrong_parameters(command.action, command.params)
        if wrong is not None:
            return CommandDecision(Do.CLOSE, ended(envelope.REJECTED, f"{command.action}: {wrong}"))
        if command.undo_of is not None and self._was_never_applied(received.client, command.action, command.undo_of):
            nothing = undoing.nothing_to_undo(undoing.NEVER_APPLIED)
            return CommandDecision(Do.CLOSE, CommandRecord(envelope.APPLIED, nothing))
        return None

    def _extend(self, received: ReceivedCommand) -> bool:
        """Extend a waiting command's time by its repeat; return whether it waits by this entry."""
        command = received.command
        waiting = self.waiting.get(command.id)
        if waiting is None:
            return False
        waiting.expires_at = max(waiting.expires_at, command.expires_at)
        self.reply_so_far(waiting, list(waiting.outcomes))
        return waiting.entry == received.entry

    def _take_over_or_note_interrupted(self, received: ReceivedCommand) -> None:
        # This attempt carries out a rollback that waited when the last one ended.
        command = received.command
        was_waiting = command.id in self._waited_before
        is_rollback = was_waiting and isinstance(parse(command.action, command.params), Rollback)
        if not is_rollback or envelope.utc_now() >= command.expires_at:
            self.interrupted[command.id] = received
            return
        self._memory.take_over(received.client, command.id)
        self.enter(command, received.entry)

    def _was_never_applied(self, client: redis.Redis, action: str, command_id: str) -> bool:
        # If the command to revert has not come yet, `revoke` blocks it from now on.
        if self._handlers.is_in_force(action, command_id):
            return False  # regardless of the memory: its records in Redis can be deleted
        record = self._memory.look_up(client, command_id)
        effect = command_book.effect_of(
            record, lambda: self._memory.covers(client, command_id), _effect_of_failed(record)
        )
        if effect is CommandEffect.NONE and record is None:
            self._memory.revoke(client, command_id)
        return effect is CommandEffect.NONE

    # --- turns --------------------------------------------------------------------------------------------

    @property
    def has_work(self) -> bool:
        return bool(self.arrived or self.interrupted)

    def take_due(self, now: datetime, too_late: str = TOO_LATE) -> list[JobCommand]:
        """Return commands to carry out now; answer those that expired or have nothing to undo."""
        self._answer_interrupted(now)
        due: list[JobCommand] = []
        held_back: list[JobCommand] = []
        for _ in range(len(self.arrived)):
            command = self.arrived.popleft()
            if now >= command.expires_at:
                self.expire(command, too_late)
            elif command.undo_of in self.waiting and command.undo_of != command.id:
                held_back.append(command)  # until it is known whether there is something to undo
            elif command.undo_of is None or self._needs_undo_or_answer(command, command.undo_of):
                due.append(command)
        self.arrived.extendleft(reversed(held_back))
        return due

    def _answer_interrupted(self, now: datetime) -> None:
        """Answer commands that an earlier process did not; a recorded change was applied."""
        for command_id, received in list(self.interrupted.items()):
            command = received.command
            was_applied = self._handlers.was_applied(command.action, command_id)
            if was_applied is None and now < command.expires_at and self._closed_because is None:
                continue
            del self.interrupted[command_id]
            applied = CommandRecord(envelope.APPLIED, {"recovered": _RECOVERED})
            record = applied if was_applied else ended(envelope.FAILED, _INTERRUPTED)
            self._log_change(command, record.status, record.output)
            self._reply_of_all(command_id, record, received.entry, remember=True)

    def fail_all(self, reason: str) -> None:
        self._closed_because = reason
        self._answer_interrupted(envelope.utc_now())
        while self.arrived:
            self.arrived.popleft().failed(reason)

    def _needs_undo_or_answer(self, undo: JobCommand, command_id: str) -> bool:
        """Return whether there may be something to revert. If not, or if unknown, answer the undo."""
        # The handler's record decides first: a change can end with its process, or outlive the memory.
        is_in_force = self._handlers.is_in_force(undo.action, command_id)
        if is_in_force is not None:
            if not is_in_force:
                undo.applied(undoing.nothing_to_undo(undoing.NOT_IN_FORCE))
            return is_in_force
        record = self._memory.recall(command_id)
        effect = command_book.effect_of(record, lambda: self._memory.covers_here(command_id), _effect_of_failed(record))
        if effect is CommandEffect.NONE:
            undo.applied(undoing.nothing_to_undo(undoing.NEVER_APPLIED))
        elif effect is not CommandEffect.POSSIBLE:
            undo.failed(undoing.unknown_command(f"job {self._job!r}", self._memory.whole_since))
        return effect is CommandEffect.POSSIBLE

    # --- outcomes -----------------------------------------------------------------------------------------

    def expire(self, command: JobCommand, reason: str) -> None:
        command.status = envelope.EXPIRED
        self._memory.forget(command.id)
        self.waiting.pop(command.id, None)
        self._reply_of_all(command.id, ended(envelope.EXPIRED, reason), command.entry, forget=True)

    def close(self, command: JobCommand, status: str, output: Mapping[str, Any]) -> None:
        self._log_change(command.sent, status, output)
        self._reply_of_all(command.id, CommandRecord(status, fitting(output)), command.entry, remember=True)
        self.waiting.pop(command.id, None)

    def close_ranks(self, command: JobCommand, replied: Iterable[int]) -> None:
        """Record the ranks' outcomes, and reply for all but `replied`."""
        outcomes = dict(command.outcomes)
        applied = [outcome for outcome in outcomes.values() if outcome[0] == envelope.APPLIED]
        status, output = applied[0] if applied else outcomes[min(outcomes)]
        self._log_change(command.sent, status, output)
        record = CommandRecord(status, output, outcomes)
        self._memory.remember(command.id, record)
        self.waiting.pop(command.id, None)
        # Without a reply the writer would get nothing, and the entry would stay on the stream.
        ranks = sorted(outcomes.keys() - set(replied)) or [0]
        replies = tuple(self._reply(command.id, rank, record.of_rank(rank), len(outcomes)) for rank in ranks)
        self._put(OutgoingReplies(replies, command.entry, record))

    def _log_change(self, sent: envelope.Command, status: str, output: Mapping[str, Any]) -> None:
        # Only numbers: log rules could take an alert's text for the job's own.
        if status != envelope.APPLIED or output.get(undoing.NOTHING):
            return
        what = "reverted" if sent.undo_of is not None else "applied"
        given, made = (json.dumps(_numbers(values))[:_LONGEST_LOGGED] for values in (sent.params, output))
        log.warning(
            "%s: %s %s %s: %s, run %s of %s", self._job, what, sent.action, given, made, sent.run_id, sent.playbook
        )

    def reply_so_far(self, command: JobCommand, ranks: Iterable[int]) -> None:
        count = len({*self.ranks, *command.outcomes})
        replies = tuple(self._reply(command.id, rank, command.outcomes[rank], count) for rank in sorted(ranks))
        if replies:
            self._put(OutgoingReplies(replies))

    def _reply_of_all(
        self, command_id: str, record: CommandRecord, entry: bytes | None, remember: bool = False, forget: bool = False
    ) -> None:
        if remember:
            self._memory.remember(command_id, record)
        ranks = sorted({*self.ranks, *record.ranks})
        replies = tuple(self._reply(command_id, rank, record.of_rank(rank), len(ranks)) for rank in ranks)
        self._put(OutgoingReplies(replies, entry, record if remember else None, forget))

    def _reply(self, command_id: str, rank: int, outcome: RankOutcome, ranks: int | None = None) -> envelope.Reply:
        status, output = outcome
        host = f"@{self.hosts[rank]}" if rank in self.hosts else ""
        return envelope.Reply(command_id, f"{self._job}/{rank}{host}", status, rank, output, job=self._job, ranks=ranks)


def _numbers(values: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in values.items() if isinstance(value, (int, float))}


def _effect_of_failed(record: CommandRecord | None) -> CommandEffect:
    was_interrupted = record is not None and record.output.get("reason") == _INTERRUPTED
    return CommandEffect.UNKNOWN if was_interrupted else CommandEffect.NONE
