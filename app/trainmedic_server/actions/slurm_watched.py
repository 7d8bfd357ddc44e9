"""Watch of drains, holds and reservations. Only those that the last reading of Slurm does not show cost a call.

Slurm does not show who ended one, so a loss is only recorded. Only a leased drain is made again, if the end of its
lease explains that.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from datetime import datetime, timedelta
from typing import Any, ClassVar

from msgspec import Struct

from trainmedic_server.actions.slurm import NodeAction, SlurmAction
from trainmedic_server.domain.topology import SlurmTopology
from trainmedic_server.errors import ActionFailure, ClusterUnavailable, ObjectMissing, TemporaryFailure
from trainmedic_server.ports.actions import LeasedEffect, Renewal, Services
from trainmedic_server.ports.slurm import SlurmNode

LONGEST_LEASE = timedelta(hours=1)
CHECK_EVERY = timedelta(seconds=15)
# Least time of a round: `until` may be 15 s away, but one call of Slurm takes up to 20 s.
_ROUND = timedelta(seconds=100)
# Time after which a change counts as stored: slurmctld stores it within about 5 s.
_UNSAVED = timedelta(seconds=10)
# No check this long before an effect's own end: Slurm counts from before `applied_at`, so it may end earlier.
_LAST = timedelta(minutes=1)


class Known(Struct):
    """Knowledge of this process about one effect."""

    asked_at: datetime  # last round that reached this effect
    key: tuple[str, str] = ("", "")  # place, and run
    seen_at: datetime | None = None  # last reading with the effect, or another's in its place
    ended_at: datetime | None = None  # first reading since then without it
    renewed_at: datetime | None = None  # when the lease was last extended
    ends_at: datetime | None = None  # end of the lease, if this process knows it and only it can end the effect
    has_expired: bool = False  # the end of its lease was seen to have ended it
    is_begun: bool = False  # a failed attempt to make it again may have made it


class SlurmEffect(Struct, frozen=True):
    """State of an effect in Slurm."""

    place: str  # NodeName, or such as ``job 4711``
    why: str  # state of the node or job, for people
    is_ours: bool
    is_taken: bool = False  # not ours, but another keeps jobs off
    is_changed: bool = False  # another has changed it, and it must be left
    node: SlurmNode | None = None

    @property
    def is_free(self) -> bool:
        return not (self.is_ours or self.is_taken or self.is_changed)


class WatchedAction(SlurmAction):
    """Implements `ports.actions.LeasedAction`."""

    lease: ClassVar[timedelta] = LONGEST_LEASE

    def __init__(self, services: Services) -> None:
        super().__init__(services)
        self._known: dict[str, Known] = {}  # by command ID
        self._busy: set[str] = set()  # IDs of commands that an earlier round still asks about

    @abstractmethod
    async def look(self, effect: LeasedEffect) -> SlurmEffect | None:
        """Return None if it needs no watch. Raises like `ports.slurm.Slurm`."""

    @abstractmethod
    def name_in(self, effect: LeasedEffect, topology: SlurmTopology) -> str:
        """Return its name in `Withheld`, empty if unknown."""

    def stands(self, effect: LeasedEffect, name: str, topology: SlurmTopology) -> bool:
        """Return whether the last reading shows it, or that no job starts there."""
        return name in topology.unavailable

    def own_end(self, effect: LeasedEffect) -> timedelta | None:
        """Return the time from the step after which Slurm ends it."""
        return None

    def time_left(self, effect: LeasedEffect) -> timedelta | None:  # None without an end of its own
        end = self.own_end(effect)
        if end is None or effect.applied_at is None:
            return None if end is None else timedelta(0)  # 0: the end is unknown, so the effect is not checked
        return effect.applied_at + end - self._clock.now()

    @classmethod
    def granted(cls, output: Mapping[str, Any]) -> timedelta:
        return 3 * CHECK_EVERY  # the server calls `renew` in each third

    async def renew(self, effects: Sequence[LeasedEffect], until: datetime) -> Sequence[Renewal]:
        """The result omits effects that need no check."""
        until = max(until, self._clock.now() + _ROUND)
        oldest = self._clock.now() - 2 * LONGEST_LEASE
        self._known = {name: known for name, known in self._known.items() if known.asked_at > oldest}
        # Slow answers may end the round: begin with those that waited longest.
        ordered = sorted(
            effects, key=lambda each: known.asked_at if (known := self._known.get(each.command_id)) else oldest
        )
        renewals = []
        for effect in ordered:
            if self._clock.now() >= until:
                break
            if effect.command_id in self._busy and not effect.again:
                continue
            self._busy.add(effect.command_id)
            try:
                renewals.append(await self._renew_one(effect))
            finally:
                self._busy.discard(effect.command_id)
        return [renewal for renewal in renewals if renewal is not None]

    async def _renew_one(self, effect: LeasedEffect) -> Renewal | None:
        now, topology = self._clock.now(), self.services.slurm_topology()
        known = self._known.setdefault(effect.command_id, Known(now))
        known.asked_at = now
        place = effect.target.node or effect.target.job or ""
        left = self.time_left(effect)
        if left is not None and left <= _LAST:  # Slurm ends it
            return Renewal(effect, place, "lost", "its time is over") if effect.again else None
        if not effect.again and self._needs_no_check(effect, known, topology):
            return None
        try:
            found = await self.look(effect)
            if found is None:
                return None
            place = found.place
            self._note(effect, known, found)
            return await self._judge(effect, found, known)
        except (ClusterUnavailable, TemporaryFailure) as error:
            return Renewal(effect, place, "unanswered", str(error))
        except ObjectMissing as error:
            return Renewal(effect, place, "lost", str(error))
        except ActionFailure as error:
            return Renewal(effect, place, "refused", str(error))

    async def _judge(self, effect: LeasedEffect, found: SlurmEffect, known: Known) -> Renewal | None:
        if found.is_ours:
            return Renewal(effect, found.place, "renewed")
        if found.is_taken:
            return None  # another's may have been there before the step
        return Renewal(effect, found.place, "lost", found.why)

    def _note(self, effect: LeasedEffect, known: Known, found: SlurmEffect) -> None:
        now = self._clock.now()
        if found.is_ours or found.is_taken:
            known.seen_at = now
        if found.is_ours:
            known.ended_at, known.is_begun = None, False
        elif known.ended_at is None:
            known.ended_at = now

    def is_due(self, effect: LeasedEffect, known: Known) -> bool:
        return False

    def _needs_no_check(self, effect: LeasedEffect, known: Known, topology: SlurmTopology) -> bool:
        made_at = effect.applied_at
        if self.is_due(effect, known):
            return False
        name = self.name_in(effect, topology)
        stands = bool(name) and self.stands(effect, name, topology)
        is_stored = known.seen_at is not None and (made_at is None or known.seen_at >= made_at + _UNSAVED)
        # While Slurm does not answer, only a lease that is due gets a call.
        return not topology.answers or (stands and is_stored)


class WatchedNodeAction(WatchedAction, NodeAction):
    def name_in(self, effect: LeasedEffect, topology: SlurmTopology) -> str:
        name = effect.target.node or ""
        nodes = topology.names.called(name) or topology.names.related(name)
        return next(iter(nodes)) if len(nodes) == 1 else ""


class LeasedNodeAction(WatchedNodeAction):
    """Some effects have a lease, which is renewed."""

    @abstractmethod
    def lease_of(self, effect: LeasedEffect) -> timedelta | None: ...

    @abstractmethod
    async def extend(self, effect: LeasedEffect, lease: timedelta, found: SlurmEffect, known: Known) -> None: ...

    @abstractmethod
    async def make_again(self, effect: LeasedEffect, found: SlurmEffect) -> None: ...

    @abstractmethod
    def can_join(self, found: SlurmEffect) -> bool:
        """Return whether only other runs have taken it."""

    def note_end(self, node: str, run_ids: Sequence[str], ends_at: datetime | None) -> None:
        """Note the end of a node's shared effect."""
        for known in self._known.values():
            place, run_id = known.key
            if place == node:  # an expired effect too: it may be made again as a part of this one
                known.ends_at = ends_at if run_id in run_ids or known.has_expired else None

    def is_due(self, effect: LeasedEffect, known: Known) -> bool:
        lease = self.lease_of(effect)
        return lease is not None and (known.renewed_at is None or self._clock.now() >= known.renewed_at + lease / 3)

    def _note(self, effect: LeasedEffect, known: Known, found: SlurmEffect) -> None:
        super()._note(effect, known, found)
        known.key = (found.place, effect.run_id)
        if found.is_taken:
            known.has_expired = known.has_expired and self.can_join(found)
            # A node that is free before this end was returned by a person.
            known.ends_at = found.node.resume_after if known.has_expired and found.node is not None else None
        elif not found.is_free or known.ends_at is None or self._clock.now() < known.ends_at:
            known.has_expired = False

    async def _judge(self, effect: LeasedEffect, found: SlurmEffect, known: Known) -> Renewal | None:
        lease = self.lease_of(effect)
        if lease is None:
            return await super()._judge(effect, found, known)
        if found.is_ours:
            await self.extend(effect, lease, found, known)
            return Renewal(effect, found.place, "renewed")
        known.has_expired = known.has_expired or self._is_ended_by_lease(found, known)
        has_expired = known.has_expired and not known.is_begun
        if not (effect.again and has_expired):
            return Renewal(effect, found.place, "lost", found.why, has_expired=has_expired)
        known.is_begun = True
        try:
            await self.make_again(effect, found)
        except ActionFailure as error:
            known.is_begun = may_be_done(error)
            raise
        now = self._clock.now()
        self._known[effect.command_id] = Known(now, known.key, seen_at=now, renewed_at=now, ends_at=known.ends_at)
        return Renewal(effect, found.place, "renewed")

    def _is_ended_by_lease(self, found: SlurmEffect, known: Known) -> bool:
        """Return False if it ended earlier, or after a restart of the server."""
        ends_at = known.ends_at
        if not found.is_free or known.is_begun or ends_at is None or self._clock.now() < ends_at:
            return False
        return known.ended_at is None or known.ended_at >= ends_at


def may_be_done(error: ActionFailure) -> bool:
    return bool(getattr(error, "may_be_done", isinstance(error, TemporaryFailure)))
