"""Rank 0's role: assign due commands to sync points, collect outcomes, and delete read keys."""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, Mapping

from trainmedic.job.command import JobCommand
from trainmedic.job.group import ranks_named
from trainmedic.job.queue import CommandQueue
from trainmedic.ranks.decisions import AgreedOutcome, SyncDecision, SyncInterval, agree
from trainmedic.ranks.membership import Membership
from trainmedic.ranks.rank_state import RankLost, RankStatus, TrainingPosition, outcome_key
from trainmedic.ranks.shared_store import ExpiredKeys, SharedStore
from trainmedic.wire import envelope
from trainmedic.wire.backoff import Backoff
from trainmedic.wire.envelope import utc_now
from trainmedic.wire.output import fitting

log = logging.getLogger("trainmedic")

TOO_LATE = "the ranks did not come to it in time; with several ranks a step that hangs is not interrupted"
_TAKE_INTERVAL = 2.0  # seconds between two looks at the queue, in addition to those at decisions
_FIRST_COLLECT, _LONGEST_COLLECT = 0.005, 0.5  # seconds between two reads of a command's outcomes
_PARTIAL_AFTER = 0.25  # seconds until the outcomes of some ranks are sent
# In one decision.
_MOST_COMMANDS = 16
_MOST_BYTES = 512 * 1024
_OVERDUE = timedelta(seconds=30)  # after a command's expiry, until missing outcomes count as failed


@dataclass
class RunningCommand:
    command: JobCommand
    replied: set[int] = field(default_factory=set)  # ranks whose outcome was sent
    count: int = 0  # outcomes in the store at the last read
    since: float = field(default_factory=time.monotonic)
    due: float = 0.0  # time of the next read
    backoff: Backoff = field(default_factory=lambda: Backoff(_FIRST_COLLECT, _LONGEST_COLLECT, factor=1.5))


