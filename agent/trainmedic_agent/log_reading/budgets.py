"""Budgets of log reading: each user has one, and each job of that user has a part of it.

`FairTurns` divides time, `HourlyBudget` bounds counts. Whoever used least is served first, so a user with thousands of
files delays only their own jobs, and a job with thousands of files delays only itself.

Who calls it: ``scan_units`` and ``discovery`` (scans), ``files`` (reading), ``dumps``, and ``rule_runner`` (findings).
Not here: the record of what was left out (``cut_record``).
"""

from __future__ import annotations

import heapq
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TypeVar

from msgspec import Struct

HALF_LIFE = 60.0
"""Seconds after which used time counts half."""
_LEAST = 1e-6
"""Seconds that a turn counts at least, so that turns alternate under a clock that stands still."""
_MOST_REMEMBERED = 20_000
_HOUR = 3600.0
_TEN = 10.0
_JOBS_OF_USER = 4
"""A user may have so many times what one job may have."""
_FREE_SHARE = 0.02
"""A job has this share of its budget also after its user's is used up, so no job of a user silences another one."""


class BudgetOwner(Struct, frozen=True):
    """A job of a user, whose reading has a budget of its own."""

    uid: int | None
    """Owner of the job's directory, or of a file that lies in none. None for the node's own logs."""
    job: str | None = None
    """Name of the job's directory, of the pod, or of the job in the file's name."""


NODE_ITSELF = BudgetOwner(None)
"""Owner of logs that no job writes."""
UNKNOWN_USER = -1
"""User of a job whose owner only an earlier process knew. It is not that of `NODE_ITSELF`, whose turns no job uses."""

Item = TypeVar("Item")
_Turn = tuple[float, int, BudgetOwner, Iterator[Item], float, Item]
"""Used and expected seconds, a number to sort by, the owner, their further items, the expected seconds, the item."""


class FairTurns:
    """The time that users and jobs have used. One thread uses it."""

    def __init__(self, monotonic: Callable[[], float] = time.monotonic) -> None:
        self._monotonic = monotonic
        self._users: dict[int | None, float] = {}
        self._jobs: dict[BudgetOwner, float] = {}
        self._faded_at = monotonic()

    def used_by(self, uid: int | None) -> float:
        """Return the seconds that a user has used. Seconds of a `HALF_LIFE` ago count half."""
        return self._users.get(uid, 0.0)

    def turns(
        self, waiting: Mapping[BudgetOwner, Iterable[Item]], expected: Callable[[Item], float] = lambda _: 0.0
    ) -> Iterator[tuple[BudgetOwner, Item]]:
        """Yield all items: next that of the user, and of their job, that has used least.

        The time until the next item is asked for counts as used by the owner of this one. `expected` estimates that
        time in seconds, so that short items go before long ones of owners who have used nothing yet.
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
        """Put the owner's next item into the heap of a user."""
        for item in items:
            seconds = expected(item)
            heapq.heappush(heap, (self._jobs.get(owner, 0.0) + seconds, number, owner, items, seconds, item))
            return

    def _timed(self, owner: BudgetOwner, item: Item) -> Iterator[tuple[BudgetOwner, Item]]:
        began = self._monotonic()
        try:
            yield owner, item
        finally:
            took = max(self._monotonic() - began, _LEAST)
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
    """A count that a job may use within an hour; a user may use `_JOBS_OF_USER` times as much."""

    def __init__(self, most: float, monotonic: Callable[[], float] = time.monotonic) -> None:
        self._most = most
        self._monotonic = monotonic
        self._left: dict[BudgetOwner, tuple[float, float]] = {}
        """By owner, what is left, and when that was."""

    def take(self, owner: BudgetOwner, count: float = 1.0) -> bool:
        """Return whether the owner may use `count` more, and count it if so. The node's own logs have no bound."""
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
        """Return whether the owner has something left."""
        now = self._monotonic()
        left = self._left_of(owner, now)
        return left > (1 - _FREE_SHARE) * self._most or min(left, self._left_of_user(owner, now)) > 0

    def spend(self, owner: BudgetOwner, count: float) -> None:
        """Count what was used, also beyond the budget."""
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
        """Forget the half that was used longest ago. Whoever makes so many jobs still has the bound of a user."""
        kept = heapq.nlargest(_MOST_REMEMBERED // 2, self._left.items(), key=lambda item: item[1][1])
        self._left = dict(kept)


class SharedLines:
    """The lines that the rules look at in a second, of each job and of each user, on the average of ten seconds."""

    def __init__(self, per_second: int, monotonic: Callable[[], float] = time.monotonic) -> None:
        # A bound for ten seconds is an hourly one with another clock.
        self._budget = HourlyBudget(per_second * _TEN, lambda: monotonic() * _HOUR / _TEN)

    def within(self, owner: BudgetOwner, count: int) -> int:
        """Return how many of the next `count` lines may be looked at, and count them."""
        if count == 0 or self._budget.take(owner, count):
            return count
        part = count
        while part > 1:
            part //= 2
            if self._budget.take(owner, part):
                return part
        return 0
