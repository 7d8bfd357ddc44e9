"""Next act of a group's parent run: start members, wait, or end.

It is derived from the frozen list and the members that have a run.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime

from msgspec import Struct

from trainmedic_server.domain.group import SHOWN, Member, counted
from trainmedic_server.domain.group_counts import GroupCounts
from trainmedic_server.domain.playbook import Rollout

AT_ONCE = 200  # most members that start in one transaction

DEFAULTS = Rollout()  # for playbooks without ``rollout``


class StartMembers(Struct, frozen=True):
    """Start up to `count` members in a batch, numbered from 0."""

    batch: int
    count: int


class WaitForMembers(Struct, frozen=True):
    """Wait until a member closes."""


class RolloutOver(Struct, frozen=True):
    error: str = ""  # empty for success


class GroupProgress:
    """A group's list and members, with counts kept up to date. One parent's driver owns it."""

    def __init__(self, members: Sequence[str], begun: Sequence[Member] = ()) -> None:
        self.members = tuple(members)
        self._begun: dict[str, Member] = {}
        self._filled: Counter[int] = Counter()  # members by batch, without skipped ones
        self.open = self.errors = 0
        self.has_acted = False
        self.held = ""
        """Why no further member starts; empty if one can."""
        self.waits_for_own = False  # `held`, because its own members take the capacity
        self.tries_again: datetime | None = None
        """When `held` may have changed; None if unknown."""
        self.settling: dict[str, datetime] = {}  # by target
        """When nodes of just closed members become available, because the topology lags."""
        self.refused = ""  # why the breaker refuses the whole list
        for member in begun:
            self.note(member)

    def note(self, member: Member) -> None:
        """Record a member's state."""
        # Change counts by the difference, because thousands of members close one by one.
        before = self._begun.get(member.target)
        if before is not None:
            self._count(before, -1)
        self._begun[member.target] = member
        self._count(member, 1)

    def _count(self, member: Member, by: int) -> None:
        self.open += by * member.is_open
        self.errors += by * member.is_error
        self._filled[member.batch] += by * (not member.is_skipped)
        self.has_acted |= member.has_acted

    def filled(self, batch: int) -> int:
        return self._filled[batch]

    @property
    def begun(self) -> Mapping[str, Member]:
        return self._begun

    @property
    def counts(self) -> GroupCounts:
        return counted(len(self.members), self._begun.values())

    def left(self) -> list[str]:
        return [target for target in self.members if target not in self._begun]

    def of_batch(self, batch: int) -> list[Member]:
        return [member for member in self._begun.values() if member.batch == batch]

    @property
    def last_batch(self) -> int | None:
        return max(self._filled, default=None)


def next_of(
    rollout: Rollout, progress: GroupProgress, *, may_start: bool
) -> StartMembers | WaitForMembers | RolloutOver:
    """Return the next instruction. `may_start` is False after the end of the alert.

    Batch n+1 starts only when all members of n are closed. Skipped members are replaced within their batch.
    """
    total = len(progress.members)
    is_open, allowed = progress.open > 0, rollout.errors_allowed(total)
    left = total - len(progress.begun)
    if progress.errors > allowed:
        return WaitForMembers() if is_open else RolloutOver(_too_many(progress.errors, allowed, left))
    if left and may_start:
        batch = progress.last_batch or 0
        room = rollout.batch(batch, total) - progress.filled(batch)
        if room > 0:
            return StartMembers(batch, min(room, left, AT_ONCE))
        if not is_open:
            return StartMembers(batch + 1, min(rollout.batch(batch + 1, total), left, AT_ONCE))
    return WaitForMembers() if is_open else RolloutOver()


def chosen(rollout: Rollout, left: Sequence[str], count: int, run_id: str, is_busy: Callable[[str], bool]) -> list[str]:
    """`is_busy` returns whether jobs use a member."""
    match rollout.order:
        case "random":  # the same after a restart
            ordered = sorted(left, key=lambda target: hashlib.sha256(f"{run_id}{target}".encode()).digest())
        case "idle_first":
            ordered = sorted(left, key=is_busy)
        case _:
            ordered = list(left)
    return ordered[:count]


def exceptions(members: Sequence[Member]) -> dict[str, str]:
    """Return why members did not succeed, by target, up to `SHOWN`."""
    odd = [member for member in members if not member.is_open and not member.is_fine]
    return {member.target: member.why for member in odd[:SHOWN]}


def _too_many(errors: int, allowed: int, left: int) -> str:
    failed = f"{errors} member{'s' if errors > 1 else ''} failed, and max_errors is {allowed}"
    return f"{failed}; {left} did not begin" if left else failed
