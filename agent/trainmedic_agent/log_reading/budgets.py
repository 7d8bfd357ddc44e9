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

HALF_LIFE = 60.0  # seconds
_LEAST_SECONDS = 1e-6  # seconds per turn, so that turns alternate under a stopped clock
_MOST_REMEMBERED = 20_000  # jobs and users
HOUR = 3600.0  # seconds
_USER_FACTOR = 4  # a user's budget, as a multiple of a job's
# Share of its budget that a job has even if its user's is used up: a user's jobs cannot silence each other.
_FREE_SHARE = 0.02


class BudgetOwner(Struct, frozen=True):
    uid: int | None
    """Owner of the job's directory or file. None for the node's own logs."""
    job: str | None = None
    """Name from the job's directory, pod or file name. None: no job, or all of a user."""


NODE_ITSELF = BudgetOwner(None)
UNKNOWN_USER = -1  # unknown user; not None, because no job may use the turns of `NODE_ITSELF`

Item = TypeVar("Item")
# Used plus expected seconds, owner's number, owner, further items, expected seconds, next item.
_Turn = tuple[float, int, BudgetOwner, Iterator[Item], float, Item]


class FairTurns:
    """Order of work by the time that users and their jobs have used. Not thread-safe."""

    def __init__(
        self,
        monotonic: Callable[[], float] = time.monotonic,
        *,
        most_waiting: float = math.inf,
        processor: Callable[[], float] = time.thread_time,
    ) -> None:
        """A turn counts at most `most_waiting` times its `processor` seconds: a busy machine interrupts turns."""
        self._monotonic = monotonic
        self._most_waiting = most_waiting
        self._processor = processor
        self._users: dict[int | None, float] = {}
        self._jobs: dict[BudgetOwner, float] = {}
        self._halved_at = monotonic()

    def used_by(self, uid: int | None) -> float:
        """Return a user's seconds, halved every `HALF_LIFE`."""
        return self._users.get(uid, 0.0)

    def turns(
        self, waiting: Mapping[BudgetOwner, Iterable[Item]], expected: Callable[[Item], float] = lambda _: 0.0
    ) -> Iterator[tuple[BudgetOwner, Item]]:
        """Yield all items, next one of the least served user's least served job.

        The time until the next request counts as used. `expected` estimates it in seconds.
        """
        self._halve_over_time()
        jobs: dict[int | None, list[_Turn[Item]]] = {}
        for number, (owner, items) in enumerate(waiting.items()):
            self._push_next(jobs.setdefault(owner.uid, []), number, owner, iter(items), expected)
        users = [
            (self.used_by(uid) + of_user[0][4], place, uid)
            for place, (uid, of_user) in enumerate(jobs.items())
            if of_user
        ]
        heapq.heapify(users)
        while users:
            _, place, uid = heapq.heappop(users)
            _, number, owner, items, _, item = heapq.heappop(jobs[uid])
            yield from self._count_time(owner, item)
            self._push_next(jobs[uid], number, owner, items, expected)
            if jobs[uid]:
                heapq.heappush(users, (self.used_by(uid) + jobs[uid][0][4], place, uid))

    def _push_next(
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

    def _count_time(self, owner: BudgetOwner, item: Item) -> Iterator[tuple[BudgetOwner, Item]]:
        began, used = self._monotonic(), self._processor()
        try:
            yield owner, item
        finally:
            took = self._monotonic() - began
            if self._most_waiting < math.inf:
                took = min(took, self._most_waiting * (self._processor() - used))
            took = max(took, _LEAST_SECONDS)
            self._users[owner.uid] = self.used_by(owner.uid) + took
            self._jobs[owner] = self._jobs.get(owner, 0.0) + took

    def _halve_over_time(self) -> None:
        now = self._monotonic()
        share = 0.5 ** ((now - self._halved_at) / HALF_LIFE)
        if share > 0.99 and len(self._jobs) < _MOST_REMEMBERED:
            return
        self._halved_at = now
        self._users = {uid: used * share for uid, used in self._users.items() if used * share > _LEAST_SECONDS}
        jobs = {owner: used * share for owner, used in self._jobs.items() if used * share > _LEAST_SECONDS}
        if len(jobs) >= _MOST_REMEMBERED:
            jobs = dict(heapq.nlargest(_MOST_REMEMBERED // 2, jobs.items(), key=lambda item: item[1]))
        self._jobs = jobs


class HourlyBudget:
    """Budget of `most` per job and hour, four times as much per user, unlimited for the node itself.

    It refills continuously.
    """

    def __init__(self, most: float, monotonic: Callable[[], float] = time.monotonic) -> None:
        self._most = most
        self._monotonic = monotonic
        self._left: dict[BudgetOwner, tuple[float, float]] = {}  # remainder and its time, by owner

    def take(self, owner: BudgetOwner, count: float = 1.0) -> bool:
        """Use `count` if the owner has it left; return whether it had."""
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
        if owner == NODE_ITSELF:
            return True
        now = self._monotonic()
        left = self._left_of(owner, now)
        return left > (1 - _FREE_SHARE) * self._most or min(left, self._left_of_user(owner, now)) > 0

    def spend(self, owner: BudgetOwner, count: float) -> None:
        """Use `count` even if less is left."""
        now = self._monotonic()
        if len(self._left) >= _MOST_REMEMBERED:
            self._forget()
        user, left = BudgetOwner(owner.uid), self._left_of_user(owner, now)
        self._left[user] = (left - count, now)
        if owner.job is not None:
            self._left[owner] = (self._left_of(owner, now) - count, now)

    def _left_of_user(self, owner: BudgetOwner, now: float) -> float:
        return self._left_of(BudgetOwner(owner.uid), now)

    def _left_of(self, job_or_user: BudgetOwner, now: float) -> float:
        most = self._most if job_or_user.job is not None else _USER_FACTOR * self._most
        left, at = self._left.get(job_or_user, (most, now))
        return min(left + (now - at) * most / HOUR, most)

    def _forget(self) -> None:
        kept = heapq.nlargest(_MOST_REMEMBERED // 2, self._left.items(), key=lambda item: item[1][1])
        self._left = dict(kept)
