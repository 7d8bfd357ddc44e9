"""Members of groups, and the frozen lists of their parent runs."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence

from msgspec import Struct

from trainmedic_core import words
from trainmedic_server.domain.group_counts import GroupCounts
from trainmedic_server.domain.run import Decision, Run, Status

SHOWN = 20  # members that events and answers list


class Member(Struct, frozen=True):
    """A member that has a run."""

    target: str
    run_id: str
    batch: int
    status: Status
    decision: Decision
    is_unfinished: bool  # True if it is open or owes an undo
    has_acted: bool = False
    why: str = ""  # the run's message

    @classmethod
    def of(cls, run: Run) -> Member:
        unfinished, acted = run.is_open or run.owes_undo, run.acted_at is not None
        return cls(run.target_key, run.id, run.batch or 0, run.status, run.decision, unfinished, acted, run.message)

    @property
    def is_open(self) -> bool:
        return self.status.is_open

    @property
    def is_fine(self) -> bool:
        return self.status in (Status.SUCCEEDED, Status.OBSERVED)

    @property
    def is_error(self) -> bool:
        """True if it counts for ``max_errors``. A failed run includes a step of unknown outcome."""
        return self.status is Status.FAILED or self.decision is Decision.BREAKER_OPEN

    @property
    def is_skipped(self) -> bool:
        """True if nothing was done, so that another takes its place."""
        return self.status is Status.NOT_STARTED and not self.is_error


def counted(total: int, members: Iterable[Member]) -> GroupCounts:
    return counted_together(total, ((member, 1) for member in members))


def counted_together(total: int, members: Iterable[tuple[Member, int]]) -> GroupCounts:
    """Count (member, number of equal members) pairs."""
    counts = dict.fromkeys(("open", "succeeded", "failed", "skipped", "cancelled", "observed", "owing"), 0)
    begun, batch = 0, None
    for member, number in members:
        begun += number
        counts[_kind(member)] += number
        counts["owing"] += number * (member.is_unfinished and not member.is_open)
        batch = max(batch or 0, member.batch + 1)
    return GroupCounts(total, total - begun, **counts, batch=batch)


def _kind(member: Member) -> str:
    if member.is_open:
        return "open"
    if member.is_error:
        return "failed"
    if member.is_fine:
        return str(member.status)
    return "skipped" if member.status is Status.NOT_STARTED else "cancelled"


def size(members: int) -> str:
    return words.count(members, "member")


def digest(members: Sequence[str]) -> str:
    """Hash a frozen list of target keys."""
    return hashlib.sha256("\n".join(members).encode()).hexdigest()[:12]
