"""One change at a time per target.

A run locks its target from its start to its close. A node covers its GPUs, the cluster covers everything
(`Target.overlaps`). Runs get their targets in the order in which they came: a run passes another that waits only if
its target overlaps neither a locked one nor that of any earlier waiter. An undo takes no such lock, because a run
must never block it; it only waits until no attempt is in flight on an overlapping target.

A run on a job locks the job. Where a step of it works on the job's nodes as well, its attempts and those of runs on
the same GPUs or nodes still come one after the other; but neither run keeps the other from its target, because a job
may be on a thousand nodes, and may move to others. So their effects there must be able to coexist, as power caps do:
of several on one GPU the lowest counts, and each is taken back alone.

The target of a run that may be admitted is kept for it while that is decided, so that its first plan can be recorded
with its admission (``first_plans``). Where it is not free, nobody who is admitted later keeps what overlaps it: the run
may be about to wait for it.

The locks live in memory. After a restart `workers` starts the open runs again, and their drivers take the locks.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Iterator, Mapping, Sequence

from trainmedic_server.domain.target import Target, TargetKind


class TargetLocks:
    """Which runs own which targets, which runs wait, and where an attempt is in flight."""

    def __init__(self) -> None:
        self._held = _Targets()
        self._keepers: set[str] = set()
        """Those of the holders that are no runs."""
        self._turned_away = _Targets()
        """What keepers were not given: a run that they admit waits for it before those that come later."""
        self._waiting = _Targets()
        self._grants: dict[str, asyncio.Future[None]] = {}
        self._acting = _Targets()
        self._held_back: list[asyncio.Future[None]] = []

    def try_acquire(self, run_id: str, target: Target) -> bool:
        """Lock the target now, unless one that is locked or waited for overlaps it; return whether the run has it."""
        if self._held.has(run_id):
            return True
        if self._held.overlapping(target) or self._waiting.overlapping(target):
            return False
        self._held.add(run_id, target)
        return True

    def try_keep(self, keeper: str, target: Target) -> bool:
        """Lock the target for a run that may be admitted, as `try_acquire`, unless it overlaps one that was not given
        to an earlier keeper. `pass_on` or `release` ends that, and `release` also what a refusal holds back."""
        if self._turned_away.overlapping(target) or not self.try_acquire(keeper, target):
            self._turned_away.add(keeper, target)
            return False
        self._keepers.add(keeper)
        return True

    def pass_on(self, keeper: str, run_id: str) -> None:
        """Let the run have the target that was kept for it."""
        target = self._held.remove(keeper)
        assert target is not None
        self._keepers.discard(keeper)
        self._held.add(run_id, target)

    def wait(self, run_id: str, target: Target) -> asyncio.Future[None]:
        """Join or stay in the queue; the future is done once the target is locked. `release` also leaves the queue."""
        if run_id not in self._grants:
            self._waiting.add(run_id, target)
            self._grants[run_id] = asyncio.get_running_loop().create_future()
        return self._grants[run_id]

    def holder(self, target: Target) -> str | None:
        """A run that holds an overlapping target, if any."""
        claims = self._held.near(target)
        return next((run for run, held in claims if run not in self._keepers and held.overlaps(target)), None)

    def release(self, run_id: str) -> None:
        """Unlock the run's target, or leave the queue, and grant the next waiters theirs. Idempotent."""
        self._keepers.discard(run_id)
        self._turned_away.remove(run_id)
        target = self._held.remove(run_id) or self._waiting.remove(run_id)
        self._grants.pop(run_id, None)
        if target is None or not self._grants:
            return
        for waiter, its_target in self._waiting.near(target):
            if self._held.overlapping(its_target) or self._waiting.overlapping(its_target, before=waiter):
                continue
            self._waiting.remove(waiter)
            self._held.add(waiter, its_target)
            granted = self._grants.pop(waiter)
            if not granted.done():
                granted.set_result(None)

    def acting(self, holder: str, *targets: Target) -> _Acting:
        """A block that begins once no other attempt works on a target that overlaps one of these, and marks them as
        worked on; entering it says whether that had to be waited for.

        All targets are taken at once: attempts that each wait for a target which another has taken would be a deadlock.
        """
        return _Acting(self, holder, targets)

    async def begin_acting(self, claims: Mapping[str, Target]) -> bool:
        """Enter the block of `acting`, with an id for each target."""
        waited = False
        while any(map(self._acting.overlapping, claims.values())):
            waited = True
            another_ended = asyncio.get_running_loop().create_future()
            self._held_back.append(another_ended)
            await another_ended
        for claim, target in claims.items():
            self._acting.add(claim, target)
        return waited

    def end_acting(self, claims: Iterable[str]) -> None:
        """Leave the block of `acting`."""
        for claim in claims:
            self._acting.remove(claim)
        waiters, self._held_back = self._held_back, []
        for another_ended in waiters:
            if not another_ended.done():
                another_ended.set_result(None)


class _Acting:
    """The block of `TargetLocks.acting`; a class, because the event loop keeps a record of each
    generator."""

    def __init__(self, locks: TargetLocks, holder: str, targets: Sequence[Target]) -> None:
        self._locks = locks
        self._claims = {f"{holder}/{number}": target for number, target in enumerate(targets)}

    async def __aenter__(self) -> bool:
        return await self._locks.begin_acting(self._claims)

    async def __aexit__(self, *error: object) -> None:
        self._locks.end_acting(self._claims)


class _Targets:
    """Claimed targets by the id of the claim, in order, in groups so that looking for an overlap is quick.

    Targets of different groups never overlap, unless one is the cluster. There may be ten thousand claims in a storm
    of alerts, but only a few in one group.
    """

    def __init__(self) -> None:
        self._groups: dict[str, dict[str, Target]] = {}
        self._by_id: dict[str, Target] = {}
        self._numbers: dict[str, int] = {}
        self._next = 0

    def add(self, claim: str, target: Target) -> None:
        self._by_id[claim] = target
        self._numbers[claim] = self._next = self._next + 1
        self._groups.setdefault(_group(target), {})[claim] = target

    def has(self, claim: str) -> bool:
        return claim in self._by_id

    def remove(self, claim: str) -> Target | None:
        target = self._by_id.pop(claim, None)
        if target is not None:
            del self._numbers[claim]
            group = self._groups[_group(target)]
            del group[claim]
            if not group:
                del self._groups[_group(target)]
        return target

    def near(self, target: Target) -> list[tuple[str, Target]]:
        """The claims that could overlap `target`, in the order in which they came."""
        claims = [claim for group in self._near(target) for claim in group.items()]
        return sorted(claims, key=lambda claim: self._numbers[claim[0]])

    def overlapping(self, target: Target, before: str | None = None) -> str | None:
        """The first claim that overlaps `target`, of those that came before the claim named `before`; None for none."""
        end = self._numbers[before] if before is not None else None
        for group in self._near(target):
            for claim, claimed in group.items():
                if end is not None and self._numbers[claim] >= end:
                    break
                if claimed.overlaps(target):
                    return claim
        return None

    def _near(self, target: Target) -> Iterator[dict[str, Target]]:
        if target.kind is TargetKind.CLUSTER:
            yield from self._groups.values()
            return
        for name in (_group(target), "cluster"):
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
