"""Attributions: statements of evidence sources about a failure."""

from __future__ import annotations

from datetime import datetime, timedelta
from enum import IntEnum

from msgspec import Struct
from msgspec.structs import replace

from trainmedic_logs.diagnosis.verdict import Confidence, Evidence
from trainmedic_logs.domain.finding import CauseClass, Finding, Role
from trainmedic_logs.lines.observation import GROUP_RANK

# Digits of a rank in a line.
_LONGEST_RANK = 6
# Clock error, in seconds, from which a time says nothing.
_USELESS = 86400.0
RERUN = "rerun-result"
"""Rule: a step computed again had another result."""


class EvidenceSource(IntEnum):
    """The strongest first."""

    KERNEL = 1  # also the fabric manager, and Kubernetes' statuses of pods
    RECORDER = 2  # flight recorder, or the watchdog's lines about collectives
    LINE = 3
    """First possible origin in a training's or launcher's lines."""
    NODE = 4
    """A node that disappeared or is not ready."""
    EXIT = 5  # also Kubernetes' events, and OOM kills that a scheduler reports
    PURPOSE = 6
    """Ended by a user or scheduler."""
    TIMED_OUT = 7  # the ranks that did not time out
    STRAGGLER = 8  # the ranks with the earliest last step


class Moment(Struct, frozen=True):
    at: datetime
    error: float = 0.0
    """Maximum clock difference in seconds."""
    clock: str = ""
    """Times of one clock are ordered regardless of the error. Empty if unknown."""

    @property
    def is_known(self) -> bool:
        return self.error < _USELESS

    def is_before(self, other: Moment, by: float = 0.0) -> bool:
        """Return whether it was certainly over `by` seconds earlier."""
        is_same_clock = bool(self.clock) and self.clock == other.clock
        error = 0.0 if is_same_clock else self.error + other.error
        return (other.at - self.at).total_seconds() > error + by

    def plus(self, seconds: float) -> Moment:
        return Moment(self.at + timedelta(seconds=seconds), self.error, self.clock)


class Attribution(Struct, frozen=True):
    """Statement of one evidence source."""

    source: EvidenceSource
    cause: CauseClass
    confidence: Confidence
    """Confidence without other evidence."""
    evidence: tuple[Evidence, ...]
    ranks: frozenset[int] = frozenset()
    node: str = ""
    """Node where it happened, not necessarily at fault (see `names_node`)."""
    gpu: str | None = None
    moment: Moment | None = None
    is_trusted: bool = False
    """Not the job's words: kernel, fabric manager, or the server's view."""
    is_proven: bool = False
    """Names the ended process or pod, so simultaneous events do not matter."""
    is_kill: bool = False
    """SIGKILL ended a process, and no first end has an exit code."""
    names_node: bool = False  # the node is at fault
    is_provable: bool = True
    """False if a message only makes the cause likely."""
    has_started: bool = True
    """False if the fault prevented the start."""
    place: str = ""
    """Words for what has no rank of the job."""
    fingerprint: str = ""

    def with_confidence(self, confidence: Confidence) -> Attribution:
        return replace(self, confidence=confidence)

    def is_before(self, other: Attribution) -> bool:
        return self.moment is not None and other.moment is not None and self.moment.is_before(other.moment)

    def concerns(self, other: Attribution) -> bool:
        """Return whether both share a rank or, if one has none, the node. Unknown nodes are equal."""
        if self.ranks and other.ranks:
            return bool(self.ranks & other.ranks)
        return self.node == other.node


def moment_of(finding: Finding) -> Moment:
    return Moment(finding.first_at, finding.clock_error, clock_of(finding))


def clock_of(finding: Finding) -> str:
    """Return the clock of a finding's times: its node's, else its stream's."""
    # Without times, lines have only their order in the stream.
    origin = finding.origin
    has_times = finding.clock_error < _USELESS
    return f"node {origin.node}" if origin.node and has_times else f"stream {origin.stream}"


def evidence_of(finding: Finding, why: str) -> Evidence:
    origin = finding.origin
    at = finding.first_at if moment_of(finding).is_known else None
    return Evidence(why, finding.line, origin.source, origin.node, rank_of(finding), at, finding.rule)


def rank_of(finding: Finding) -> int | None:
    """Return the affected rank; None if unknown."""
    if GROUP_RANK in finding.fields:
        return None
    # Lines about NaN, recomputed steps and stuck ranks name the affected rank, which need not have printed them.
    is_stuck = finding.cause is CauseClass.HANG and finding.role is Role.ROOT
    is_about = finding.cause is CauseClass.NUMERICS or finding.rule == RERUN or is_stuck
    number = finding.fields.get("rank", "") if is_about else ""
    if number.isdecimal() and len(number) <= _LONGEST_RANK:
        return int(number)
    if finding.origin.rank is not None:
        return finding.origin.rank
    return next(iter(finding.ranks)) if len(finding.ranks) == 1 else None
