"""Workload kinds known to the actions, and custom kinds of playbooks."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from msgspec import Struct
from pydantic import Field, field_validator

from trainmedic_server.actions.base import ActionParams
from trainmedic_server.actions.kubernetes import field_changes
from trainmedic_server.ports.cluster import DAEMON_SETS, DEPLOYMENTS, JOBS, STATEFUL_SETS, Object, Resource

_PATH = r"^[A-Za-z][A-Za-z0-9]*(\.[A-Za-z][A-Za-z0-9]*){0,7}$"


class WorkloadKind(Struct, frozen=True):
    """Paths of settable fields. None: it lacks the field."""

    resource: Resource
    replicas: str | None = None
    suspend: str | None = None
    template: str | None = None


_KUBEFLOW = ("PyTorchJob", "MPIJob", "TFJob", "XGBoostJob", "PaddleJob", "JAXJob")

# By the API references of Kubernetes, Kubeflow training operator v1, Kubeflow Trainer v2, JobSet and KubeRay.
KNOWN: Mapping[str, WorkloadKind] = {
    "Deployment": WorkloadKind(DEPLOYMENTS, replicas="spec.replicas", template="spec.template"),
    "StatefulSet": WorkloadKind(STATEFUL_SETS, replicas="spec.replicas", template="spec.template"),
    "DaemonSet": WorkloadKind(DAEMON_SETS, template="spec.template"),
    "Job": WorkloadKind(JOBS, suspend="spec.suspend"),
    "JobSet": WorkloadKind(Resource("jobset.x-k8s.io/v1alpha2", "jobsets", "JobSet"), suspend="spec.suspend"),
    "TrainJob": WorkloadKind(
        Resource("trainer.kubeflow.org/v1alpha1", "trainjobs", "TrainJob"), suspend="spec.suspend"
    ),
    "RayJob": WorkloadKind(Resource("ray.io/v1", "rayjobs", "RayJob"), suspend="spec.suspend"),
    "RayCluster": WorkloadKind(Resource("ray.io/v1", "rayclusters", "RayCluster"), suspend="spec.suspend"),
    **{
        kind: WorkloadKind(Resource("kubeflow.org/v1", f"{kind.lower()}s", kind), suspend="spec.runPolicy.suspend")
        for kind in _KUBEFLOW
    },
}


class CustomKind(ActionParams):
    api_version: str = Field(
        pattern=r"^([a-z0-9.-]+/)?v[0-9][a-z0-9]*$", description="Its API version, `example.com/v1`."
    )
    plural: str = Field(pattern=r"^[a-z0-9]+$", description="Its plural name in paths, `trainings`.")
    kind: str = Field(pattern=r"^[A-Z][A-Za-z0-9]*$", description="Its kind, `Training`.")
    replicas: str | None = Field(None, pattern=_PATH, description="Path of its number of replicas.")
    suspend: str | None = Field(None, pattern=_PATH, description="Path of its suspension, such as `spec.suspend`.")
    template: str | None = Field(None, pattern=_PATH, description="Path of its pod template, such as `spec.template`.")

    @property
    def workload(self) -> WorkloadKind:
        return WorkloadKind(
            Resource(self.api_version, self.plural, self.kind), self.replicas, self.suspend, self.template
        )


class WorkloadParams(ActionParams):
    kind: str | CustomKind = Field(
        description="A known kind (Deployment, StatefulSet, DaemonSet, Job, JobSet, PyTorchJob, …), or a "
        "mapping that describes another: `api_version`, `plural`, `kind`, and the path of the field to set."
    )
    namespace: str = Field(pattern=r"^[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?$", description="Its namespace.")
    name: str = Field(pattern=r"^[a-z0-9]([-a-z0-9.]{0,251}[a-z0-9])?$", description="Its name.")

    @field_validator("kind")
    @classmethod
    def _is_known(cls, kind: str | CustomKind) -> str | CustomKind:
        if isinstance(kind, str) and kind not in KNOWN:
            raise ValueError(f"{kind} is not known: give one of {', '.join(KNOWN)}, or a mapping that describes it")
        return kind

    @property
    def workload(self) -> WorkloadKind:
        return KNOWN[self.kind] if isinstance(self.kind, str) else self.kind.workload


def field_at(name: str, path: str) -> field_changes.RevertibleField:
    parts = tuple(path.split("."))

    def read(present: Object) -> Any:
        value: Any = present
        for part in parts:
            value = value.get(part) if isinstance(value, Mapping) else None
        return value

    def write(present: Object, value: Any) -> field_changes.Change:
        for part in reversed(parts):
            value = {part: value}
        return dict(value)

    return field_changes.RevertibleField(name, read, write, parts)
