"""End of findings, and confirmation of suspected ones by others. Pure."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from datetime import datetime, timedelta

from msgspec import Struct, field
from msgspec.structs import replace

from trainmedic_logs.domain.finding import Finding
from trainmedic_logs.domain.known_finding import Episode, FindingEnd, KnownFinding
from trainmedic_logs.lines.exception_causes import PROOF
from trainmedic_logs.lines.rule import UNTIL_ATTEMPT, UNTIL_BOOT, UNTIL_ENDS, Confirmation, LogRule
from trainmedic_logs.rules.alert_decisions import is_before_boot

SILENCE = timedelta(minutes=15)
"""Ends findings whose rule is no longer loaded."""
FORGOTTEN_AFTER = timedelta(days=7)
"""Time without news that ends findings which wait for a boot, attempt or line, if `end_of` allows it."""


class EndFacts(Struct, frozen=True):
    ago: Callable[[timedelta], datetime]
    """Returns the time so long ago, not counting downtimes."""
    booted_at: Mapping[str, datetime] = field(default_factory=dict)
    jobs: Collection[str] = frozenset()
    """Connected jobs."""
    agents: Collection[str] = frozenset()
    """Connected nodes."""
    has_gone_on: Callable[[KnownFinding, str, bool], bool] = lambda known, job, is_silent: False
    """Returns whether the job, perhaps silent, has progressed beyond the finding or ended normally."""


def end_of(known: KnownFinding, rule: LogRule | None, facts: EndFacts) -> FindingEnd | None:
    """Return how the finding ended; None while it is open."""
    if known.is_suspected and rule is not None and rule.alert is not None and rule.alert.confirm is not None:
        return FindingEnd.UNCONFIRMED if known.heard_at <= facts.ago(rule.alert.confirm.within) else None
    until = rule.until if rule is not None else ""
    is_silent = known.heard_at <= facts.ago(rule.silence if rule is not None else SILENCE)
    node, job = known.target.node, known.target.job
    if until == UNTIL_ATTEMPT and job is not None:
        if facts.has_gone_on(known, job, is_silent):
            return FindingEnd.ATTEMPT
        may_be_forgotten = job not in facts.jobs
    elif until in (UNTIL_BOOT, UNTIL_ENDS) and node is not None:
        if is_before_boot(known, facts.booted_at.get(node)):
            return FindingEnd.BOOT
        may_be_forgotten = node not in facts.agents
    elif until == UNTIL_ENDS:  # a job's: its streams may be gone while it runs
        may_be_forgotten = True
    else:
        return FindingEnd.SILENCE if is_silent else None
    return FindingEnd.FORGOTTEN if may_be_forgotten and known.heard_at <= facts.ago(FORGOTTEN_AFTER) else None


def ended(known: KnownFinding, because: FindingEnd, now: datetime) -> KnownFinding:
    return replace(known, ended_at=now, ended_because=because, tell_at=now if known.alert is not None else None)


def begins_again(known: KnownFinding, before: Episode, finding: Finding) -> bool:
    """Return whether the finding ended and the stream continues with later lines."""
    if known.ended_at is None or finding.is_over or finding.count <= before.count:
        return False
    return finding.last_at > known.ended_at


def with_proof(before: KnownFinding, finding: Finding) -> KnownFinding:
    """Add proof from another stream: a rank's exception record has no stack frames, its output has."""
    if finding.line != before.line or PROOF not in finding.fields or PROOF in before.fields:
        return before
    return replace(before, fields={**before.fields, PROOF: finding.fields[PROOF]})


def confirmed_by(known: KnownFinding, confirm: Confirmation, others: Iterable[KnownFinding]) -> str:
    """Return the confirming rule's name, or ""."""
    for other in others:
        is_near = other.id != known.id and is_within(known, other.first_at, other.last_at, confirm.within)
        if other.rule in confirm.by and is_near and _are_together(known, other):
            return other.rule
    return ""


def is_within(known: KnownFinding, first_at: datetime, last_at: datetime, within: timedelta) -> bool:
    return first_at - within <= known.last_at and known.first_at <= last_at + within


def _are_together(known: KnownFinding, other: KnownFinding) -> bool:
    """Return whether both share a job or a node. A claimed job matches only itself."""
    job, other_job = (each.target.job or each.origin.job for each in (known, other))
    if known.claimed_job or other.claimed_job:
        names, other_names = (known.claimed_job, job), (other.claimed_job, other_job)
        if any(names) and any(other_names):
            return names == other_names
    return (job is not None and job == other_job) or not known.nodes.isdisjoint(other.nodes)
