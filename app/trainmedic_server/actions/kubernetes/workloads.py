"""Actions on Kubernetes workloads."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, timedelta
from typing import Any, ClassVar, Literal, cast

from pydantic import BaseModel, Field, model_validator

from trainmedic_core.fields import Duration
from trainmedic_core.target import TargetKind
from trainmedic_server.actions.base import ActionParams, Irreversible
from trainmedic_server.actions.kubernetes.base import EVENTS, ClusterAction, Permission, RestorableAction, because
from trainmedic_server.actions.kubernetes.kinds import KNOWN, WorkloadParams, field_at
from trainmedic_server.domain.value_types import ANY, TEXT, Shape
from trainmedic_server.errors import ObjectMissing, PermanentFailure
from trainmedic_server.ports.actions import Action, Call
from trainmedic_server.ports.cluster import PODS, Object, Ref

_RESTARTED_AT = "kubectl.kubernetes.io/restartedAt"


def _permissions_for_kinds_with(path: str) -> tuple[Permission, ...]:
    groups: dict[str, list[str]] = {}
    for workload in KNOWN.values():
        if getattr(workload, path) is not None:
            group = workload.resource.api_version.rpartition("/")[0]
            groups.setdefault(group, []).append(workload.resource.plural)
    named = [Permission(group, plural, ("get", "patch")) for group, plurals in groups.items() for plural in plurals]
    return (*named, EVENTS)


class _WorkloadAction(RestorableAction):
    outputs: ClassVar[Mapping[str, Shape]] = {"object": TEXT, "before": ANY, "after": ANY, "note": TEXT}
    restored_by: ClassVar[frozenset[str]] = frozenset({"kind", "namespace", "name"})
    silences: ClassVar[frozenset[TargetKind]] = frozenset(TargetKind)  # Its pods end and send no more metrics.
    needs: ClassVar[str]  # field of `WorkloadKind`

    def _path(self, params: WorkloadParams) -> str:
        path = getattr(params.workload, self.needs)
        if path is None:
            kind = params.workload.resource.kind
            raise PermanentFailure(f"{self.name} does not work on a {kind}: it has no {self.needs} that could be set")
        return str(path)

    async def _set_or_restore(
        self, call: Call, params: WorkloadParams, value: Any, is_undo: bool, event: str
    ) -> dict[str, Any]:
        field = field_at(self.needs, self._path(params))
        if is_undo:
            return await self.restore(call, ref_of(params), field, event)
        return await self.assign(call, ref_of(params), field, value, event)


class RestartWorkload(Irreversible, _WorkloadAction):
    name: ClassVar[str] = "k8s.restart"
    summary: ClassVar[str] = "Restart a Deployment, StatefulSet or DaemonSet, as `kubectl rollout restart` does."
    Params: ClassVar[type[BaseModel]] = WorkloadParams
    permissions: ClassVar[tuple[Permission, ...]] = _permissions_for_kinds_with("template")
    needs: ClassVar[str] = "template"

    async def perform(self, call: Call) -> Mapping[str, Any]:
        params = cast(WorkloadParams, call.params)
        ref, path = ref_of(params), self._path(params)
        # Time of the command, so that repeating it starts no second rollout.
        moment = call.issued_at.astimezone(UTC).isoformat(timespec="microseconds").replace("+00:00", "Z")
        field = field_at("restartedAt", path)

        async def attempt() -> tuple[Object, Any]:
            workload = await self.cluster.get(ref)
            annotations = (((field.read(workload) or {}).get("metadata") or {}).get("annotations")) or {}
            before = annotations.get(_RESTARTED_AT)
            if before == moment:
                return workload, None
            version = {"resourceVersion": workload["metadata"]["resourceVersion"]}
            change = field.write(workload, {"metadata": {"annotations": {_RESTARTED_AT: moment}}})
            return await self.cluster.patch(ref, {**change, "metadata": version}), before

        workload, before = await self.retry_until_deadline(call, attempt)
        await self.cluster.record(workload, "Restarted", because(call, "Restarted"))
        return {"object": str(ref), "before": {"restarted_at": before}, "after": {"restarted_at": moment}}


class ScaleParams(WorkloadParams):
    replicas: int | None = Field(None, ge=0, le=100_000, description="Number of replicas.")
    restore: Literal[True] | None = Field(None, description="Used by an undo: restore the number before this run.")

    @model_validator(mode="after")
    def _says_how_many(self) -> ScaleParams:
        if (self.replicas is None) == (self.restore is None):
            raise ValueError("replicas is missing")
        return self


class ScaleWorkload(_WorkloadAction):
    name: ClassVar[str] = "k8s.scale"
    summary: ClassVar[str] = (
        "Set the number of replicas; undo restores the previous number, unless it was changed since."
    )
    Params: ClassVar[type[BaseModel]] = ScaleParams
    permissions: ClassVar[tuple[Permission, ...]] = _permissions_for_kinds_with("replicas")
    needs: ClassVar[str] = "replicas"

    async def perform(self, call: Call) -> Mapping[str, Any]:
        params = cast(ScaleParams, call.params)
        is_undo = bool(params.restore)
        return await self._set_or_restore(
            call, params, params.replicas, is_undo, "Scaled back" if is_undo else "Scaled"
        )


class SuspendParams(WorkloadParams):
    restore: Literal[True] | None = Field(None, description="Used by an undo: restore the state before this run.")


class SuspendWorkload(_WorkloadAction):
    name: ClassVar[str] = "k8s.suspend"
    summary: ClassVar[str] = "Suspend a Job, JobSet or training job: its pods end, and start again when it is resumed."
    Params: ClassVar[type[BaseModel]] = SuspendParams
    permissions: ClassVar[tuple[Permission, ...]] = _permissions_for_kinds_with("suspend")
    needs: ClassVar[str] = "suspend"
    is_suspended: ClassVar[bool] = True

    async def perform(self, call: Call) -> Mapping[str, Any]:
        params = cast(SuspendParams, call.params)
        is_undo = bool(params.restore)
        event = "Suspended" if self.is_suspended is not is_undo else "Resumed"
        return await self._set_or_restore(call, params, self.is_suspended, is_undo, event)


class ResumeWorkload(SuspendWorkload):
    name: ClassVar[str] = "k8s.resume"
    summary: ClassVar[str] = "Resume a suspended Job, JobSet or training job."
    silences: ClassVar[frozenset[TargetKind]] = frozenset()
    gives_back: ClassVar[bool] = True
    is_suspended: ClassVar[bool] = False


class DeletePodParams(ActionParams):
    namespace: str = Field(pattern=r"^[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?$", description="The pod's namespace.")
    pod: str = Field(pattern=r"^[a-z0-9]([-a-z0-9.]{0,251}[a-z0-9])?$", description="The pod's name.")
    grace_period: Duration | None = Field(None, description="Time to end. By default what the pod requests.")


class DeletePod(Irreversible, ClusterAction):
    """Deletes only the pod that existed at the command."""

    name: ClassVar[str] = "k8s.delete_pod"
    summary: ClassVar[str] = "Delete one pod, so that its controller recreates it."
    default_timeout: ClassVar[timedelta] = timedelta(minutes=1)
    Params: ClassVar[type[BaseModel]] = DeletePodParams
    silences: ClassVar[frozenset[TargetKind]] = frozenset(TargetKind)  # It sends no more metrics.
    outputs: ClassVar[Mapping[str, Shape]] = {"pod": TEXT, "before": {"uid": TEXT, "node": TEXT}, "note": TEXT}
    permissions: ClassVar[tuple[Permission, ...]] = (Permission("", "pods", ("get", "delete")), EVENTS)

    async def perform(self, call: Call) -> Mapping[str, Any]:
        params = cast(DeletePodParams, call.params)
        ref = Ref(PODS, params.pod, params.namespace)
        issued = call.issued_at.astimezone(UTC).isoformat(timespec="seconds").replace("+00:00", "Z")

        pod: Object | None = None  # as last read; None until then

        async def attempt() -> str:
            nonlocal pod
            try:
                present = await self.cluster.get(ref)
            except ObjectMissing:
                if pod is None and not call.resumed:
                    raise
                return "deleted" if pod else "it is gone"
            metadata = present["metadata"]
            is_another = pod is not None and pod["metadata"]["uid"] != metadata["uid"]
            if is_another or (call.resumed and str(metadata.get("creationTimestamp", "")) > issued):
                return "deleted" if pod else "another has taken its place already"
            pod = present
            if not metadata.get("deletionTimestamp"):
                await self.cluster.delete(ref, str(metadata["uid"]), params.grace_period)
            return "deleted"

        why = await self.retry_until_deadline(call, attempt)
        if pod is not None and why == "deleted":
            await self.cluster.record(pod, "Deleted", because(call, "Deleted"))
        before = None if pod is None else {"uid": pod["metadata"]["uid"], "node": pod["spec"].get("nodeName")}
        return {"pod": str(ref), "before": before, "note": why}


def ref_of(params: WorkloadParams) -> Ref:
    return Ref(params.workload.resource, params.name, params.namespace)


ACTIONS: tuple[type[Action], ...] = (RestartWorkload, ScaleWorkload, SuspendWorkload, ResumeWorkload, DeletePod)
