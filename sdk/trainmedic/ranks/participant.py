"""Role of all other ranks: read rank 0's decisions, and continue without commands if it stops."""

from __future__ import annotations

import logging
import time
from typing import Any, Mapping

from trainmedic.ranks.decisions import AgreedOutcome, SyncDecision, SyncInterval
from trainmedic.ranks.rank_state import (
    HEARTBEAT_EVERY,
    HEARTBEAT_OF_MANY,
    RankLost,
    RankStatus,
    TrainingPosition,
    outcome_key,
)
from trainmedic.ranks.rounds import SILENT_AFTER
from trainmedic.ranks.shared_store import SharedStore
from trainmedic.wire import envelope

log = logging.getLogger("trainmedic")

_IDLE_SECONDS = 2.0
_LARGEST_SPAN = 32  # between sync points without rank 0, times the usual one


class Participant:
    """Counterpart of `Coordinator`. ``patience``: wait for a late decision, in seconds."""

    lead = 0.1  # seconds from reading a decision to its sync point; the coordinator decides earlier

    def __init__(self, job: str, base: SharedStore, interval: SyncInterval, patience: float) -> None:
        self._job = job
        self._base = base
        self._interval = interval
        self._patience = patience
        self._store = base
        self._nonce: str | None = None  # of the request to join
        # Sync point that rank 0 had passed when one of its decisions was missed; else None.
        self._missed_at: int | None = None
        self._heartbeat_of_0: tuple[int, float] = (-1, time.monotonic())  # number, and when it was first seen
        self._heartbeat_due = 0.0

    def join(self) -> SharedStore | None:
        """Join this start of the job; None until rank 0 has answered.

        The store may have an earlier start's keys, so rank 0 answers each rank's nonce with this start's prefix.
        """
        if self._nonce is None:
            self._nonce = envelope.new_id()
            self._base.set(f"join/{self._base.rank}", self._nonce)
        token = self._base.get(f"joined/{self._nonce}")
        if token is None or token != self._base.get("current"):
            return None
        self._store = self._base.under(str(token))
        return self._store

    def has_to_rejoin(self, position: TrainingPosition) -> bool:
        if self._base.get("current") == self._store.token:
            return False
        if position.number >= 0:
            raise RankLost("another start of this job has taken over")
        self._nonce = None
        return True

    def decide(self, position: TrainingPosition, waited: float | None) -> SyncDecision | None:
        """Return the next decision, or None so far.

        ``waited``: seconds for which the training thread has waited; None before it needs the decision.
        """
        decision = self._read(position.number + 1)
        if decision is None and waited is not None and (waited >= self._patience or self._is_known_to_be_late()):
            decision = self._decide_nothing(position)
        return decision

    def _read(self, number: int) -> SyncDecision | None:
        fields = self._store.get(f"decision/{number}")
        if fields is None:
            return None
        decision = SyncDecision.read(number, fields)
        if decision.by == 0:
            self._missed_at = None
        else:
            self._require_not_deleted(number)
        return decision

    def _decide_nothing(self, position: TrainingPosition) -> SyncDecision:
        """Write an empty decision, unless another rank has written one."""
        number = position.number + 1
        # At growing intervals, because without rank 0 no keys are deleted.
        span = min(position.span * 2, self._interval.next_span() * _LARGEST_SPAN)
        mine = SyncDecision(number, self._base.rank, max(span, 1))
        decision = SyncDecision.read(number, self._store.set_if_absent(f"decision/{number}", mine.fields()))
        self._require_not_deleted(number)
        if decision.by != 0:
            if self._missed_at is None:
                log.warning(
                    "%s: rank 0 did not decide on commands for %g s; continuing without", self._job, self._patience
                )
            self._missed_at = self._passed_by_rank_0()
        return decision

    def _is_known_to_be_late(self) -> bool:
        """Return whether rank 0 has passed no sync point since it missed one."""
        return self._missed_at is not None and self._passed_by_rank_0() <= self._missed_at

    def _passed_by_rank_0(self) -> int:
        status = self._store.get("heartbeat/0")
        return int(status["passed"]) if status is not None else -1

    def _require_not_deleted(self, number: int) -> None:
        """Raise RankLost for a deleted decision that a late rank wrote again."""
        deleted_before = self._store.get("deleted_before")
        if deleted_before is not None and number < deleted_before:
            raise RankLost("this rank is too far behind the others")

    def agree(self, decision: SyncDecision, statements: dict[int, Any], missing: list[int]) -> Any:
        raise AssertionError("only rank 0 computes the agreed outcome")

    def take_outcome(self, decision: SyncDecision, outcome: AgreedOutcome) -> None:
        """Do nothing: only rank 0 keeps commands."""

    def report(self, sync_key: tuple[int, int], status: str, output: Mapping[str, Any]) -> None:
        self._store.add_entry(outcome_key(sync_key), [status, output])

    def end_round(self, number: int, key: str) -> None:
        """Do nothing: rank 0 deletes the keys."""

    def work(self, now: float, own: RankStatus) -> float:
        return _IDLE_SECONDS

    def is_silent(self, rank: int, now: float) -> bool:
        """Return whether rank 0 is silent; no other is waited for."""
        if now >= self._heartbeat_due:
            self._heartbeat_due = now + HEARTBEAT_EVERY
            status = self._store.get("heartbeat/0")
            heartbeat = status["heartbeat"] if status is not None else -1
            if heartbeat != self._heartbeat_of_0[0]:
                self._heartbeat_of_0 = (heartbeat, now)
        return now - self._heartbeat_of_0[1] > SILENT_AFTER + HEARTBEAT_OF_MANY

    def leave(self, number: int) -> bool:
        self._store.add_entry("left", 1)
        return True

    def abandon(self, reason: str) -> None:
        """Do nothing: only rank 0 has waiting commands."""
