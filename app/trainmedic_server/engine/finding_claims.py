"""Whom a finding is about, as far as the server believes it.

A node speaks for itself: what it says of another node is passed over. What it says of a job counts where the job is
known to be on that node, or the pod in whose log it stands is the job's. Else it is the node's: anybody who can write
a file there can give it a job's name.

Pure. Who calls it: ``finding_intake``.
"""

from __future__ import annotations

from collections.abc import Callable

from msgspec.structs import replace

from trainmedic_server.domain.finding import Finding, Origin
from trainmedic_server.domain.known_finding import is_printed
from trainmedic_server.domain.target import Target, TargetKind
from trainmedic_server.domain.topology import Topology

WasThere = Callable[[str, str], bool]
"""Returns whether a job was on a node within the last hour."""


def believed(finding: Finding, topology: Topology, was_there: WasThere) -> Finding:
    """The finding with the target and the job that are believed."""
    origin = finding.origin
    job = _job_of(origin, topology, was_there)
    placed = replace(origin, job=job, attempt=origin.attempt if job else None)
    return replace(finding, origin=placed, target=_target(finding, job))


def _job_of(origin: Origin, topology: Topology, was_there: WasThere) -> str | None:
    if origin.pod is not None:
        jobs = topology.jobs_of_pod(origin.pod)
        if origin.job in jobs or (origin.job is None and len(jobs) == 1):
            return origin.job or next(iter(jobs))
    if origin.job is None:
        return None
    on_node = topology.jobs_on_node(origin.node)
    is_there = origin.job in on_node.reported or origin.job in on_node.observed or was_there(origin.job, origin.node)
    return origin.job if is_there else None


def _target(finding: Finding, job: str | None) -> Target:
    node = finding.origin.node
    if finding.target.kind is TargetKind.GPU and not is_printed(finding):
        return Target(TargetKind.GPU, node=node, gpu=finding.target.gpu)
    wants_job = finding.target.kind is TargetKind.JOB or is_printed(finding)
    return Target(TargetKind.JOB, job=job) if wants_job and job is not None else Target(TargetKind.NODE, node=node)
