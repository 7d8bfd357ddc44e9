"""Budgets of log reading per user and job.

The least served goes first, so a user with thousands of files delays only their own jobs, and a job only itself.
"""

from __future__ import annotations

import heapq
import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TypeVar

from msgspec import Struct

HALF_LIFE = 60.0
"""Seconds."""
_LEAST = 1e-6
"""Seconds per turn, so that turns alternate under a stopped clock."""
_MOST_REMEMBERED = 20_000
_HOUR = 3600.0
_TEN = 10.0
_JOBS_OF_USER = 4
"""Multiple of a job's budget."""
_FREE_SHARE = 0.02
"""Share that a job always keeps: a user's jobs cannot silence each other."""


class BudgetOwner(Struct, frozen=True):
    uid: int | None
    """Owner of the job's directory or file. None: the node's own logs."""
    job: str | None = None
    """Name from the job's directory, pod or file name."""


NODE_ITSELF = BudgetOwner(None)
UNKNOWN_USER = -1
"""Unknown owner; not `NODE_ITSELF`, whose turns no job may use."""

Item = TypeVar("Item")
_Turn = tuple[float, int, BudgetOwner, Iterator[Item], float, Item]
"""Used plus expected seconds, sort number, owner, further items, expected seconds, item."""


class FairTurns:
    """Time used by users and jobs. Not thread-safe."""

    def __init__(
        self,
        monotonic: Callable[[], float] = time.monotonic,
        *,
        most_waiting: float = math.inf,
        processor: Callable[[], float] = time.thread_time,
    ) -> None:
        """A turn counts at most `most_waiting` times its thread's `processor` seconds: a busy machine can interrupt any
        turn.
        """
        self._monotonic = monotonic
        self._most_waiting = most_waiting
        self._processor = processor
        self._users: dict[int | None, float] = {}
        self._jobs: dict[BudgetOwner, float] = {}
        self._faded_at = monotonic()

    def used_by(self, uid: int | None) -> float:
        """Return a user's seconds, halved every `HALF_LIFE`."""
        return self._users.get(uid, 0.0)

    def turns(
        self, waiting: Mapping[BudgetOwner, Iterable[Item]], expected: Callable[[Item], float] = lambda _: 0.0
    ) -> Iterator[tuple[BudgetOwner, Item]]:
        """Yield all items: next that of the least served user and job.

        The time until the next item is requested counts as used. `expected` estimates it in seconds.
        """
        self._fade()
        jobs: dict[int | None, list[_Turn[Item]]] = {}
        for number, (owner, items) in enumerate(waiting.items()):
            self._queue(jobs.setdefault(owner.uid, []), number, owner, iter(items), expected)
        users = [
            (self.used_by(uid) + of_user[0][4], place, uid)
            for place, (uid, of_user) in enumerate(jobs.items())
            if of_user
        ]
        heapq.heapify(users)
        while users:
            _, place, uid = heapq.heappop(users)
            _, number, owner, items, _, item = heapq.heappop(jobs[uid])
            yield from self._timed(owner, item)
            self._queue(jobs[uid], number, owner, items, expected)
            if jobs[uid]:
                heapq.heappush(users, (self.used_by(uid) + jobs[uid][0][4], place, uid))

    def _queue(
        self,
        heap: list[_Turn[Item]],
        number: int,
        owner: BudgetOwner,
        items: Iterator[Item],
        expected: Callable[[Item], float],
    ) -> None:
        for item in items:
            seconds = expected(item)
            heapq.heappush(heap, (self._jobs.get(owner, 0.0) + seconds, number, owner, items, seconds, item))
            return

    def _timed(self, owner: BudgetOwner, item: Item) -> Iterator[tuple[BudgetOwner, Item]]:
        began, used = self._monotonic(), self._processor()
        try:
            yield owner, item
        finally:
            took = self._monotonic() - began
            if self._most_waiting < math.inf:
                took = min(took, self._most_waiting * (self._processor() - used))
            took = max(took, _LEAST)
            self._users[owner.uid] = self.used_by(owner.uid) + took
            self._jobs[owner] = self._jobs.get(owner, 0.0) + took

    def _fade(self) -> None:
        now = self._monotonic()
        share = 0.5 ** ((now - self._faded_at) / HALF_LIFE)
        if share > 0.99 and len(self._jobs) < _MOST_REMEMBERED:
            return
        self._faded_at = now
        self._users = {uid: used * share for uid, used in self._users.items() if used * share > _LEAST}
        jobs = {owner: used * share for owner, used in self._jobs.items() if used * share > _LEAST}
        if len(jobs) >= _MOST_REMEMBERED:
            jobs = dict(heapq.nlargest(_MOST_REMEMBERED // 2, jobs.items(), key=lambda item: item[1]))
        self._jobs = jobs


class HourlyBudget:
    def __init__(self, most: float, monotonic: Callable[[], float] = time.monotonic) -> None:
        self._most = most
        self._monotonic = monotonic
        self._left: dict[BudgetOwner, tuple[float, float]] = {}
        """Remainder and its time, by owner."""

    def take(self, owner: BudgetOwner, count: float = 1.0) -> bool:
        """Use `count` if the owner has it left; return whether it had. `NODE_ITSELF` is unlimited."""
        if owner == NODE_ITSELF:
            return True
        now = self._monotonic()
        left = self._left_of(owner, now)
        is_free = left - count >= (1 - _FREE_SHARE) * self._most
        if left < count or not (is_free or self._left_of_user(owner, now) >= count):
            return False
        self.spend(owner, count)
        return True

    def has_left(self, owner: BudgetOwner) -> bool:
        now = self._monotonic()
        left = self._left_of(owner, now)
        return left > (1 - _FREE_SHARE) * self._most or min(left, self._left_of_user(owner, now)) > 0

    def spend(self, owner: BudgetOwner, count: float) -> None:
        now = self._monotonic()
        if len(self._left) >= _MOST_REMEMBERED:
            self._forget()
        user, left = BudgetOwner(owner.uid), self._left_of_user(owner, now)
        self._left[user] = (left - count, now)
        if owner.job is not None:
            self._left[owner] = (self._left_of(owner, now) - count, now)

    def _left_of_user(self, owner: BudgetOwner, now: float) -> float:
        return self._left_of(BudgetOwner(owner.uid), now)

    def _left_of(self, who: BudgetOwner, now: float) -> float:
        most = self._most if who.job is not None else _JOBS_OF_USER * self._most
        left, at = self._left.get(who, (most, now))
        return min(left + (now - at) * most / _HOUR, most)

    def _forget(self) -> None:
        kept = heapq.nlargest(_MOST_REMEMBERED // 2, self._left.items(), key=lambda item: item[1][1])
        self._left = dict(kept)


class SharedLines:
    def __init__(self, per_second: int, monotonic: Callable[[], float] = time.monotonic) -> None:
        # A bound per ten seconds is an hourly one with a faster clock.
        self._budget = HourlyBudget(per_second * _TEN, lambda: monotonic() * _HOUR / _TEN)

    def within(self, owner: BudgetOwner, count: int) -> int:
        """Count at most `count` lines; return how many may be processed."""
        if count == 0 or self._budget.take(owner, count):
            return count
        part = count
        while part > 1:
            part //= 2
            if self._budget.take(owner, part):
                return part
        return 0
