"""Target locks: one change at a time per target.

A run locks its claim (``claims``) from its start, or the end of its first waits, to its close. Claims are granted in
order of arrival, except that a run passes earlier waiters that it does not overlap. Undos take no lock; they only wait
for attempts in flight.

A claim with several targets is granted all or none. A holder never waits for more, so no two runs block each other.

A run on a job does not lock its nodes, which may be many and change. Attempts on common nodes or GPUs run one at
a time.

Drivers of open runs take the locks again after a restart.

A claim by a GPU's UUID excludes claims by indexes of its node, except those that agents report for other UUIDs.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

from trainmedic_core.target import Target, TargetKind
from trainmedic_server.domain.claim import Claim
from trainmedic_server.domain.topology import AgentTopology

_Group = tuple[str, str | None]
_CLUSTER = Target(TargetKind.CLUSTER).whole


# Not thread-safe: used only in the event loop.
class TargetLocks:
    def __init__(self, agents: Callable[[], AgentTopology] = AgentTopology) -> None:
        self._agents = agents
        self._seen: AgentTopology | None = None  # that all claims include
        self._looked: AgentTopology | None = None  # at the last `look_again`
        self._held = _Claims()
        self._keepers: set[str] = set()  # reservations in `_held`, for runs that are being admitted
        self._refused_keepers = _Claims()  # until `release`: later keepers must not pass them
        self._waiting = _Claims()
        self._grants: dict[str, asyncio.Future[None]] = {}  # of the waiting, by run ID
        self._acting = _Claims()  # of attempts in flight
        self._ends_awaited: list[asyncio.Future[None]] = []  # each is done when any attempt ends

    def try_acquire(self, run_id: str, claim: Claim) -> bool:
        """Lock the claim unless an overlapping one is locked or waited for. Return whether it did."""
        if self._held.has(run_id):
            return True
        claim = self._known(claim)
        if self._held.overlapping(claim) or self._waiting.overlapping(claim):
            return False
        self._held.add(run_id, claim)
        return True

    def try_keep(self, keeper: str, claim: Claim) -> bool:
        """Reserve the claim for a run to be admitted. Return False if an overlapping one is locked or came before.

        Each keeper needs `pass_on` or `release`, also if refused.
        """
        claim = self._known(claim)
        if self._refused_keepers.overlapping(claim) or not self.try_acquire(keeper, claim):
            self._refused_keepers.add(keeper, claim)
            return False
        self._keepers.add(keeper)
        return True

    def pass_on(self, keeper: str, run_id: str) -> None:
        claim = self._held.remove(keeper)
        assert claim is not None
        self._keepers.discard(keeper)
        self._held.add(run_id, claim)

    def wait(self, run_id: str, claim: Claim) -> asyncio.Future[None]:
        """Join the queue; `release` leaves it. The future is done once the claim is locked."""
        if run_id not in self._grants:
            self._waiting.add(run_id, self._known(claim))
            self._grants[run_id] = asyncio.get_running_loop().create_future()
        return self._grants[run_id]

    def holder(self, claim: Claim) -> str | None:
        """Return the run with an overlapping lock."""
        claim = self._known(claim)
        claims = self._held.possibly_overlapping(claim)  # reservations have no run yet
        return next((run for run, held in claims if run not in self._keepers and held.overlaps(claim)), None)

    def blocker(self, run_id: str, claim: Claim) -> str | None:
        """Return the run that must release its lock, or get it first."""
        if self._held.has(run_id):
            return None
        holder = self.holder(claim)
        if holder is not None or not self._waiting.has(run_id):
            return holder
        return self._waiting.overlapping(self._known(claim), before=run_id)

    def is_certain(self, claim: Claim, blocker: str) -> bool:
        """Return False if the blocker's GPU may be another."""
        its_claim = self._held.get(blocker) or self._waiting.get(blocker)
        return its_claim is None or self._known(claim).overlaps(its_claim, if_unknown=False)

    def release(self, run_id: str) -> None:
        """Unlock the claim or leave the queue. Idempotent."""
        self._keepers.discard(run_id)
        self._refused_keepers.remove(run_id)
        claim = self._held.remove(run_id) or self._waiting.remove(run_id)
        self._grants.pop(run_id, None)
        if claim is not None and self._grants:
            self._grant(self._waiting.possibly_overlapping(claim))

    def look_again(self) -> None:
        """Grant claims that agents' new reports show to be free."""
        self._learn()
        if self._looked is not self._seen:
            self._looked = self._seen
            self._grant(self._waiting.all())

    def _grant(self, waiting: Sequence[tuple[str, Claim]]) -> None:
        for waiter, its_claim in waiting:
            if self._held.overlapping(its_claim) or self._waiting.overlapping(its_claim, before=waiter):
                continue
            self._waiting.remove(waiter)
            self._held.add(waiter, its_claim)
            granted = self._grants.pop(waiter)
            if not granted.done():
                granted.set_result(None)

    def _known(self, claim: Claim) -> Claim:
        if all(target.kind is not TargetKind.GPU for target in (claim.target, *claim.also)):
            return claim
        self._learn()
        return claim.seen_by(self._agents())

    def _learn(self) -> None:
        agents = self._agents()
        if agents is self._seen or not agents.gpus_by_node:
            return
        self._seen = agents
        for claims in (self._held, self._refused_keepers, self._waiting, self._acting):
            claims.learn(agents)

    def acting(self, holder: str, *claims: Claim) -> _Acting:
        """Return a context without other attempts on overlapping claims. Entering returns whether it had to wait."""
        # It takes all claims together to avoid deadlocks.
        return _Acting(self, holder, claims)

    async def begin_acting(self, claims: Mapping[str, Claim]) -> bool:
        """Wait for attempts on overlapping claims. Return whether that was necessary."""
        waited = False
        while True:
            claims = {name: self._known(claim) for name, claim in claims.items()}
            if not any(map(self._acting.overlapping, claims.values())):
                break
            waited = True
            another_ended = asyncio.get_running_loop().create_future()
            self._ends_awaited.append(another_ended)
            await another_ended
        for name, claim in claims.items():
            self._acting.add(name, claim)
        return waited

    def end_acting(self, names: Iterable[str]) -> None:
        for name in names:
            self._acting.remove(name)
        waiters, self._ends_awaited = self._ends_awaited, []
        for another_ended in waiters:
            if not another_ended.done():
                another_ended.set_result(None)


