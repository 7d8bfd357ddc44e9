"""What a cluster knows of the pods of jobs, as the diagnosis needs it."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Protocol

from trainmedic_server.domain.pod_fault import PodFault, PodReading

IsOwn = Callable[[str, str, str], bool]
"""Returns whether the pod of this namespace, name and node is really the job's, and not another one with its label."""


class JobPods(Protocol):
    """Pods by the job that their labels name. Whoever may create pods in any namespace can give them such a label."""

    def faults(self) -> Mapping[str, Sequence[PodFault]]:
        """Return the faults that pods' statuses state, by job: those of the last two hours."""
        ...

    def namespaces_of(self, job: str) -> Collection[str]:
        """Return the namespaces in which pods name the job."""
        ...

    async def reading(self, job: str, is_own: IsOwn) -> PodReading:
        """Return the faults of a job's own pods with what their events add. Never raises: what cannot be read is in
        `unread`."""
        ...


class NoPods(JobPods):
    """There is no cluster, or nobody watches its pods."""

    def faults(self) -> Mapping[str, Sequence[PodFault]]:
        return {}

    def namespaces_of(self, job: str) -> Collection[str]:
        return ()

    async def reading(self, job: str, is_own: IsOwn) -> PodReading:
        return PodReading()
