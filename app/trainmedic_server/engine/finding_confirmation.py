"""End and confirmation of findings."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from trainmedic_core.target import TargetKind
from trainmedic_logs.domain.known_finding import KnownFinding
from trainmedic_logs.lines.rule import Confirmation
from trainmedic_logs.rules import finding_ends
from trainmedic_server.domain.alert import AlertRecord
from trainmedic_server.domain.job_life import JobLife, LifeState
from trainmedic_server.domain.target_resolution import job_named_by, node_named_by
from trainmedic_server.domain.topology import Topology
from trainmedic_server.engine.node_watch import JobProgress


def has_gone_on(
    lives: Mapping[str, JobLife],
    progress_of: Mapping[str, JobProgress],
    known: KnownFinding,
    job: str,
    is_silent: bool,
) -> bool:
    """Return whether the job ended normally, or steps again: in another process, or if the finding `is_silent`."""
    life, progress = lives.get(job), progress_of.get(job)
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
    """Return the name of the rule or alert that confirms a finding; empty if none does."""
    if by := finding_ends.confirmed_by(known, confirm, others):
        return by
    for record in firing:
        alert = record.alert
        is_near = finding_ends.is_within(known, alert.starts_at, record.last_heard_at, confirm.within)
        if alert.name in confirm.by and is_near and _is_about(known, alert.labels, topology):
            return alert.name
    return ""


def _is_about(known: KnownFinding, labels: Mapping[str, str], topology: Topology) -> bool:
    node, job = node_named_by(labels, topology), job_named_by(labels, topology)
    nodes = known.nodes | ({known.target.node} if known.target.kind is not TargetKind.JOB else set())
    return (isinstance(node, str) and node in nodes) or (
        isinstance(job, str) and job == (known.target.job or known.origin.job)
    )
