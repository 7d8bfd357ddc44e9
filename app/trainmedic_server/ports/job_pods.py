"""Pods by the job in their labels, which anyone who may create pods can set."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Protocol

from trainmedic_logs.domain.pod_fault import PodFault, PodReading

IsOwn = Callable[[str, str, str], bool]
"""Returns whether the pod (namespace, name, node) really belongs to the job."""


class JobPods(Protocol):
    def faults(self) -> Mapping[str, Sequence[PodFault]]:
        """Return the faults of the last 2 hours by job, from pod statuses, and from Events of pods slow to start."""
        ...

    def namespaces_of(self, job: str) -> Collection[str]: ...

    async def reading(self, job: str, is_own: IsOwn) -> PodReading:
        """Return the faults of a job's own pods, including those in Kubernetes Events.

        Never raises: `unread` states what is unreadable.
        """
        ...


class NoPods(JobPods):
    def faults(self) -> Mapping[str, Sequence[PodFault]]:
        return {}

    def namespaces_of(self, job: str) -> Collection[str]:
        return ()

    async def reading(self, job: str, is_own: IsOwn) -> PodReading:
        return PodReading()
