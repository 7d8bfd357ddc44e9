"""Base of the Kubernetes actions: retries, field changes with undo, and required permissions."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from datetime import datetime, timedelta
from typing import Any, ClassVar, TypeVar

from msgspec import Struct
from pydantic import BaseModel

from trainmedic.wire.backoff import Backoff
from trainmedic_server.actions.base import RESOLVED, STOPPED, BasicAction, clearance_of
from trainmedic_server.actions.kubernetes import field_changes
from trainmedic_server.errors import (
    ActionFailure,
    ClusterRefused,
    ClusterUnavailable,
    NoLongerWanted,
    ObjectChanged,
    ObjectMissing,
    OutcomeUnknown,
    PermanentFailure,
    TemporaryFailure,
)
from trainmedic_server.ports.actions import Call, Inverse, Services
from trainmedic_server.ports.cluster import NODES, Cluster, Object, Ref

_FIRST_WAIT, _LONGEST_WAIT = 0.2, 10.0
REPORT_EVERY = timedelta(seconds=15)
LONGEST_ASKED_FOR = 60.0
REFUSAL_GRACE = timedelta(seconds=10)
"""An API server that has just started refuses everybody until it has read its roles and accounts."""
GONE = "it was deleted: nothing to revert"

Result = TypeVar("Result")


class Permission(Struct, frozen=True):
    """As in a (Cluster)Role. ``group`` is empty for the core API. ``resource`` has its subresource after a slash."""

    group: str
    resource: str
    verbs: tuple[str, ...]


EVENTS = Permission("", "events", ("create",))
"""Every action leaves an Event."""


class PermissionGrace(Struct):
    """A refusal is final after uninterrupted refusals for `REFUSAL_GRACE`."""

    since: datetime | None = None

    def is_final(self, error: ActionFailure, now: datetime) -> bool:
        if not isinstance(error, ClusterRefused):
            self.since = None
            return False
        self.since = self.since or now
        return not error.may_pass or now - self.since >= REFUSAL_GRACE


class ClusterAction(BasicAction):
    """Retries conflicts and failures of the API server until the call's deadline, refusals only for `REFUSAL_GRACE`."""

    default_timeout: ClassVar[timedelta] = timedelta(minutes=2)
    permissions: ClassVar[tuple[Permission, ...]]

    def __init__(self, services: Services) -> None:
        super().__init__(services)
        self._clock = services.clock

    @property
    def cluster(self) -> Cluster:
        if self.services.cluster is None:
            raise PermanentFailure(
                "no Kubernetes cluster is configured: start the server with --kubernetes in-cluster, or with the "
                "path of a kubeconfig"
            )
        return self.services.cluster

    async def retry_until_deadline(
        self, call: Call, attempt: Callable[[], Awaitable[Result]], *, makes_change: bool = True
    ) -> Result:
        """Call `attempt` until it returns or the deadline passes. After the alert has resolved, a call that
        `makes_change` is not repeated.

        Raises OutcomeUnknown at the deadline if a failure of this call, or of an earlier call of this command, left the
        outcome open.
        """
        backoff, may_be_done = Backoff(_FIRST_WAIT, _LONGEST_WAIT, jitter=True), call.resumed
        permission_grace = PermissionGrace()
        report_at = self._clock.now() + REPORT_EVERY / 3
        while True:
            try:
                return await attempt()
            except (ClusterUnavailable, ObjectChanged, ClusterRefused) as error:
                if permission_grace.is_final(error, self._clock.now()):
                    if may_be_done:
                        raise OutcomeUnknown(f"a change may have been made before this: {error}") from error
                    raise
                may_be_done = may_be_done or getattr(error, "may_be_done", False)
                failure = OutcomeUnknown if may_be_done else TemporaryFailure
                wait = backoff.next()
                wait = min(getattr(error, "retry_after", None) or 0.0, LONGEST_ASKED_FOR) or wait
                clearance = await clearance_of(call)
                if clearance == "stop":
                    raise failure(f"{STOPPED}; last: {error}") from error
                if clearance == "resolved" and makes_change:
                    raise _unwanted(error, may_be_done) from error
                if wait >= (call.deadline - self._clock.now()).total_seconds():
                    if isinstance(error, ClusterRefused) and not may_be_done:
                        raise
                    raise failure(f"not done in time: {error}", error.output) from error
                if call.report_wait is not None and self._clock.now() >= report_at:
                    report_at = self._clock.now() + REPORT_EVERY
                    await call.report_wait(f"{self.name} waits for the Kubernetes API: {error}")
                await self._clock.sleep_until(self._clock.now() + timedelta(seconds=wait))

    async def set_field(
        self, call: Call, ref: Ref, field: field_changes.RevertibleField, value: Any
    ) -> tuple[Object, Any, bool]:
        async def attempt() -> tuple[Object, Any, bool]:
            present = await self.cluster.get(ref)
            recorded = field_changes.changes_by_run(present, field).get(call.run_id)
            before = recorded.was if recorded else field.read(present)
            patch = field_changes.change(present, field, value, call.run_id)
            if patch is None:
                return present, before, recorded is not None
            return await self.cluster.patch(ref, patch), before, True

        return await self.retry_until_deadline(call, attempt)

    async def take_back(
        self, call: Call, ref: Ref, field: field_changes.RevertibleField, of_all_runs: bool = False
    ) -> tuple[Object, str, bool]:
        async def attempt() -> tuple[Object, str, bool]:
            present = await self.cluster.get(ref)
            if of_all_runs:
                reversal = field_changes.undo_for_all_runs(present, field)
            else:
                reversal = field_changes.undo(present, field, call.run_id)
            if reversal.change is None:
                return present, reversal.why, False
            return await self.cluster.patch(ref, reversal.change), reversal.why, reversal.why == field_changes.PUT_BACK

        return await self.retry_until_deadline(call, attempt)

    async def assign(
        self, call: Call, ref: Ref, field: field_changes.RevertibleField, value: Any, event: str, message: str = ""
    ) -> dict[str, Any]:
        present, before, is_set_by_run = await self.set_field(call, ref, field, value)
        if is_set_by_run:
            await self.cluster.record(present, event, because(call, message or event))
        return {**_named(ref), "before": {field.name: before}, "after": {field.name: field.read(present)}}

    async def restore(
        self, call: Call, ref: Ref, field: field_changes.RevertibleField, event: str, message: str = ""
    ) -> dict[str, Any]:
        try:
            present, why, is_back = await self.take_back(call, ref, field)
        except ObjectMissing:
            return {**_named(ref), "note": GONE}
        if is_back:
            await self.cluster.record(present, event, because(call, message or event))
        return {**_named(ref), "after": {field.name: field.read(present)}, "note": why}