class _Acting:
    # Cheaper than a generator, which the event loop tracks.

    def __init__(self, locks: TargetLocks, holder: str, claims: Sequence[Claim]) -> None:
        self._locks = locks
        self._claims = {f"{holder}/{number}": claim for number, claim in enumerate(claims)}

    async def __aenter__(self) -> bool:
        return await self._locks.begin_acting(self._claims)

    async def __aexit__(self, *error: object) -> None:
        self._locks.end_acting(self._claims)


class _Claims:
    """Ordered claims by holder. Targets of different groups overlap only with the cluster."""

    # Grouped because a storm may have ten thousand.

    def __init__(self) -> None:
        self._groups: dict[_Group, dict[str, Claim]] = {}
        self._by_name: dict[str, Claim] = {}
        self._numbers: dict[str, int] = {}
        self._next = 0

    def add(self, name: str, claim: Claim) -> None:
        self._by_name[name] = claim
        self._numbers[name] = self._next = self._next + 1
        for group in _groups(claim):
            self._groups.setdefault(group, {})[name] = claim

    def has(self, name: str) -> bool:
        return name in self._by_name

    def get(self, name: str) -> Claim | None:
        return self._by_name.get(name)

    def all(self) -> list[tuple[str, Claim]]:
        return list(self._by_name.items())

    def learn(self, agents: AgentTopology) -> None:
        for name, claim in self.all():
            known = claim.seen_by(agents)
            if known is not claim:
                self._by_name[name] = known
                for group in _groups(known):
                    self._groups[group][name] = known

    def remove(self, name: str) -> Claim | None:
        claim = self._by_name.pop(name, None)
        if claim is not None:
            del self._numbers[name]
            for key in _groups(claim):
                group = self._groups[key]
                del group[name]
                if not group:
                    del self._groups[key]
        return claim

    def possibly_overlapping(self, claim: Claim) -> list[tuple[str, Claim]]:
        # Those of the same groups, in order.
        claims = {name: each for group in self._groups_near(claim) for name, each in group.items()}
        return sorted(claims.items(), key=lambda named: self._numbers[named[0]])

    def overlapping(self, claim: Claim, before: str | None = None) -> str | None:
        """Return an overlapping holder, with `before` only of earlier claims."""
        if not self._by_name:
            return None
        end = self._numbers[before] if before is not None else None
        for group in self._groups_near(claim):
            for name, claimed in group.items():
                if end is not None and self._numbers[name] >= end:
                    break
                if claimed.overlaps(claim):
                    return name
        return None

    def _groups_near(self, claim: Claim) -> Iterator[dict[str, Claim]]:
        if claim.target.kind is TargetKind.CLUSTER:
            yield from self._groups.values()
            return
        for name in (*_groups(claim), _CLUSTER):
            if name in self._groups:
                yield self._groups[name]


def _groups(claim: Claim) -> set[_Group]:
    return {target.whole for target in (claim.target, *claim.also)}
