"""End of findings, and confirmation of suspected ones. Pure.

The server decides these ends. An end that a log line states arrives with the finding's update.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from datetime import datetime, timedelta

from msgspec import Struct, field

from trainmedic_core.target import TargetKind
from trainmedic_logs.domain.known_finding import FindingEnd, KnownFinding
from trainmedic_logs.lines.rule import UNTIL_ATTEMPT, UNTIL_BOOT, UNTIL_ENDS, Confirmation, LogRule
from trainmedic_server.domain.alert import AlertRecord
from trainmedic_server.domain.job_life import JobLife, LifeState
from trainmedic_server.domain.target_resolution import job_named_by, node_named_by
from trainmedic_server.domain.time_gaps import Ago
from trainmedic_server.domain.topology import Topology
from trainmedic_server.engine.finding_alerts import is_before_boot
from trainmedic_server.engine.node_watch import JobProgress

SILENCE = timedelta(minutes=15)
FORGOTTEN_AFTER = timedelta(days=7)
"""A finding that waits for a boot, a line or a step ends after this time if its node or job is not connected."""


class EndFacts(Struct, frozen=True):
    ago: Ago
    booted_at: Mapping[str, datetime] = field(default_factory=dict)
    progress: Mapping[str, JobProgress] = field(default_factory=dict)
    lives: Mapping[str, JobLife] = field(default_factory=dict)
    agents: Collection[str] = frozenset()


def end_of(known: KnownFinding, rule: LogRule | None, facts: EndFacts) -> FindingEnd | None:
    """Return how the finding ended; None while it is open."""
    if known.is_suspected and rule is not None and rule.alert is not None and rule.alert.confirm is not None:
        return FindingEnd.UNCONFIRMED if known.heard_at <= facts.ago(rule.alert.confirm.within) else None
    until = rule.until if rule is not None else ""
    is_silent = known.heard_at <= facts.ago(rule.silence if rule is not None else SILENCE)
    node, job = known.target.node, known.target.job
    if until == UNTIL_ATTEMPT and job is not None:
        if _has_gone_on(known, job, is_silent, facts):
            return FindingEnd.ATTEMPT
        is_away = job not in facts.progress
    elif until in (UNTIL_BOOT, UNTIL_ENDS) and node is not None:
        if is_before_boot(known, facts.booted_at.get(node)):
            return FindingEnd.BOOT
        is_away = node not in facts.agents
    elif until == UNTIL_ENDS:
        is_away = True
    else:
        return FindingEnd.SILENCE if is_silent else None
    return FindingEnd.FORGOTTEN if is_away and known.heard_at <= facts.ago(FORGOTTEN_AFTER) else None


def _has_gone_on(known: KnownFinding, job: str, is_silent: bool, facts: EndFacts) -> bool:
    """Return whether the job ended normally or steps again, in another process or beyond the rule's silence."""
    life, progress = facts.lives.get(job), facts.progress.get(job)
    if life is not None and life.state is LifeState.ENDED and life.since > known.heard_at:
        return True
    if progress is None or progress.progressed_at is None or progress.progressed_at <= known.heard_at:
        return False
    is_another = progress.began_at is not None and progress.began_at > known.last_at
    return is_another or is_silent


def confirmed_by(
    known: KnownFinding,
    confirm: Confirmation,
    others: Iterable[KnownFinding],
    firing: Iterable[AlertRecord],
    topology: Topology,
) -> str:
    """Return the name of the rule or alert that confirms a suspected finding; empty if none does."""
    for other in others:
        is_near = other.id != known.id and _is_within(known, other.first_at, other.last_at, confirm.within)
        if other.rule in confirm.by and is_near and _are_together(known, other):
            return other.rule
    for record in firing:
        alert = record.alert
        is_near = _is_within(known, alert.starts_at, record.last_heard_at, confirm.within)
        if alert.name in confirm.by and is_near and _is_about(known, alert.labels, topology):
            return alert.name
    return ""


def _is_within(known: KnownFinding, first_at: datetime, last_at: datetime, within: timedelta) -> bool:
    return first_at - within <= known.last_at and known.first_at <= last_at + within


def _are_together(known: KnownFinding, other: KnownFinding) -> bool:
    """Return whether both findings share a job or a node. A claimed job matches only itself."""
    if known.claimed_job or other.claimed_job:
        named = [(each.claimed_job, each.target.job or each.origin.job) for each in (known, other)]
        if all(any(names) for names in named):
            return named[0] == named[1]
    jobs = (known.target.job or known.origin.job, other.target.job or other.origin.job)
    return (jobs[0] is not None and jobs[0] == jobs[1]) or not known.nodes.isdisjoint(other.nodes)


def _is_about(known: KnownFinding, labels: Mapping[str, str], topology: Topology) -> bool:
    node, job = node_named_by(labels, topology), job_named_by(labels, topology)
    nodes = known.nodes | ({known.target.node} if known.target.kind is not TargetKind.JOB else set())
    return (isinstance(node, str) and node in nodes) or (
        isinstance(job, str) and job == (known.target.job or known.origin.job)
    )