def _named(ref: Ref) -> dict[str, str]:
    return {"node": ref.name} if ref.resource == NODES else {"object": str(ref)}


class RestorableAction(ClusterAction):
    """The undo is the same action with the parameter ``restore``."""

    restored_by: ClassVar[frozenset[str]]

    @classmethod
    def inverse(cls, params: BaseModel, output: Mapping[str, Any] | None) -> Inverse | None:
        found_by = params.model_dump(mode="json", include=set(cls.restored_by), exclude_none=True)
        return Inverse(cls.name, {**found_by, "restore": True})


def _unwanted(error: ActionFailure, may_be_done: bool) -> NoLongerWanted:
    failure = NoLongerWanted(f"{RESOLVED}{', and it may have been made' if may_be_done else ''}; last: {error}")
    failure.is_begun = may_be_done
    return failure


def because(call: Call, change: str) -> str:
    return f"{change} by Trainmedic, playbook {call.playbook}, run {call.run_id}: {call.reason}"


def node_of(call: Call) -> str:
    """Raises PermanentFailure if the target has no node."""
    if call.target.node is None:
        raise PermanentFailure(f"this action needs a node; {call.target.key} has none")
    return call.target.node


async def node_ref(action: ClusterAction, call: Call) -> Ref:
    """The target has the agent's name, which the cluster may know only as a host name. Raises PermanentFailure without
    a node.
    """
    name = node_of(call)
    known = action.services.cluster_topology()
    if name in known.names.names:
        return Ref(NODES, name)
    called = known.names.called(name)
    if len(called) == 1:
        return Ref(NODES, next(iter(called)))
    if not known.answers:
        await action.retry_until_deadline(call, lambda: _exists(action, name))
    return Ref(NODES, name)


async def _exists(action: ClusterAction, name: str) -> None:
    """Raise ClusterUnavailable if the node may exist under another name: considering it deleted would drop its pending
    undo.
    """
    try:
        await action.cluster.get(Ref(NODES, name))
    except ObjectMissing as error:
        raise ClusterUnavailable(f"it is unknown whether a node is called {name} until the nodes are listed") from error
