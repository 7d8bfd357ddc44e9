"""One change at a time per target.

A run locks its target from its start to its close, or only the disks of its node if it changes nothing else
(``claims``). A node covers its GPUs and its disks, the cluster covers everything (`Claim.overlaps`). Claims are granted
in the order in which they came. A run passes another that waits only if its claim overlaps neither a locked one nor
that of any earlier waiter. An undo takes no such lock, because a run must never block it. It only waits until no
attempt is in flight on what it overlaps.

A run on a job locks the job. If one of its steps works on the job's nodes as well, its attempts and those of runs on
the same GPUs or nodes still come one after the other. Neither run keeps the other from its target, because a job may be
on a thousand nodes, and may move to others. So their effects there must be able to coexist, as power caps do: of
several on one GPU the lowest counts, and each is reverted alone.

The target of a run that may be admitted is kept for it during the decision, so that its first plan can be recorded with
its admission (``first_plans``). If the target is not free, no run that is admitted later keeps what overlaps it,
because the first run may be about to wait for it.

The locks live in memory. After a restart `workers` starts the open runs again, and their drivers take the locks.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Iterator, Mapping, Sequence

from trainmedic_core.target import Target, TargetKind
from trainmedic_server.domain.claim import Claim


class TargetLocks:
    """Which runs own which targets, which runs wait, and where an attempt is in flight."""

    def __init__(self) -> None:
        self._held = _Claims()
        self._keepers: set[str] = set()
        """Those of the holders that are no runs."""
        self._turned_away = _Claims()
        """What keepers were not given: a run that they admit waits for it before those that come later."""
        self._waiting = _Claims()
        self._grants: dict[str, asyncio.Future[None]] = {}
        self._acting = _Claims()
        self._held_back: list[asyncio.Future[None]] = []

    def try_acquire(self, run_id: str, claim: Claim) -> bool:
        """Lock the claim now, unless an overlapping claim is locked or waited for. Return whether the run has it."""
        if self._held.has(run_id):
            return True
        if self._held.overlapping(claim) or self._waiting.overlapping(claim):
            return False
        self._held.add(run_id, claim)
        return True

    def try_keep(self, keeper: str, claim: Claim) -> bool:
        """Lock the claim for a run that may be admitted, as `try_acquire`, unless it overlaps what an earlier keeper
        did not get. `pass_on` or `release` ends that; `release` also ends the block by a refused keeper."""
        if self._turned_away.overlapping(claim) or not self.try_acquire(keeper, claim):
            self._turned_away.add(keeper, claim)
            return False
        self._keepers.add(keeper)
        return True

    def pass_on(self, keeper: str, run_id: str) -> None:
        """Give the run the claim that was kept for it."""
        claim = self._held.remove(keeper)
        assert claim is not None
        self._keepers.discard(keeper)
        self._held.add(run_id, claim)

    def wait(self, run_id: str, claim: Claim) -> asyncio.Future[None]:
        """Join or stay in the queue; the future is done once the claim is locked. `release` also leaves the queue."""
        if run_id not in self._grants:
            self._waiting.add(run_id, claim)
            self._grants[run_id] = asyncio.get_running_loop().create_future()
        return self._grants[run_id]

    def holder(self, claim: Claim) -> str | None:
        """Return a run that holds an overlapping claim; None where there is none."""
        claims = self._held.near(claim)
        return next((run for run, held in claims if run not in self._keepers and held.overlaps(claim)), None)

    def blocker(self, run_id: str, claim: Claim) -> str | None:
        """Return the run for which this waiting run waits: one that holds an overlapping claim, else an earlier waiter
        for such a claim. None if there is neither."""
        if self._held.has(run_id):
            return None
        holder = self.holder(claim)
        if holder is not None or not self._waiting.has(run_id):
            return holder
        return self._waiting.overlapping(claim, before=run_id)

    def release(self, run_id: str) -> None:
        """Unlock the run's claim, or leave the queue, and grant the next waiters theirs. Idempotent."""
        self._keepers.discard(run_id)
        self._turned_away.remove(run_id)
        claim = self._held.remove(run_id) or self._waiting.remove(run_id)
        self._grants.pop(run_id, None)
        if claim is None or not self._grants:
            return
        for waiter, its_claim in self._waiting.near(claim):
            if self._held.overlapping(its_claim) or self._waiting.overlapping(its_claim, before=waiter):
                continue
            self._waiting.remove(waiter)
            self._held.add(waiter, its_claim)
            granted = self._grants.pop(waiter)
            if not granted.done():
                granted.set_result(None)

    def acting(self, holder: str, *claims: Claim) -> _Acting:
        """Return a block that begins once no other attempt works on what overlaps one of these claims, and marks them
        as worked on. Entering it returns whether it had to wait.

        All claims are taken at once: attempts that each wait for the claim of another would be a deadlock.
        """
        return _Acting(self, holder, claims)

    async def begin_acting(self, claims: Mapping[str, Claim]) -> bool:
        """Enter the block of `acting`, with an id for each claim."""
        waited = False
        while any(map(self._acting.overlapping, claims.values())):
            waited = True
            another_ended = asyncio.get_running_loop().create_future()
            self._held_back.append(another_ended)
            await another_ended
        for name, claim in claims.items():
            self._acting.add(name, claim)
        return waited

    def end_acting(self, names: Iterable[str]) -> None:
        """Leave the block of `acting`."""
        for name in names:
            self._acting.remove(name)
        waiters, self._held_back = self._held_back, []
        for another_ended in waiters:
            if not another_ended.done():
                another_ended.set_result(None)


