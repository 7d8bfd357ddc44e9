"""Target and job of a finding, as far as its node is trusted.

A node reports only about itself. A job counts if it is known to be on that node, or if the log is its pod's. Otherwise
its name is a claim.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import datetime, timedelta

from trainmedic_logs.domain.finding import Finding, Origin
from trainmedic_logs.rules.finding_targets import placed
from trainmedic_server.domain.topology import Topology

WasThere = Callable[[str, str], bool]
"""Returns whether a job was on a node within the last hour."""
# Findings with a claimed job that a node may begin within `COUNTED`: less than half of its open findings, which leaves
# capacity for the kernel's reports.
MOST_CLAIMED_OF_NODE = 200
COUNTED = timedelta(days=1)


def with_trusted_job(finding: Finding, topology: Topology, was_there: WasThere) -> Finding:
    return placed(finding, _job_of(finding.origin, topology, was_there))


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


class ClaimedFindings:
    """Counts findings with claimed jobs by node, from process start. For one thread."""

    def __init__(self) -> None:
        self._times: dict[str, dict[str, datetime]] = {}

    def try_add(self, node: str, key: str, now: datetime) -> bool:
        times = self._times.setdefault(node, {})
        if key not in times and len(times) >= MOST_CLAIMED_OF_NODE:
            self._times[node] = times = {each: at for each, at in times.items() if now - at < COUNTED}
        if key not in times and len(times) >= MOST_CLAIMED_OF_NODE:
            return False
        times[key] = now
        return True

    def renew(self, node: str, key: str, now: datetime) -> None:
        self._times.setdefault(node, {})[key] = now
