"""What one witness says: who it was, why, since when, and how much that is worth by itself."""

from __future__ import annotations

from datetime import datetime, timedelta
from enum import IntEnum

from msgspec import Struct
from msgspec.structs import replace

from trainmedic_logs.diagnosis.verdict import Confidence, Evidence
from trainmedic_logs.domain.finding import CauseClass, Finding, Role

_LONGEST_RANK = 6
"""Longest number of a rank, in digits."""
_USELESS = 86400.0
RERUN = "rerun-result"
"""Shipped rule for the results of recomputed steps."""


class Witness(IntEnum):
    """Who says it, the strongest first."""

    KERNEL = 1
    RECORDER = 2
    LINE = 3
    """The first line of a training or launcher that can be where it began."""
    NODE = 4
    """A node that is not there any more."""
    EXIT = 5
    PURPOSE = 6
    """Somebody, or a scheduler, ended it, and nothing failed before."""
    TIMED_OUT = 7
    """All others timed out, and who did not was busy elsewhere."""
    STRAGGLER = 8


class Moment(Struct, frozen=True):
    """A time by one clock, and by how much that may be wrong."""

    at: datetime
    error: float = 0.0
    """Seconds by which it may differ from another clock's."""
    clock: str = ""
    """Whose clock it is: times of the same one have an order whatever the error. Empty where it is not known."""

    @property
    def is_known(self) -> bool:
        """Whether it says anything: of a kernel's log without times a line may be of last month."""
        return self.error < _USELESS

    def is_before(self, other: Moment, by: float = 0.0) -> bool:
        """Whether it certainly was before `other`, and by at least so many seconds: the clocks' errors do not hide
        it."""
        is_same_clock = bool(self.clock) and self.clock == other.clock
        error = 0.0 if is_same_clock else self.error + other.error
        return (other.at - self.at).total_seconds() > error + by

    def plus(self, seconds: float) -> Moment:
        """The moment so many seconds later."""
        return Moment(self.at + timedelta(seconds=seconds), self.error, self.clock)


class Attribution(Struct, frozen=True):
    """One witness's word."""

    witness: Witness
    cause: CauseClass
    confidence: Confidence
    """If nobody else said anything."""
    evidence: tuple[Evidence, ...]
    ranks: frozenset[int] = frozenset()
    node: str = ""
    """Where; whether it is at fault is another question."""
    gpu: str | None = None
    moment: Moment | None = None
    is_trusted: bool = False
    """No job can have written it: the kernel, the fabric manager, or the server that sees a node or not."""
    is_proven: bool = False
    """It names the very process that ended, by its number: nothing that happened beside it makes it less sure."""
    is_kill: bool = False
    """It tells of a process that SIGKILL ended, where none ended by itself."""
    names_node: bool = False
    """It would be the node's own fault."""
    is_provable: bool = True
    """True if the cause is certain, so that another evidence source for the same place gives high confidence. False if
    a message only makes the cause likely: the way in which the process ended does not confirm it."""
    has_started: bool = True
    """False if the fault kept the job, or a part of it, from starting. Another attempt without a change then fails
    alike."""
    fingerprint: str = ""

    def with_confidence(self, confidence: Confidence) -> Attribution:
        """The same, worth more or less."""
        return replace(self, confidence=confidence)

    def is_before(self, other: Attribution) -> bool:
        """Whether it is certain that this was first."""
        return self.moment is not None and other.moment is not None and self.moment.is_before(other.moment)

    def concerns(self, other: Attribution) -> bool:
        """Whether both mean the same place: a rank in common, or, where one of them knows no rank, the same node.

        Where nobody knows on which node a rank was, a line of some node's kernel is not about it.
        """
        if self.ranks and other.ranks:
            return bool(self.ranks & other.ranks)
        return self.node == other.node


def moment_of(finding: Finding) -> Moment:
    """When a finding began."""
    return Moment(finding.first_at, finding.clock_error, clock_of(finding))


def clock_of(finding: Finding) -> str:
    """Whose clock a finding's times are by: its node's, or where that is not known its stream's."""
    origin = finding.origin
    has_times = finding.clock_error < _USELESS
    return f"node {origin.node}" if origin.node and has_times else f"stream {origin.stream}"


def evidence_of(finding: Finding, why: str) -> Evidence:
    """A finding as evidence; without a time where that is only guessed."""
    origin = finding.origin
    at = finding.first_at if moment_of(finding).is_known else None
    return Evidence(why, finding.line, origin.source, origin.node, rank_of(finding), at, finding.rule)


def rank_of(finding: Finding) -> int | None:
    """The rank whose line began the finding; None where it is not known."""
    # A line about NaN, a recomputed step or a stuck rank names that rank, whichever rank printed it.
    is_stuck = finding.cause is CauseClass.HANG and finding.role is Role.ROOT
    is_about = finding.cause is CauseClass.NUMERICS or finding.rule == RERUN or is_stuck
    number = finding.fields.get("rank", "") if is_about else ""
    if number.isdecimal() and len(number) <= _LONGEST_RANK:
        return int(number)
    if finding.origin.rank is not None:
        return finding.origin.rank
    return next(iter(finding.ranks)) if len(finding.ranks) == 1 else None
