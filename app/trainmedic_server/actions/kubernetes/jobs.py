"""Action ``k8s.create_job``."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from datetime import timedelta
from typing import Any, ClassVar, cast

from pydantic import BaseModel, Field, field_validator, model_validator

from trainmedic_server import errors
from trainmedic_server.actions.base import STOPPED, ActionParams, Irreversible, clearance_of
from trainmedic_server.actions.kubernetes.base import (
    EVENTS,
    ClusterAction,
    Permission,
    because,
)
from trainmedic_server.domain.value_types import TEXT, Shape
from trainmedic_server.ports.actions import Action, Call
from trainmedic_server.ports.cluster import JOBS, OF_RUN, Object, Ref

COMMAND = "trainmedic.io/command"  # annotation with the command's ID, by which a repeated command finds its Job
POLL_EVERY = timedelta(seconds=2)
_TTL_SECONDS = 24 * 3600  # Kubernetes deletes the Job this long after its end
_LONGEST_NAME = 50  # characters; with the hash under the limit of 63
_OWN_VOLUMES = frozenset({"configMap", "downwardAPI", "emptyDir", "ephemeral", "image", "projected", "secret"})
"""Volumes that only the pod changes."""
_NAMESPACE = r"^[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?$"


class CreateJobParams(ActionParams):
    manifest: dict[str, Any] | None = Field(
        None, description="The Job (batch/v1), as Kubernetes writes it; strings in it may be templates."
    )
    template: str | None = Field(
        None,
        description="Instead of `manifest`: a file next to the playbook, `<name>_template.yaml`, with the Job. It is "
        "read when the playbook is loaded. The name cannot be a template.",
    )
    namespace: str | None = Field(None, pattern=_NAMESPACE, description="By default the manifest's own.")
    wait: bool = Field(True, description="Wait until the Job has succeeded, and fail if it fails.")

    @field_validator("manifest")
    @classmethod
    def _is_a_job(cls, manifest: dict[str, Any] | None) -> dict[str, Any] | None:
        if manifest is not None:
            if (manifest.get("apiVersion", "batch/v1"), manifest.get("kind", "Job")) != ("batch/v1", "Job"):
                raise ValueError("must be a Job of batch/v1")
            if not isinstance(manifest.get("spec"), dict):
                raise ValueError("has no spec")
            metadata = [manifest.get("metadata"), _mapping(manifest["spec"].get("template")).get("metadata")]
            annotations = [_mapping(each).get("annotations") for each in metadata]
            if not all(isinstance(each or {}, dict) for each in (*metadata, *annotations)):
                raise ValueError("has metadata or annotations that are no mapping")
            return {name: _without_none(value) for name, value in manifest.items()}
        return manifest

    @model_validator(mode="after")
    def _has_one(self) -> CreateJobParams:
        if (self.manifest is None) == (self.template is None):
            raise ValueError("give a template, or a manifest")
        return self


class CreateClusterJob(Irreversible, ClusterAction):
    name: ClassVar[str] = "k8s.create_job"
    summary: ClassVar[str] = "Run a Job from a manifest next to the playbook, and wait for its end."
    leaves_disks: ClassVar[bool] = True  # unless `reaches_disks`
    default_timeout: ClassVar[timedelta] = timedelta(minutes=10)
    Params: ClassVar[type[BaseModel]] = CreateJobParams
    outputs: ClassVar[Mapping[str, Shape]] = dict.fromkeys(("job", "uid", "result"), TEXT)
    permissions: ClassVar[tuple[Permission, ...]] = (Permission("batch", "jobs", ("create", "get")), EVENTS)

    @classmethod
    def reaches_disks(cls, params: Mapping[str, Any]) -> bool:
        template = _mapping(_mapping(_mapping(params.get("manifest")).get("spec")).get("template"))
        return _reaches_node(_mapping(template.get("spec")))

    async def perform(self, call: Call) -> Mapping[str, Any]:
        params = cast(CreateJobParams, call.params)
        body, ref = _job_to_create(call, params)
        output = {"job": f"{ref.namespace}/{ref.name}"}
        try:
            made = await self.retry_until_deadline(call, lambda: self._create_or_find(call, ref, body))
        except (errors.OutcomeUnknown, errors.NoLongerWanted) as error:
            if isinstance(error, errors.OutcomeUnknown) or error.is_begun:
                error.add(f"{ref} may exist", {**output, "result": "unknown"})
            raise
        output["uid"] = made["metadata"]["uid"]
        if not params.wait:
            return {**output, "result": "created"}
        return {**output, **await self._wait_for_end(call, ref, output)}

    async def _create_or_find(self, call: Call, ref: Ref, body: Mapping[str, Any]) -> Object:
        try:
            made = await self.cluster.create(JOBS, ref.namespace, body)
        except errors.ObjectExists:
            present = await self.cluster.get(ref)
            if (present["metadata"].get("annotations") or {}).get(COMMAND) != call.command_id:
                raise
            return present
        await self.cluster.record(made, "Created", because(call, "Created"))
        return made

    async def _wait_for_end(self, call: Call, ref: Ref, output: Mapping[str, Any]) -> dict[str, Any]:
        while True:
            try:
                job = await self.retry_until_deadline(call, lambda: self.cluster.get(ref), makes_change=False)
            except errors.ObjectMissing as error:
                raise errors.PermanentFailure(f"{ref} was deleted before it had ended", output) from error
            except errors.TemporaryFailure as error:
                reason = f"{error}; {ref} was created; its end is unknown"
                raise errors.OutcomeUnknown(reason, {**output, "result": "unknown"}) from error
            except errors.ActionFailure as error:
                error.add(f"{ref} was created; its end is unknown", {**output, "result": "unknown"})
                raise
            conditions = (job.get("status") or {}).get("conditions") or ()
            ended = {condition.get("type"): condition for condition in conditions if condition.get("status") == "True"}
            if "Complete" in ended:
                return {"result": "succeeded"}
            if "Failed" in ended:
                reason = ended["Failed"].get("message") or ended["Failed"].get("reason") or "no reason given"
                raise errors.PermanentFailure(f"{ref} failed: {reason}", {**output, "result": "failed"})
            if await clearance_of(call) == "stop":
                raise errors.TemporaryFailure(
                    f"{STOPPED}; {ref} is left to end by itself", {**output, "result": "running"}
                )
            if self._clock.now() + POLL_EVERY >= call.deadline:
                # After a failure, another attempt would have another ID and make a second Job.
                raise errors.OutcomeUnknown(f"{ref} has not ended in time", {**output, "result": "running"})
            await self._clock.sleep_until(self._clock.now() + POLL_EVERY)


def _reaches_node(pod: Mapping[str, Any]) -> bool:
    kinds = {kind for volume in _mappings(pod.get("volumes")) for kind in volume if kind != "name"}
    containers = [*_mappings(pod.get("initContainers")), *_mappings(pod.get("containers"))]
    is_privileged = any(_mapping(each.get("securityContext")).get("privileged") for each in containers)
    return bool(kinds - _OWN_VOLUMES or is_privileged or pod.get("hostPID"))


def _mapping(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}  # Kubernetes refuses others


def _mappings(value: Any) -> list[Mapping[str, Any]]:
    return list(map(_mapping, value)) if isinstance(value, list) else []


def _without_none(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {name: _without_none(inner) for name, inner in value.items() if inner is not None}
    return [_without_none(inner) for inner in value] if isinstance(value, list) else value


def _with_marked_pods(spec: Mapping[str, Any], run_id: str) -> dict[str, Any]:
    template = spec.get("template")
    if not isinstance(template, Mapping):
        return {}
    metadata = template.get("metadata") or {}
    annotations = {**(metadata.get("annotations") or {}), OF_RUN: run_id}
    return {"template": {**template, "metadata": {**metadata, "annotations": annotations}}}


def _job_to_create(call: Call, params: CreateJobParams) -> tuple[dict[str, Any], Ref]:
    """Return the Job and its reference; repeated commands get the same name."""
    manifest = params.manifest or {}  # the compiler replaces `template` with the file's manifest
    metadata = dict(manifest.get("metadata") or {})
    namespace = params.namespace or metadata.get("namespace")
    if not namespace:
        raise errors.PermanentFailure("the Job has no namespace: give one in the step, or in the manifest's metadata")
    stem = str(metadata.pop("generateName", None) or metadata.get("name") or "trainmedic").rstrip("-")
    name = f"{stem[:_LONGEST_NAME].rstrip('-.')}-{hashlib.sha256(call.command_id.encode()).hexdigest()[:10]}"
    annotations = {**(metadata.get("annotations") or {}), COMMAND: call.command_id, OF_RUN: call.run_id}
    metadata |= {"name": name, "namespace": namespace, "annotations": annotations}
    spec = {
        "ttlSecondsAfterFinished": _TTL_SECONDS,
        **manifest["spec"],
        **_with_marked_pods(manifest["spec"], call.run_id),
    }
    body = {"apiVersion": "batch/v1", "kind": "Job", "metadata": metadata, "spec": spec}
    return body, Ref(JOBS, name, str(namespace))


ACTIONS: tuple[type[Action], ...] = (CreateClusterJob,)
