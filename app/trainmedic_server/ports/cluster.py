"""Interface of the Kubernetes cluster for actions.

Objects are plain mappings: actions use few fields of many kinds.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import Any, Protocol

from msgspec import Struct

Object = Mapping[str, Any]


class Resource(Struct, frozen=True):
    """API names, such as ``apps/v1``, ``deployments``, ``Deployment``."""

    api_version: str
    plural: str
    kind: str
    is_namespaced: bool = True


class Ref(Struct, frozen=True):
    """``namespace`` is None if the resource has none."""

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
OF_RUN = "trainmedic.io/run"  # Annotation of Jobs that the server makes, and of their pods.


class Cluster(Protocol):
    """The Kubernetes API server. Repeating a change is harmless.

    Calls raise ClusterUnavailable if it is unreachable, overloaded, failing or rejects the credentials
    (`may_be_done`: a change may have been made), ClusterRefused for a forbidden or invalid request, and ObjectMissing.
    """

    async def get(self, ref: Ref) -> Object: ...

    async def list(  # without `namespace`: in all
        self, resource: Resource, namespace: str | None = None, labels: str = "", fields: str = ""
    ) -> Sequence[Object]: ...

    async def patch(self, ref: Ref, change: Mapping[str, Any], subresource: str = "") -> Object:
        """Apply a JSON merge patch (RFC 7386) and return the changed object.

        Raises ObjectChanged if `change` has ``metadata.resourceVersion`` and the object another version.
        """
        ...

    async def create(self, resource: Resource, namespace: str | None, body: Object) -> Object:
        """Raises ObjectExists."""
        ...

    # Without `grace`, the object's own.
    async def delete(self, ref: Ref, uid: str, grace: timedelta | None = None) -> None:
        """Delete the object with this `uid`, if it exists. Raises ObjectChanged if another has its name."""
        ...

    async def evict(self, ref: Ref, uid: str, grace: timedelta | None = None) -> None:
        """Evict a pod, if it exists. Raises EvictionBlocked by a PodDisruptionBudget, or by two (unsupported)."""
        ...

    async def record(self, about: Object, reason: str, message: str, warning: bool = False) -> None:
        """Create a Kubernetes Event for an object. Never raises: the history has the same text."""
        ...

    async def check(self) -> None: ...
