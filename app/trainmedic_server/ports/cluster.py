"""The Kubernetes cluster, as actions see it: objects as the API writes them, named by `Ref`.

Objects are plain mappings, because an action touches two or three fields of many kinds, custom ones
included. Not here: how the API is reached (``adapters.kubernetes_cluster``), who
is behind an address (``adapters.kubernetes_topology``).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import Any, Protocol

from msgspec import Struct

Object = Mapping[str, Any]


class Resource(Struct, frozen=True):
    """A kind of object by the names of its API: ``apps/v1``, ``deployments``, ``Deployment``."""

    api_version: str
    plural: str
    kind: str
    is_namespaced: bool = True


class Ref(Struct, frozen=True):
    """Names one object. ``namespace`` is None exactly where the resource has none."""

    resource: Resource
    name: str
    namespace: str | None = None

    def __str__(self) -> str:
        where = f"{self.namespace}/" if self.namespace else ""
        return f"{self.resource.kind} {where}{self.name}"


NODES = Resource("v1", "nodes", "Node", is_namespaced=False)
PODS = Resource("v1", "pods", "Pod")
JOBS = Resource("batch/v1", "jobs", "Job")
DEPLOYMENTS = Resource("apps/v1", "deployments", "Deployment")
STATEFUL_SETS = Resource("apps/v1", "statefulsets", "StatefulSet")
DAEMON_SETS = Resource("apps/v1", "daemonsets", "DaemonSet")
OF_RUN = "trainmedic.io/run"
"""Annotation of Jobs and pods that a run has created, with the run's ID."""


class Cluster(Protocol):
    """The API server.

    Every call raises ClusterUnavailable where the server cannot be reached, is overloaded or fails (a
    429 or 5xx; a change may then have been made or not), ClusterRefused where our account may not or
    the request is no valid one, and ObjectMissing. Every change is made so that making it twice does
    no harm.
    """

    async def get(self, ref: Ref) -> Object: ...

    async def list(
        self, resource: Resource, namespace: str | None = None, labels: str = "", fields: str = ""
    ) -> Sequence[Object]:
        """Return all of them, by label and field selectors in the API's own syntax."""
        ...

    async def patch(self, ref: Ref, change: Mapping[str, Any], subresource: str = "") -> Object:
        """Apply a JSON merge patch (RFC 7386); with ``metadata.resourceVersion`` in `change` it is refused
        with ObjectChanged unless the object is still at that version. Returns the object after it."""
        ...

    async def create(self, resource: Resource, namespace: str | None, body: Object) -> Object:
        """Return the object as it was made. Raises ObjectExists."""
        ...

    async def delete(self, ref: Ref, uid: str, grace: timedelta | None = None) -> None:
        """Delete the object with this `uid`; one that is gone already is fine. Raises ObjectChanged where another
        object has its name by now."""
        ...

    async def evict(self, ref: Ref, uid: str, grace: timedelta | None = None) -> None:
        """Ask the Eviction API to end a pod. Raises EvictionBlocked where a PodDisruptionBudget does not let
        it go now, or where it has two, which the API cannot weigh; one that is gone already is fine."""
        ...

    async def record(self, about: Object, reason: str, message: str, warning: bool = False) -> None:
        """Leave a Kubernetes Event on an object. Never raises: what it says is in the history as well."""
        ...

    async def check(self) -> None:
        """Return if the API server answers."""
        ...
