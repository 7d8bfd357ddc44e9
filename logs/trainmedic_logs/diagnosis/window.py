"""Selection of findings relevant to a failure."""

from __future__ import annotations

from collections.abc import Sequence

from msgspec import Struct

from trainmedic_logs.diagnosis.attribution import Moment, clock_of, moment_of, rank_of
from trainmedic_logs.diagnosis.clock_guess import ERROR
from trainmedic_logs.diagnosis.facts import Facts
from trainmedic_logs.domain.finding import CauseClass, Finding, Role
from trainmedic_logs.lines.blocks import TRACEBACK
from trainmedic_logs.lines.observation import GROUP_RANK

_RETRIED_RULE = "request-retried"  # counts only if there is nothing else
TRUSTED_SOURCES = frozenset({"kernel", "fabric-manager"})
"""Sources that jobs cannot write."""
# Longest delay of a step report.
_STEP_REPORT_DELAY_S = 30.0
# A step this long after a consequence shows that the job survived.
_SURVIVED_S = 60.0
# The kernel may report the cause this long after the first sign.
_KERNEL_DELAY_S = 60.0
# Ordinary lines after an exception that show that it was caught.
_LINES_AFTER_CAUGHT = 8
# Launchers cut longer texts.
_COMPARED_CHARACTERS = 120
# Oldest kernel line before the first sign, if no step is known.
_LONGEST_LEAD_S = 3600.0


class Relevant(Struct, frozen=True):
    """Findings that may belong to the failure, the earliest first."""

    trusted: Sequence[Finding]
    """Roots and confirmations of trusted sources."""
    roots: Sequence[Finding]
    cascades: Sequence[Finding]
    """Consequences, from the job's lines."""
    stopped: Sequence[Finding]
    """Lines about a requested end."""
    first_sign: Moment | None
    """None without one."""

    @property
    def victims(self) -> frozenset[int]:
        """Ranks that waited for or lost another rank."""
        waited = [finding for finding in self.cascades if finding.cause in (CauseClass.HANG, CauseClass.NETWORK)]
        own = {finding.origin.rank for finding in waited if finding.origin.rank is not None}
        return frozenset(own.union(*(finding.ranks for finding in waited)))

    def is_printed_by_victims(self, words: str) -> bool:
        return bool(words) and any(words[:_COMPARED_CHARACTERS] in finding.line for finding in self.cascades)


def select_relevant(facts: Facts) -> Relevant:
    own = [f for f in facts.findings if f.origin.source not in TRUSTED_SOURCES and f.shape not in facts.healthy_shapes]
    others = [f for f in facts.findings if f.rule != _RETRIED_RULE and not is_heading_only(f)]
    if others or facts.exits or facts.steps or facts.throughput_drop:
        own = [finding for finding in own if finding.rule != _RETRIED_RULE]
    has_failed = any(f.role is Role.CASCADE for f in own) or any(ended.is_failure for ended in facts.exits)
    recovered = [f for f in own if f.role is Role.ROOT and _has_recovered(f, facts, has_failed)]
    outlived = [f for f in own if f.role is Role.CASCADE and _was_outlived(f, facts)]
    survived = {finding.id for finding in (*recovered, *outlived)}
    lasting = [finding for finding in own if finding.id not in survived]
    roots = sorted((f for f in lasting if f.role is Role.ROOT and _may_be_origin(f)), key=lambda f: f.first_at)
    cascades = sorted((f for f in lasting if f.role is Role.CASCADE), key=lambda f: f.first_at)
    first_sign = _first_sign([*roots, *cascades], facts)
    trusted = [finding for finding in facts.findings if _is_trusted_and_near(finding, facts, first_sign)]
    trusted.sort(key=lambda finding: finding.first_at)
    stopped = sorted((f for f in lasting if f.cause is CauseClass.PREEMPTION), key=lambda f: f.first_at)
    return Relevant(trusted, roots, cascades, stopped, first_sign)


def is_heading_only(finding: Finding) -> bool:
    return finding.line.startswith(TRACEBACK)  # the traceback's end is missing


def _was_outlived(finding: Finding, facts: Facts) -> bool:
    if finding.id in facts.outlived:
        return True
    last = Moment(finding.last_at, finding.clock_error, clock_of(finding))
    progressed_at = facts.progressed_at
    return progressed_at is not None and last.is_before(Moment(progressed_at, finding.clock_error), by=_SURVIVED_S)


def _may_be_origin(finding: Finding) -> bool:
    if finding.cause is CauseClass.HOST_MEMORY:
        return "process" not in finding.fields  # only the kernel states reliably which process it killed
    return finding.cause is not CauseClass.UNKNOWN  # ends of processes are judged by `Facts.exits`


def _has_recovered(finding: Finding, facts: Facts, has_failed: bool) -> bool:
    if finding.id in facts.outlived:
        return True
    if finding.cause is CauseClass.NUMERICS:
        return False  # steps continue with wrong numbers too
    if not has_failed and facts.followed.get(finding.id, 0) >= _LINES_AFTER_CAUGHT:
        return True
    rank = finding.origin.rank if GROUP_RANK in finding.fields else rank_of(finding)
    progressed_at = facts.progressed_at
    if rank is not None:
        known = facts.ranks.get(rank)
        progressed_at = known.last_step_at if known else None
    last = Moment(finding.last_at, finding.clock_error, clock_of(finding))
    return progressed_at is not None and last.is_before(Moment(progressed_at), by=1.0)


def _first_sign(findings: Sequence[Finding], facts: Facts) -> Moment | None:
    # Wrong numbers may precede a failure by hours.
    moments = [moment_of(finding) for finding in findings if finding.cause is not CauseClass.NUMERICS]
    # torchrun's tables have local times, possibly off by hours.
    moments += [Moment(e.at) for e in facts.exits if e.at and e.is_failure and e.reporter != "torchrun"]
    return min(moments, key=lambda moment: moment.at, default=None)


def _is_trusted_and_near(finding: Finding, facts: Facts, first_sign: Moment | None) -> bool:
    if finding.origin.source not in TRUSTED_SOURCES or finding.role not in (Role.ROOT, Role.CONFIRMATION):
        return False
    moment = moment_of(finding)
    if first_sign and first_sign.plus(_KERNEL_DELAY_S).is_before(moment):
        return False
    if facts.began_at is not None and moment.is_before(Moment(facts.began_at, ERROR), by=_STEP_REPORT_DELAY_S):
        return False
    last = Moment(finding.last_at, finding.clock_error, clock_of(finding))
    if finding.is_over and first_sign and last.is_before(first_sign):
        return False  # the fault ended before the failure
    if facts.progressed_at is not None:
        return not moment.is_before(Moment(facts.progressed_at), by=_STEP_REPORT_DELAY_S)
    return first_sign is None or not moment.is_before(first_sign, by=_LONGEST_LEAD_S)
