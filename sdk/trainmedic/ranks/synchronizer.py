"""A rank's background thread, which alone uses the shared store, whose calls may block.

If the store fails or this rank lags too far, sharing ends (`ended_because`): no rank carries out commands.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections import deque
from dataclasses import replace
from functools import partial
from typing import Any, Callable, Mapping

from trainmedic.errors import described
from trainmedic.ranks.coordinator import Coordinator
from trainmedic.ranks.decisions import AgreedOutcome, SyncDecision, SyncInterval
from trainmedic.ranks.participant import Participant
from trainmedic.ranks.rank_state import (
    HEARTBEAT_EVERY,
    HEARTBEAT_OF_MANY,
    MANY_RANKS,
    RankLost,
    RankStatus,
    TrainingPosition,
)
from trainmedic.ranks.rounds import Round, Rounds
from trainmedic.ranks.shared_store import SharedStore
from trainmedic.wire.backoff import Backoff

log = logging.getLogger("trainmedic")

# All in seconds.
_STORE_GRACE = 15.0  # after an inquiry's own limit, for a slow store
JOIN_PATIENCE = 60.0  # until rank 0 must have started
_JOIN_INTERVAL = 0.02  # between two attempts to join
_LEAVE_INTERVAL = 0.005  # between two attempts to leave
_IDLE_SECONDS = 2.0  # until the thread looks again, if nothing is due and nothing wakes it
_FIRST_WAIT, _LONGEST_WAIT = 0.01, 0.25  # between two attempts to read a due decision


Role = Coordinator | Participant


class Inquiry:
    """A value for the training thread: ``attempt`` is called until it returns one."""

    def __init__(self, attempt: Callable[[float, float], Any], world_size: int) -> None:
        self.attempt = attempt  # gets `since` and the present time; returns None for "not yet"
        self.since = time.monotonic()
        # The more ranks, the less often each reads the store.
        self.backoff = Backoff(0.001, min(0.02 + world_size * 0.0005, _LONGEST_WAIT), factor=1.5)
        self.done = threading.Event()
        self.result: Any = None  # None after `done` if sharing has ended


class Synchronizer:
    """One rank's thread.

    The training thread sets ``position``, ``location`` and ``published``, and reads ``next_decision``.
    """

    def __init__(
        self, job: str, base: SharedStore, role: Role, interval: SyncInterval, stats: Callable[[], Mapping[str, Any]]
    ) -> None:
        self._job = job
        self.ended_because: str | None = None  # None while it runs
        self.position = TrainingPosition()
        self.location: Mapping[str, Any] = {}
        self.published: Mapping[str, Any] = {}  # figures in addition to ``stats``
        self.next_decision: SyncDecision | None = None  # the last one read; None if the due one is not there yet
        self._rank = base.rank
        self._world_size = base.world_size
        self._role = role
        self._interval = interval
        self._stats = stats
        self._has_logged_figures = False  # True once an error of ``stats`` was logged
        self._inquiries: deque[Inquiry] = deque()
        # To report: `JobCommand.sync_key`, status and output.
        self._outcomes: deque[tuple[tuple[int, int], str, Mapping[str, Any]]] = deque()
        self._closing_at: float | None = None  # when `close` stops waiting; None before it
        self._store: SharedStore | None = None  # None until rank 0 has admitted this rank
        self._rounds: Rounds | None = None
        self._status = RankStatus()  # in the last heartbeat
        self._heartbeat_due = 0.0
        self._backoff = Backoff(_FIRST_WAIT, _LONGEST_WAIT, factor=1.5)
        self._wake = threading.Event()
        self._thread = threading.Thread(target=self._run, name="trainmedic-synchronizer", daemon=True)

    def start(self) -> None:
        self._thread.start()

    # --- training thread ----------------------------------------------------------------------------------

    def wake(self) -> None:
        self._wake.set()

    def wait_for(self, attempt: Callable[[float, float], Any], limit: float) -> Any:
        """Let the thread call ``attempt`` until it returns a value. Raises RankLost if sharing has ended."""
        inquiry = Inquiry(attempt, self._world_size)
        longest = min(limit + _STORE_GRACE, threading.TIMEOUT_MAX)  # a group's patience may be infinite
        self._inquiries.append(inquiry)
        self._wake.set()
        try:
            if self.ended_because is None and not inquiry.done.wait(longest):
                self.end(f"the store that the ranks share has not answered for {_STORE_GRACE:g} s")
        except BaseException:
            # The caller leaves a round that the others count on, with an unknown outcome.
            self.end("the training loop was interrupted while the ranks agreed on a command")
            raise
        if inquiry.result is None:
            raise RankLost(self.ended_because or "sharing has ended")
        return inquiry.result

    def report(self, sync_key: tuple[int, int], status: str, output: Mapping[str, Any]) -> None:
        self._outcomes.append((sync_key, status, output))
        self._wake.set()

    def end(self, reason: str, level: int = logging.WARNING) -> None:
        if self.ended_because is None:
            self.ended_because = reason
            log.log(level, "%s: rank %d no longer carries out commands: %s", self._job, self._rank, reason)
        while self._inquiries:
            self._inquiries.popleft().done.set()
        self._wake.set()

    def close(self, timeout: float) -> None:
        self._closing_at = time.monotonic() + timeout
        self._wake.set()
        self._thread.join(timeout + 0.5)
        self.end("the job has ended", logging.DEBUG)

    @property
    def is_alive(self) -> bool:
        return self._thread.is_alive()

    # --- background thread --------------------------------------------------------------------------------

    def _run(self) -> None:
        delay = 0.0
        while self.ended_because is None:
            self._wake.wait(delay)
            self._wake.clear()
            try:
                delay = self._work(time.monotonic())
                if self._closing_at is not None:
                    delay = min(delay, _LEAVE_INTERVAL)
                    if self._has_left(time.monotonic()):
                        return
            except RankLost as error:
                self.end(str(error), logging.WARNING if self._closing_at is None else logging.DEBUG)
            # Catch everything: other ranks may write anything.
            except Exception as error:
                log.exception("%s: the agreement of the ranks failed unexpectedly", self._job)
                self.end(f"an unexpected error: {described(error).splitlines()[0][:200]}")
        if self._closing_at is None:
            self._role.abandon(f"the ranks no longer agree on commands: {self.ended_because}")

    def _work(self, now: float) -> float:
        """Do what is due; return the seconds until the next call."""
        store = self._store or self._join()
        delay = self._attempt_inquiries(now)
        if store is None:
            return min(delay, _JOIN_INTERVAL)
        delay = min(delay, self._write_heartbeat(store, now))
        if self._store is None:
            return 0.0  # it has to join again
        while self._outcomes:
            self._role.report(*self._outcomes.popleft())
        own = replace(self._status, passed=self.position.number, about=self.location)
        delay = min(delay, self._role.work(now, own))
        return min(delay, self._find_next_decision(now))

    def _join(self) -> SharedStore | None:
        self._store = self._role.join()
        if self._store is not None:
            self._rounds = Rounds(self._store, self._role.is_silent)
        return self._store

    def _attempt_inquiries(self, now: float) -> float:
        delay = _IDLE_SECONDS
        for inquiry in list(self._inquiries):
            inquiry.result = inquiry.attempt(inquiry.since, now)
            if inquiry.result is None:
                delay = min(delay, inquiry.backoff.next())
                continue
            inquiry.done.set()
            with contextlib.suppress(ValueError):  # `end` may have taken it out
                self._inquiries.remove(inquiry)
        return delay

    def _write_heartbeat(self, store: SharedStore, now: float) -> float:
        if now < self._heartbeat_due:
            return self._heartbeat_due - now
        if self._role.has_to_rejoin(self.position):
            self._store, self._rounds, self.next_decision = None, None, None
            return 0.0
        every = HEARTBEAT_EVERY if store.world_size <= MANY_RANKS else HEARTBEAT_OF_MANY
        self._heartbeat_due = now + every
        count, stats = self._status.heartbeat + 1, self.published  # outdated figures would pass for present ones
        try:
            stats = {**self._stats(), **self.published}
        # Catch everything: the heartbeat is needed even without figures.
        except Exception:
            if not self._has_logged_figures:
                self._has_logged_figures = True
                log.exception("%s: the figures of rank %d cannot be measured", self._job, self._rank)
        self._status = RankStatus(count, self.position.number, self.location, stats)
        store.set(f"heartbeat/{self._rank}", self._status.fields())
        return every

    def _find_next_decision(self, now: float) -> float:
        position = self.position
        if self.next_decision is not None and self.next_decision.number > position.number:
            return _IDLE_SECONDS
        # Shortly before the training thread may come to the next sync point.
        due = position.at + self._interval.seconds(position.span) - self._role.lead
        if now < due:
            return due - now
        self.next_decision = self._role.decide(position, None)
        if self.next_decision is None:
            return self._backoff.next()
        self._backoff.reset()
        return _IDLE_SECONDS

    def _has_left(self, now: float) -> bool:
        if self._store is None or self._closing_at is None or now > self._closing_at:
            return True
        return self._role.leave(self.position.number + 1)

    # --- for `wait_for`: None means not yet ---------------------------------------------------------------

    def attempt_decision(self, since: float, now: float) -> SyncDecision | None:
        if self._store is None:
            if now - since > JOIN_PATIENCE:
                raise RankLost(f"rank 0 did not respond within {JOIN_PATIENCE:g} s; make sure it calls share()")
            return None
        if self.next_decision is None or self.next_decision.number <= self.position.number:
            self.next_decision = self._role.decide(self.position, now - since)
        return self.next_decision

    def attempt_meeting(
        self, decision: SyncDecision, statement: Any, patience: float, since: float, now: float
    ) -> AgreedOutcome | None:
        meeting = Round(f"meeting/{decision.number}", partial(self._role.agree, decision), None, patience)
        result = self.attempt_round(meeting, statement, since, now)
        if result is None:
            return None
        outcome = AgreedOutcome.read(result)
        self._role.take_outcome(decision, outcome)
        return outcome

    def attempt_round(self, round_: Round, value: Any, since: float, now: float) -> Any:
        if self._rounds is None:
            return None
        result = self._rounds.attempt(round_, value, since, now)
        if result is not None:
            # Every rank reads the result before it passes the next sync point; the keys stay for one more.
            self._role.end_round(self.position.number + 2, round_.key)
        return result