class _Acting:
    """The block of `TargetLocks.acting`; a class, because the event loop keeps a record of each
    generator."""

    def __init__(self, locks: TargetLocks, holder: str, claims: Sequence[Claim]) -> None:
        self._locks = locks
        self._claims = {f"{holder}/{number}": claim for number, claim in enumerate(claims)}

    async def __aenter__(self) -> bool:
        return await self._locks.begin_acting(self._claims)

    async def __aexit__(self, *error: object) -> None:
        self._locks.end_acting(self._claims)


class _Claims:
    """Claims by the name of their holder, in order, and in groups so that looking for an overlap is quick.

    Claims of different groups never overlap, unless one is on the cluster. There may be ten thousand claims in a storm
    of alerts, but only a few in one group.
    """

    def __init__(self) -> None:
        self._groups: dict[str, dict[str, Claim]] = {}
        self._by_name: dict[str, Claim] = {}
        self._numbers: dict[str, int] = {}
        self._next = 0

    def add(self, name: str, claim: Claim) -> None:
        self._by_name[name] = claim
        self._numbers[name] = self._next = self._next + 1
        self._groups.setdefault(_group(claim.target), {})[name] = claim

    def has(self, name: str) -> bool:
        return name in self._by_name

    def remove(self, name: str) -> Claim | None:
        claim = self._by_name.pop(name, None)
        if claim is not None:
            del self._numbers[name]
            key = _group(claim.target)
            group = self._groups[key]
            del group[name]
            if not group:
                del self._groups[key]
        return claim

    def near(self, claim: Claim) -> list[tuple[str, Claim]]:
        """Return the claims that could overlap `claim`, in the order in which they came."""
        claims = [named for group in self._near(claim) for named in group.items()]
        return sorted(claims, key=lambda named: self._numbers[named[0]])

    def overlapping(self, claim: Claim, before: str | None = None) -> str | None:
        """Return the name of the first claim that overlaps `claim`, among those before the claim of the name `before`.
        None if there is none."""
        if not self._by_name:
            return None
        end = self._numbers[before] if before is not None else None
        for group in self._near(claim):
            for name, claimed in group.items():
                if end is not None and self._numbers[name] >= end:
                    break
                if claimed.overlaps(claim):
                    return name
        return None

    def _near(self, claim: Claim) -> Iterator[dict[str, Claim]]:
        if claim.target.kind is TargetKind.CLUSTER:
            yield from self._groups.values()
            return
        for name in (_group(claim.target), "cluster"):
            if name in self._groups:
                yield self._groups[name]


def _group(target: Target) -> str:
    match target.kind:
        case TargetKind.CLUSTER:
            return "cluster"
        case TargetKind.JOB:
            return f"job:{target.job}"
        case _:
            return f"node:{target.node}"
