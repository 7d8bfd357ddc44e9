"""Selection of findings relevant to a failure."""

from __future__ import annotations

from collections.abc import Sequence

from msgspec import Struct

from trainmedic_logs.diagnosis.attribution import Moment, clock_of, moment_of, rank_of
from trainmedic_logs.diagnosis.clock_guess import ERROR
from trainmedic_logs.diagnosis.facts import Facts
from trainmedic_logs.domain.finding import CauseClass, Finding, Role

TRUSTED_SOURCES = frozenset({"kernel", "fabric-manager"})
"""Sources that jobs cannot write."""
_SETTLING = 30.0
"""Seconds of delay of a step report."""
_STEP_LATER = 60.0
"""A step this many seconds after a consequence shows that the job survived."""
_LATE = 60.0
"""Seconds in which the kernel may still report the cause."""
_FEW_LINES = 8
"""Ordinary lines that show a caught exception."""
_FEW_WORDS = 120
"""Compared characters: texts may be cut."""
_LONGEST_BEFORE = 3600.0
"""Seconds before the first sign, if no step is known."""


class Relevant(Struct, frozen=True):
    trusted: Sequence[Finding]
    """Roots and confirmations of trusted sources."""
    roots: Sequence[Finding]
    cascades: Sequence[Finding]
    """Consequences, from the job's lines."""
    stopped: Sequence[Finding]
    recovered: Sequence[Finding]
    """Roots that the same rank survived."""
    ended: Moment | None

    @property
    def victims(self) -> frozenset[int]:
        """Ranks that waited for or lost another rank."""
        waited = [finding for finding in self.cascades if finding.cause in (CauseClass.HANG, CauseClass.NETWORK)]
        own = {finding.origin.rank for finding in waited if finding.origin.rank is not None}
        return frozenset(own.union(*(finding.ranks for finding in waited)))

    def is_said_by_victims(self, words: str) -> bool:
        return bool(words) and any(words[:_FEW_WORDS] in finding.line for finding in self.cascades)


def relevant(facts: Facts) -> Relevant:
    own = [f for f in facts.findings if f.origin.source not in TRUSTED_SOURCES and f.shape not in facts.healthy_shapes]
    has_failed = any(f.role is Role.CASCADE for f in own) or any(ended.is_failure for ended in facts.exits)
    recovered = [f for f in own if f.role is Role.ROOT and _went_on(f, facts, has_failed)]
    outlived = [f for f in own if f.role is Role.CASCADE and _was_outlived(f, facts)]
    well = {finding.id for finding in (*recovered, *outlived)}
    open_ = [finding for finding in own if finding.id not in well]
    roots = sorted((f for f in open_ if f.role is Role.ROOT and _says_why(f)), key=lambda f: f.first_at)
    cascades = sorted((f for f in open_ if f.role is Role.CASCADE), key=lambda f: f.first_at)
    ended = _first_sign([*roots, *cascades], facts)
    trusted = [finding for finding in facts.findings if _is_near(finding, facts, ended)]
    trusted.sort(key=lambda finding: finding.first_at)
    stopped = sorted((f for f in open_ if f.cause is CauseClass.PREEMPTION), key=lambda f: f.first_at)
    return Relevant(trusted, roots, cascades, stopped, recovered, ended)


def _was_outlived(finding: Finding, facts: Facts) -> bool:
    if finding.id in facts.outlived:
        return True
    last = Moment(finding.last_at, finding.clock_error, clock_of(finding))
    progressed_at = facts.progressed_at
    return progressed_at is not None and last.is_before(Moment(progressed_at, finding.clock_error), by=_STEP_LATER)


def _says_why(finding: Finding) -> bool:
    """Return whether a job line can be the origin.

    Ends of processes come from exits, and OOM kills of others only from the kernel.
    """
    if finding.cause is CauseClass.HOST_MEMORY:
        return "process" not in finding.fields
    return finding.cause is not CauseClass.UNKNOWN


def _went_on(finding: Finding, facts: Facts, has_failed: bool) -> bool:
    """Return whether the rank continued; non-finite losses prove nothing."""
    if finding.id in facts.outlived:
        return True
    if finding.cause is CauseClass.NUMERICS:
        return False
    if not has_failed and facts.followed.get(finding.id, 0) >= _FEW_LINES:
        return True
    rank = rank_of(finding)
    known = facts.ranks.get(rank) if rank is not None else None
    own = known.last_step_at if known else None
    progressed_at = own or (facts.progressed_at if rank is None else None)
    last = Moment(finding.last_at, finding.clock_error, clock_of(finding))
    return progressed_at is not None and last.is_before(Moment(progressed_at), by=1.0)


def _first_sign(findings: Sequence[Finding], facts: Facts) -> Moment | None:
    moments = [moment_of(finding) for finding in findings if finding.cause is not CauseClass.NUMERICS]
    # Tables have local times, possibly off by hours.
    moments += [Moment(e.at) for e in facts.exits if e.at and e.is_failure and e.teller != "torchrun"]
    return min(moments, key=lambda moment: moment.at, default=None)


def _is_near(finding: Finding, facts: Facts, ended: Moment | None) -> bool:
    if finding.origin.source not in TRUSTED_SOURCES or finding.role not in (Role.ROOT, Role.CONFIRMATION):
        return False
    moment = moment_of(finding)
    if ended and ended.plus(_LATE).is_before(moment):
        return False
    if facts.began_at is not None and moment.is_before(Moment(facts.began_at, ERROR), by=_SETTLING):
        return False
    if finding.is_over and ended and Moment(finding.last_at, finding.clock_error, clock_of(finding)).is_before(ended):
        return False
    if facts.progressed_at is not None:
        return not moment.is_before(Moment(facts.progressed_at), by=_SETTLING)
    return ended is None or not moment.is_before(ended, by=_LONGEST_BEFORE)
