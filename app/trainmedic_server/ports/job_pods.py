"""The cluster's knowledge about the pods of jobs, as the diagnosis needs it."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Protocol

from trainmedic_logs.domain.pod_fault import PodFault, PodReading

IsOwn = Callable[[str, str, str], bool]
"""Returns whether the pod of this namespace, name and node really belongs to the job, and does not only have its
label."""


class JobPods(Protocol):
    """Pods by the job in their labels. Anyone who may create pods in some namespace can set such a label."""

    def faults(self) -> Mapping[str, Sequence[PodFault]]:
        """Return the faults in pods' statuses of the last two hours, by job."""
        ...

    def namespaces_of(self, job: str) -> Collection[str]:
        """Return the namespaces in which pods name the job."""
        ...

    async def reading(self, job: str, is_own: IsOwn) -> PodReading:
        """Return the faults of a job's own pods, with those in their events. Never raises: `unread` states what cannot
        be read."""
        ...


class NoPods(JobPods):
    """No cluster, or no watch of its pods."""

    def faults(self) -> Mapping[str, Sequence[PodFault]]:
        return {}

    def namespaces_of(self, job: str) -> Collection[str]:
        return ()

    async def reading(self, job: str, is_own: IsOwn) -> PodReading:
        return PodReading()
