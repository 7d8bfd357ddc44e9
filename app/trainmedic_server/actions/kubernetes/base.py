"""Base of the Kubernetes actions: retries, field changes with undo, permissions."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, NamedTuple

from msgspec import Struct
from pydantic import BaseModel

from trainmedic_server import errors
from trainmedic_server.actions.kubernetes import field_changes
from trainmedic_server.actions.retrying import RetryingAction
from trainmedic_server.ports.actions import Call, Inverse
from trainmedic_server.ports.cluster import NODES, Cluster, Object, Ref

GONE = "it was deleted: nothing to revert"


class Permission(Struct, frozen=True):
    """As in a (Cluster)Role: ``group`` is empty for the core API, ``resource`` has its subresource after a slash."""

    group: str
    resource: str
    verbs: tuple[str, ...]


EVENTS = Permission("", "events", ("create",))


class SetField(NamedTuple):
    present: Object
    before: Any  # value before the run's first change
    is_set_by_run: bool
    """True if a change of this run is in effect."""


class RevertedField(NamedTuple):
    present: Object
    why: str
    """Result in words."""
    is_restored: bool


class ClusterAction(RetryingAction):
    service: ClassVar[str] = "the Kubernetes API"
    permissions: ClassVar[tuple[Permission, ...]]

    @property
    def cluster(self) -> Cluster:
        if self.services.cluster is None:
            raise errors.PermanentFailure(
                "no Kubernetes cluster is configured: start the server with --kubernetes in-cluster, or with the "
                "path of a kubeconfig"
            )
        return self.services.cluster

    async def set_field(self, call: Call, ref: Ref, field: field_changes.RevertibleField, value: Any) -> SetField:
        async def attempt() -> SetField:
            present = await self.cluster.get(ref)
            recorded = field_changes.changes_by_run(present, field).get(call.run_id)
            before = recorded.was if recorded else field.read(present)
            patch = field_changes.change(present, field, value, call.run_id)
            if patch is None:
                return SetField(present, before, recorded is not None)
            return SetField(await self.cluster.patch(ref, patch), before, True)

        return await self.retry_until_deadline(call, attempt)

    async def take_back(
        self, call: Call, ref: Ref, field: field_changes.RevertibleField, of_all_runs: bool = False
    ) -> RevertedField:
        async def attempt() -> RevertedField:
            present = await self.cluster.get(ref)
            if of_all_runs:
                reversal = field_changes.undo_for_all_runs(present, field)
            else:
                reversal = field_changes.undo(present, field, call.run_id)
            if reversal.change is None:
                return RevertedField(present, reversal.why, False)
            patched = await self.cluster.patch(ref, reversal.change)
            return RevertedField(patched, reversal.why, reversal.why == field_changes.PUT_BACK)

        return await self.retry_until_deadline(call, attempt)

    async def assign(
        self, call: Call, ref: Ref, field: field_changes.RevertibleField, value: Any, event: str, message: str = ""
    ) -> dict[str, Any]:
        """Set a field, record an event, and return the step's output."""
        present, before, is_set_by_run = await self.set_field(call, ref, field, value)
        if is_set_by_run:
            await self.cluster.record(present, event, because(call, message or event))
        return {**_named(ref), "before": {field.name: before}, "after": {field.name: field.read(present)}}

    async def restore(
        self, call: Call, ref: Ref, field: field_changes.RevertibleField, event: str, message: str = ""
    ) -> dict[str, Any]:
        """Like `assign`, for the undo. A deleted object needs none."""
        try:
            present, why, is_back = await self.take_back(call, ref, field)
        except errors.ObjectMissing:
            return {**_named(ref), "note": GONE}
        if is_back:
            await self.cluster.record(present, event, because(call, message or event))
        return {**_named(ref), "after": {field.name: field.read(present)}, "note": why}


def _named(ref: Ref) -> dict[str, str]:
    return {"node": ref.name} if ref.resource == NODES else {"object": str(ref)}


class RestorableAction(ClusterAction):
    """The undo is the same action with the parameter ``restore``."""

    restored_by: ClassVar[frozenset[str]]  # parameters that name the changed object and field

    @classmethod
    def inverse(cls, params: BaseModel, output: Mapping[str, Any] | None) -> Inverse | None:
        found_by = params.model_dump(mode="json", include=set(cls.restored_by), exclude_none=True)
        return Inverse(cls.name, {**found_by, "restore": True})


def because(call: Call, change: str) -> str:
    return f"{change} by Trainmedic, playbook {call.playbook}, run {call.run_id}: {call.reason}"


def node_of(call: Call) -> str:
    if call.target.node is None:
        raise errors.PermanentFailure(f"this action needs a node; {call.target.key} has none")
    return call.target.node


async def node_ref(action: ClusterAction, call: Call) -> Ref:
    """Return the target's node by its name in the cluster, which may differ from the agent's. Raises PermanentFailure
    without a node.
    """
    name = node_of(call)
    known = action.services.cluster_topology()
    if name in known.names.names:
        return Ref(NODES, name)
    called = known.names.called(name)
    if len(called) == 1:
        return Ref(NODES, next(iter(called)))
    if not known.answers:
        await action.retry_until_deadline(call, lambda: _require_node(action, name))
    return Ref(NODES, name)


async def _require_node(action: ClusterAction, name: str) -> None:
    """Raise ClusterUnavailable if the node may exist under another name: its pending undo must not be dropped."""
    try:
        await action.cluster.get(Ref(NODES, name))
    except errors.ObjectMissing as error:
        raise errors.ClusterUnavailable(
            f"it is unknown whether a node is called {name} until the nodes are listed"
        ) from error
