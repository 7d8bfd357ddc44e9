"""Which findings can have to do with a failure: by when they were, and by whether the training went on after them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from trainmedic_server.diagnosis.accusation import Moment, moment_of, rank_of
from trainmedic_server.diagnosis.facts import Facts
from trainmedic_server.domain.finding import CauseClass, Finding, Role

TRUSTED_SOURCES = frozenset({"kernel", "fabric-manager"})
"""What no job can write to. The rest it can: whatever a job prints is about the job."""
_SETTLING = 30.0
"""Seconds by which a step may be told later than it was done."""
_LATE = 60.0
"""Seconds after the first sign of the end in which its reason is still told."""
_LONGEST_BEFORE = 3600.0
"""Seconds before the first sign of the end, where no step says how far the training came."""


@dataclass(frozen=True, slots=True)
class Relevant:
    """The findings that count, each kind in the order of time."""

    trusted: Sequence[Finding]
    """Roots and confirmations of the kernel and the fabric manager."""
    roots: Sequence[Finding]
    """Of the job's own lines."""
    cascades: Sequence[Finding]
    """What followed, by the job's own lines."""
    recovered: Sequence[Finding]
    """Roots after which the same rank went on."""
    ended: Moment | None
    """The first sign that it was over; None where there is none."""


def relevant(facts: Facts) -> Relevant:
    """The findings of `facts` that can have to do with how it ended."""
    own = [f for f in facts.findings if f.origin.source not in TRUSTED_SOURCES and f.shape not in facts.healthy_shapes]
    recovered = [finding for finding in own if finding.role is Role.ROOT and _went_on(finding, facts)]
    open_ = [finding for finding in own if finding not in recovered]
    roots = sorted((f for f in open_ if f.role is Role.ROOT), key=lambda f: f.first_at)
    cascades = sorted((f for f in open_ if f.role is Role.CASCADE), key=lambda f: f.first_at)
    ended = _first_sign([*roots, *cascades], facts)
    trusted = [finding for finding in facts.findings if _is_near(finding, facts, ended)]
    trusted.sort(key=lambda finding: finding.first_at)
    return Relevant(trusted, roots, cascades, recovered, ended)


def _went_on(finding: Finding, facts: Facts) -> bool:
    """Whether its rank completed a step after it. A loss that is not a number does not keep anybody from that."""
    if finding.cause is CauseClass.NUMERICS:
        return False
    rank = rank_of(finding)
    known = [state for of, state in facts.ranks.items() if rank in (None, of)]
    steps = [state.last_step_at for state in known if state.last_step_at is not None]
    last = Moment(finding.last_at, finding.clock_error)
    return any(last.is_before(Moment(at), by=1.0) for at in steps)


def _first_sign(findings: Sequence[Finding], facts: Facts) -> Moment | None:
    moments = [moment_of(finding) for finding in findings if finding.cause is not CauseClass.NUMERICS]
    # A launcher's table has local times, which may be hours away from everything else.
    moments += [Moment(e.at) for e in facts.exits if e.at and e.is_failure and e.teller != "torchrun"]
    return min(moments, key=lambda moment: moment.at, default=None)


def _is_near(finding: Finding, facts: Facts, ended: Moment | None) -> bool:
    """Whether a line of the kernel can have to do with it: on a node of the job, after its last step, before the end,
    and not over by then."""
    if finding.origin.source not in TRUSTED_SOURCES or finding.role not in (Role.ROOT, Role.CONFIRMATION):
        return False
    if finding.origin.node and facts.nodes and finding.origin.node not in facts.nodes:
        return False
    moment = moment_of(finding)
    if ended and ended.plus(_LATE).is_before(moment):
        return False
    if finding.is_over and ended and Moment(finding.last_at, finding.clock_error).is_before(ended):
        return False
    steps = [known.last_step_at for known in facts.ranks.values() if known.last_step_at is not None]
    if steps:
        return not moment.is_before(Moment(max(steps)), by=_SETTLING)
    return ended is None or not moment.is_before(ended, by=_LONGEST_BEFORE)
