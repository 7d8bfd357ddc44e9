"""Actions on Kubernetes nodes."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import timedelta
from typing import Any, ClassVar, Literal, cast

from pydantic import BaseModel, Field, model_validator

from trainmedic_core.target import TargetKind
from trainmedic_server.actions.base import ActionParams
from trainmedic_server.actions.kubernetes import field_changes
from trainmedic_server.actions.kubernetes.base import (
    EVENTS,
    GONE,
    ClusterAction,
    Permission,
    RestorableAction,
    because,
    node_ref,
)
from trainmedic_server.domain.value_types import ANY, BOOLEAN, TEXT, Shape
from trainmedic_server.errors import ObjectMissing, PermanentFailure, TemporaryFailure
from trainmedic_server.ports.actions import Action, Call, Inverse
from trainmedic_server.ports.cluster import Object, Ref

# Kubernetes' rules for names and values of labels and taints.
_NAME = r"^([a-z0-9]([-a-z0-9.]{0,251}[a-z0-9])?/)?[A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?$"
_VALUE = r"^([A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?)?$"


def _is_ready(node: Object) -> bool:
    conditions = (node.get("status") or {}).get("conditions") or ()
    return any(state.get("type") == "Ready" and state.get("status") == "True" for state in conditions)


def _read_unschedulable(node: Object) -> bool:
    return bool((node.get("spec") or {}).get("unschedulable"))


UNSCHEDULABLE = field_changes.RevertibleField(
    "unschedulable",
    _read_unschedulable,
    lambda node, value: {"spec": {"unschedulable": True if value else None}},
    ("spec", "unschedulable"),
)


def label_field(key: str) -> field_changes.RevertibleField:
    return field_changes.RevertibleField(
        f"label/{key}",
        lambda present: (present["metadata"].get("labels") or {}).get(key),
        lambda present, value: {"metadata": {"labels": {key: value}}},
        ("metadata", "labels", key),
    )


def taint_field(key: str, effect: str) -> field_changes.RevertibleField:
    """Return a node's taint as a field: None if absent, ``""`` without a value."""

    def read(node: Object) -> str | None:
        for taint in (node.get("spec") or {}).get("taints") or ():
            if (taint.get("key"), taint.get("effect")) == (key, effect):
                return str(taint.get("value") or "")
        return None

    def write(node: Object, value: str | None) -> field_changes.Change:
        # A merge patch can only replace the whole list. To keep the taints of other writers, the patch applies only to
        # this version of the node (`field_changes`).
        taints = [
            taint
            for taint in (node.get("spec") or {}).get("taints") or ()
            if (taint.get("key"), taint.get("effect")) != (key, effect)
        ]
        if value is not None:
            taints.append({"key": key, "effect": effect, **({"value": value} if value else {})})
        return {"spec": {"taints": taints or None}}

    return field_changes.RevertibleField(f"taint/{key}:{effect}", read, write)


class _NodeAction(ClusterAction):
    leaves_disks: ClassVar[bool] = True
    targets: ClassVar[frozenset[TargetKind]] = frozenset({TargetKind.NODE, TargetKind.GPU})
    outputs: ClassVar[Mapping[str, Shape]] = {
        "node": TEXT,
        "before": ANY,
        "after": ANY,
        "note": TEXT,
        "changed": BOOLEAN,
    }
    default_timeout: ClassVar[timedelta] = timedelta(minutes=1)
    permissions: ClassVar[tuple[Permission, ...]] = (Permission("", "nodes", ("get", "patch")), EVENTS)


class CordonParams(ActionParams):
    unless_ready: bool = Field(
        False,
        description="Fail temporarily while Kubernetes reports the node as Ready: then the node is "
        "healthy, and the monitoring may be at fault.",
    )


class UncordonParams(ActionParams):
    force: bool = Field(False, description="Also if another party has cordoned the node.")
    restore: Literal[True] | None = Field(None, description="Used by an undo: remove this run's cordon.")


class CordonNode(_NodeAction):
    name: ClassVar[str] = "k8s.cordon"
    summary: ClassVar[str] = "Cordon the node; undo uncordons it, unless another party had cordoned it."
    Params: ClassVar[type[BaseModel]] = CordonParams

    async def perform(self, call: Call) -> Mapping[str, Any]:
        if cast(CordonParams, call.params).unless_ready:
            await self._refuse_ready(call)
        output = await cordon(self, call)
        return {**output, "changed": False} if "note" in output else output

    async def _refuse_ready(self, call: Call) -> None:
        """Raise TemporaryFailure, unless this run has cordoned the node."""
        ref = await node_ref(self, call)
        node = await self.retry_until_deadline(call, lambda: self.cluster.get(ref))
        if _is_ready(node) and call.run_id not in field_changes.changes_by_run(node, UNSCHEDULABLE):
            raise TemporaryFailure(
                f"node {ref.name} was not cordoned: Kubernetes reports it as Ready, so the "
                "monitoring or the network is at fault"
            )

    @classmethod
    def inverse(cls, params: BaseModel, output: Mapping[str, Any] | None) -> Inverse | None:
        return Inverse(UncordonNode.name, {"restore": True})