class Coordinator:
    """Rank 0's counterpart of `Participant`, called by the synchronizer's thread."""

    lead = 0.2  # seconds from a decision to its sync point

    def __init__(self, job: str, queue: CommandQueue, base: SharedStore, interval: SyncInterval) -> None:
        self._job = job
        self._queue = queue
        self._base = base
        self._interval = interval
        self._store = base.under(envelope.new_id())
        self.membership = Membership(base, self._store)
        self._expired_keys = ExpiredKeys(self._store)
        self._take_due = 0.0  # time of the next look at the queue
        # Due commands that were not carried out yet.
        self._pending: list[JobCommand] = []
        # IDs of those in a decision. They cannot expire until the ranks agree.
        self._decided: set[str] = set()
        # Last sync point that a rank missed, and a sentence about these ranks.
        self._missed_at = -1
        self._missing_ranks = ""
        self._running: dict[tuple[int, int], RunningCommand] = {}  # by `JobCommand.sync_key`
        self._is_leaving = False

    def join(self) -> SharedStore | None:
        self._base.set("current", self._store.token)
        return self._store

    def has_to_rejoin(self, position: TrainingPosition) -> bool:
        if self._base.get("current") != self._store.token:
            raise RankLost("another start of this job has taken over")
        return False

    def work(self, now: float, own: RankStatus) -> float:  # returns the seconds until the next call
        self.membership.own = own
        delay = self.membership.work(now)
        if self.membership.hosts:
            self._queue.hosts = self.membership.hosts
        if now >= self._take_due:
            self._take_due = now + _TAKE_INTERVAL
            self._take_pending()
        delay = min(delay, self._take_due - now, self._collect(now))
        self._expired_keys.delete_due(self.membership.passed_by_all())
        return delay

    def is_silent(self, rank: int, now: float) -> bool:
        return self.membership.is_silent(rank, now)

    def decide(self, position: TrainingPosition, waited: float | None) -> SyncDecision:
        """Make the next sync point's decision, unless another rank did while rank 0 was late."""
        number = position.number + 1
        commands = self._next_commands()
        key = f"decision/{number}"
        mine = SyncDecision(number, 0, self._interval.next_span(), tuple(command.sent for command in commands))
        decision = SyncDecision.read(number, self._store.set_if_absent(key, mine.fields()))
        if decision.by == 0:
            self._decided = {command.id for command in commands}
        self._expired_keys.add(number, key)
        return decision

    def agree(self, decision: SyncDecision, statements: dict[int, Any], missing: list[int]) -> Any:
        now = utc_now()
        in_time = {command.id for command in self._pending if now < command.expires_at}
        expired = {sent.id for sent in decision.commands} - in_time
        absent = f"{ranks_named(missing)} did not come to sync point {decision.number}" if missing else ""
        return agree(decision, statements, absent, expired, TOO_LATE).fields()

    def take_outcome(self, decision: SyncDecision, outcome: AgreedOutcome) -> None:
        """Start or refuse the decision's commands."""
        if outcome.missing:
            self._missed_at = decision.number
            self._missing_ranks = outcome.missing
            log.warning("%s: no command was carried out: %s; trying again", self._job, outcome.missing)
        self._decided = set()
        by_id = {command.id: command for command in self._pending}
        for index, sent in enumerate(decision.commands):
            command = by_id.get(sent.id)
            if command is not None and sent.id in outcome.go:
                self._running[decision.number, index] = RunningCommand(command)
                self._pending.remove(command)
            elif command is not None and sent.id in outcome.refused:
                self._pending.remove(command)
                self._refuse(command, *outcome.refused[sent.id])

    def running(self, sync_key: tuple[int, int]) -> JobCommand | None:  # called by the training thread
        running = self._running.get(sync_key)
        return running.command if running is not None else None

    def _next_commands(self) -> list[JobCommand]:
        """Return commands for the next decision; none before all ranks have joined, or while one lags."""
        self._take_pending()
        if not self._pending or self.membership.absent():
            return []
        if any(status.passed < self._missed_at for status in self.membership.others.values()):
            return []
        commands: list[JobCommand] = []
        size = 0
        for command in self._pending[:_MOST_COMMANDS]:
            size += len(command.sent.encode())
            if commands and size > _MOST_BYTES:
                break
            commands.append(command)
        return commands

    def _take_pending(self) -> None:
        now = utc_now()
        self._pending.extend(self._queue.take_due(now, self._lateness()))
        for command in list(self._pending):
            if now >= command.expires_at and command.id not in self._decided:
                self._pending.remove(command)
                self._queue.expire(command, self._lateness())

    def _refuse(self, command: JobCommand, status: str, reason: str) -> None:
        if status == envelope.EXPIRED:
            self._queue.expire(command, reason)
        else:
            command.answer(status, {"reason": reason})

    def _lateness(self) -> str:
        absent = self.membership.absent()
        if absent:
            return f"{ranks_named(absent)} did not join the others in time"
        return f"{TOO_LATE}: {self._missing_ranks}" if self._missing_ranks else TOO_LATE

    def report(self, sync_key: tuple[int, int], status: str, output: Mapping[str, Any]) -> None:
        running = self._running.get(sync_key)
        if running is not None:
            running.command.outcomes[0] = (status, fitting(output))
            running.due = 0.0

    def _collect(self, now: float) -> float:
        delay = _TAKE_INTERVAL
        for sync_key, running in list(self._running.items()):
            if now >= running.due:
                self._collect_outcomes(sync_key, running, now)
                running.due = now + running.backoff.next()
            if sync_key in self._running:
                delay = min(delay, max(running.due - now, 0.0))
        return delay

    def _collect_outcomes(self, sync_key: tuple[int, int], running: RunningCommand, now: float) -> None:
        key, command = outcome_key(sync_key), running.command
        ranks = range(self._store.world_size)
        count = self._store.count_entries(key)
        if count != running.count:
            running.count = count
            awaited = [rank for rank in ranks if rank not in command.outcomes and rank != 0]
            for rank, (status, output) in self._store.entries(key, awaited).items():
                command.outcomes[rank] = (status, fitting(output))
        missing = [rank for rank in ranks if rank not in command.outcomes]
        if missing and self._will_stay_missing(command, missing, now):
            for rank in missing:
                command.outcomes[rank] = (envelope.FAILED, {"reason": "it did not report the command's outcome"})
            missing = []
        if not missing:
            del self._running[sync_key]
            self._missing_ranks = ""
            self._queue.close_ranks(command, running.replied)
            self._expired_keys.add_entries(sync_key[0], key)
        elif 0 in command.outcomes and now - running.since > _PARTIAL_AFTER:
            unsent = command.outcomes.keys() - running.replied
            self._queue.reply_so_far(command, unsent)
            running.replied |= unsent

    def _will_stay_missing(self, command: JobCommand, missing: list[int], now: float) -> bool:
        if 0 in missing:
            return False  # rank 0 is still carrying it out
        return utc_now() > command.expires_at + _OVERDUE or all(self.is_silent(rank, now) for rank in missing)

    def end_round(self, number: int, key: str) -> None:
        self._expired_keys.add_entries(number, key)

    def leave(self, number: int) -> bool:
        """Announce rank 0's end at sync point `number`, or at the next if that is decided.

        Return True once all outcomes are in and all ranks have left.
        """
        if not self._is_leaving:
            self._is_leaving = True
            last = SyncDecision(number, 0, 1, (), "rank 0 has ended").fields()
            if self._store.set_if_absent(f"decision/{number}", last) != last:  # already decided
                self._store.set_if_absent(f"decision/{number + 1}", last)
        return not self._running and self._store.count_entries("left") >= len(self.membership.others)

    def abandon(self, reason: str) -> None:
        for running in list(self._running.values()):
            for rank in range(self._store.world_size):
                running.command.outcomes.setdefault(rank, (envelope.FAILED, {"reason": reason}))
            self._queue.close_ranks(running.command, running.replied)
        self._running.clear()
        for command in self._pending:
            command.failed(reason)
        self._pending.clear()
        self._queue.fail_all(reason)
