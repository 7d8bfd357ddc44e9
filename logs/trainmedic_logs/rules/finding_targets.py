"""Target of a finding whose job is trusted or only claimed. Pure."""

from __future__ import annotations

from msgspec.structs import replace

from trainmedic_core.plain_text import visible
from trainmedic_core.target import Target, TargetKind
from trainmedic_logs.domain.finding import Finding
from trainmedic_logs.domain.known_finding import is_printed

_LONGEST_CLAIM = 253


def placed(finding: Finding, job: str | None) -> Finding:
    """Set origin and target by the trusted `job`, which is None unless one is proven to run there."""
    # Keep the attempt of a claimed job, which groups its findings.
    attempt = finding.origin.attempt if job or is_printed(finding) else None
    origin = replace(finding.origin, job=job, attempt=attempt)
    return replace(finding, origin=origin, target=_target(finding, job))


def claimed_job(finding: Finding, placed: Finding) -> str:
    """Return the job that only the file names. Empty if `placed` has a trusted job, and for kernel lines."""
    if placed.origin.job is not None or not finding.origin.job or not is_printed(finding):
        return ""
    return visible(finding.origin.job)[:_LONGEST_CLAIM]


def _target(finding: Finding, job: str | None) -> Target:
    node = finding.origin.node
    if finding.target.kind is TargetKind.GPU and not is_printed(finding):
        return Target(TargetKind.GPU, node=node, gpu=finding.target.gpu)
    wants_job = finding.target.kind is TargetKind.JOB or is_printed(finding)
    return Target(TargetKind.JOB, job=job) if wants_job and job is not None else Target(TargetKind.NODE, node=node)