async def cordon(action: ClusterAction, call: Call) -> dict[str, Any]:
    ref = await node_ref(action, call)
    node, before, is_set_by_run = await action.set_field(call, ref, UNSCHEDULABLE, True)
    if is_set_by_run:
        await action.cluster.record(node, "Cordoned", because(call, "Cordoned"))
    output = {"node": ref.name, "before": {"cordoned": bool(before)}, "after": {"cordoned": True}}
    return output if is_set_by_run else {**output, "note": "another party had cordoned it: the undo leaves it cordoned"}


class UncordonNode(_NodeAction):
    name: ClassVar[str] = "k8s.uncordon"
    summary: ClassVar[str] = "Uncordon a node that Trainmedic has cordoned."
    Params: ClassVar[type[BaseModel]] = UncordonParams
    gives_back: ClassVar[bool] = True

    async def perform(self, call: Call) -> Mapping[str, Any]:
        params = cast(UncordonParams, call.params)
        ref = await node_ref(self, call)
        if params.force:
            node, is_cordoned = await self._force(call, ref)
            return self._output(ref, is_cordoned, node, "forced")
        try:
            node, why, is_back = await self.take_back(call, ref, UNSCHEDULABLE, of_all_runs=not params.restore)
        except ObjectMissing:
            if not params.restore:
                raise
            return {"node": ref.name, "note": GONE}
        is_cordoned = _read_unschedulable(node)
        if is_cordoned and not params.restore:
            raise PermanentFailure(f"node {ref.name} stays cordoned: {why}", self._output(ref, True, node, why))
        if is_back:
            await self.cluster.record(node, "Uncordoned", because(call, "Uncordoned"))
        return self._output(ref, is_back or is_cordoned, node, why)

    async def _force(self, call: Call, ref: Ref) -> tuple[Object, bool]:
        """Return the node, and whether it was cordoned."""
        _, why, _ = await self.take_back(call, ref, UNSCHEDULABLE, of_all_runs=True)

        async def attempt() -> tuple[Object, bool]:
            node = await self.cluster.get(ref)
            was = _read_unschedulable(node)
            if was:
                node = await self.cluster.patch(ref, UNSCHEDULABLE.write(node, False))
            return node, was or why == field_changes.PUT_BACK

        node, was = await self.retry_until_deadline(call, attempt)
        if was:
            await self.cluster.record(node, "Uncordoned", because(call, "Uncordoned"))
        return node, was

    def _output(self, ref: Ref, before: bool, node: Object, why: str) -> dict[str, Any]:
        after = _read_unschedulable(node)
        return {"node": ref.name, "before": {"cordoned": before}, "after": {"cordoned": after}, "note": why}


class _NodeFieldAction(RestorableAction, _NodeAction):
    async def _set_or_restore(
        self, call: Call, field: field_changes.RevertibleField, value: str | None, is_undo: bool
    ) -> dict[str, Any]:
        ref = await node_ref(self, call)
        if is_undo:
            return await self.restore(call, ref, field, "Restored", f"{field.name} put back")
        return await self.assign(call, ref, field, value, "Changed", f"{field.name} set")


class TaintParams(ActionParams):
    key: str = Field(pattern=_NAME, description="The taint's key.")
    effect: Literal["NoSchedule", "PreferNoSchedule", "NoExecute"] = Field(
        "NoSchedule", description="What happens to pods that do not tolerate it. NoExecute ends those that run."
    )
    value: str = Field("", pattern=_VALUE, description="The taint's value.")
    remove: bool = Field(False, description="Remove the taint instead.")
    restore: Literal[True] | None = Field(None, description="Used by an undo: restore the state before this run.")


class TaintNode(_NodeFieldAction):
    name: ClassVar[str] = "k8s.taint"
    summary: ClassVar[str] = "Set or remove a taint of the node; undo restores the previous state."
    Params: ClassVar[type[BaseModel]] = TaintParams
    restored_by: ClassVar[frozenset[str]] = frozenset({"key", "effect"})

    async def perform(self, call: Call) -> Mapping[str, Any]:
        params = cast(TaintParams, call.params)
        field = taint_field(params.key, params.effect)
        return await self._set_or_restore(call, field, None if params.remove else params.value, bool(params.restore))


class LabelParams(ActionParams):
    key: str = Field(pattern=_NAME, description="The label's name.")
    value: str | None = Field(None, pattern=_VALUE, description="Its value. Without one the label is removed.")
    restore: Literal[True] | None = Field(None, description="Used by an undo: restore the state before this run.")

    @model_validator(mode="after")
    def _leaves_ours(self) -> LabelParams:
        if self.key.startswith(field_changes.PREFIX.partition("/")[0] + "/"):
            raise ValueError("labels under trainmedic.io/ are Trainmedic's own")
        return self


class LabelNode(_NodeFieldAction):
    name: ClassVar[str] = "k8s.label"
    summary: ClassVar[str] = "Set or remove a label of the node; undo restores the previous state."
    Params: ClassVar[type[BaseModel]] = LabelParams
    restored_by: ClassVar[frozenset[str]] = frozenset({"key"})

    async def perform(self, call: Call) -> Mapping[str, Any]:
        params = cast(LabelParams, call.params)
        return await self._set_or_restore(call, label_field(params.key), params.value, bool(params.restore))


ACTIONS: tuple[type[Action], ...] = (CordonNode, UncordonNode, TaintNode, LabelNode)
