"""What all actions on Kubernetes share: the cluster, insisting, and the permissions they declare.

Not here: the API (`ports.Cluster`), how a change is remembered (``notes``).
"""

from __future__ import annotations

import random
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any, ClassVar, TypeVar

from pydantic import BaseModel, ConfigDict

from trainmedic_server.actions.kubernetes import notes
from trainmedic_server.domain.target import TargetKind
from trainmedic_server.errors import (
    ActionFailure,
    ClusterRefused,
    ClusterUnavailable,
    ObjectChanged,
    ObjectMissing,
    OutcomeUnknown,
    PermanentFailure,
    TemporaryFailure,
)
from trainmedic_server.ports.actions import Call, Clearance, Inverse, Services
from trainmedic_server.ports.cluster import NODES, Cluster, Object, Ref

_FIRST_WAIT = 0.2
_LONGEST_WAIT = 10.0
TELL_EVERY = timedelta(seconds=15)
"""How often the history hears what is waited for."""
LONGEST_ASKED_FOR = 60.0
"""Seconds that are waited at most because the API server, or a proxy before it, has asked for it."""
DOUBT = timedelta(seconds=10)
"""For how long a refusal is doubted. An API server that has just started refuses everybody, until it has
read its roles and accounts: in a trial for a tenth of a second."""
GONE = "it is gone: nothing to take back"
STOPPED = "stopped, because the run was cancelled"

Result = TypeVar("Result")


class ClusterParams(BaseModel):
    """Base of the parameters; what is not known is refused."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


@dataclass(frozen=True, slots=True)
class Permission:
    """What the server's account must be allowed for an action, as in a (Cluster)Role.

    ``group`` is empty for the core API; ``resource`` has its subresource after a slash.
    """

    group: str
    resource: str
    verbs: tuple[str, ...]


EVENTS = Permission("", "events", ("create",))
"""Every action leaves an Event on the object that it touched."""


@dataclass(slots=True)
class Refusals:
    """Whether a refusal is to be believed: not before it has stood for `DOUBT`."""

    since: datetime | None = None

    def are_believed(self, error: ActionFailure, now: datetime) -> bool:
        """False for any other failure, after which a refusal is doubted anew."""
        if not isinstance(error, ClusterRefused):
            self.since = None
            return False
        self.since = self.since or now
        return not error.may_pass or now - self.since >= DOUBT


class ClusterAction:
    """Base of the actions. One insists: a conflict, an overloaded or failing API server, or one that is
    away is tried again until the call's deadline; one that refuses us, for a moment."""

    name: ClassVar[str]
    summary: ClassVar[str]
    targets: ClassVar[frozenset[TargetKind]] = frozenset(TargetKind)
    harmful: ClassVar[bool] = True
    default_timeout: ClassVar[timedelta] = timedelta(minutes=2)
    Params: ClassVar[type[BaseModel]]
    permissions: ClassVar[tuple[Permission, ...]]

    def __init__(self, services: Services) -> None:
        self._clock = services.clock
        self._bus = services.bus
        self._known_cluster = services.cluster

    def outcome_saved(self, command_id: str) -> None:
        """Nothing is held for it."""

    @classmethod
    def inverse(cls, params: BaseModel, output: Mapping[str, Any] | None) -> Inverse | None:
        return None

    @property
    def cluster(self) -> Cluster:
        if self._known_cluster is None:
            raise PermanentFailure(
                "no Kubernetes cluster is configured: start the server with --kubernetes in-cluster, or with the "
                "path of a kubeconfig"
            )
        return self._known_cluster

    async def insist(self, call: Call, attempt: Callable[[], Awaitable[Result]]) -> Result:
        """What `attempt` returns, tried until the deadline. Where a failure left open whether something
        was changed, the outcome is unknown then."""
        wait, is_open, refusals = _FIRST_WAIT, False, Refusals()
        tell_at = self._clock.now() + TELL_EVERY / 3
        while True:
            try:
                return await attempt()
            except (ClusterUnavailable, ObjectChanged, ClusterRefused) as error:
                if refusals.are_believed(error, self._clock.now()):
                    if is_open:
                        raise OutcomeUnknown(f"a change may have been made before this: {error}") from error
                    raise
                is_open = is_open or getattr(error, "may_be_done", False)
                asked = min(getattr(error, "retry_after", None) or 0.0, LONGEST_ASKED_FOR)
                pause = asked or wait * random.uniform(0.5, 1.0)  # noqa: S311 - to spread out
                if await told(call) == "stop":
                    raise (OutcomeUnknown if is_open else TemporaryFailure)(f"{STOPPED}; last: {error}") from error
                left = (call.deadline - self._clock.now()).total_seconds()
                if pause >= left:
                    if isinstance(error, ClusterRefused) and not is_open:
                        raise
                    kind = OutcomeUnknown if is_open else TemporaryFailure
                    raise kind(f"not done in time: {error}", error.output) from error
                if call.report_wait is not None and self._clock.now() >= tell_at:
                    tell_at = self._clock.now() + TELL_EVERY
                    await call.report_wait(f"{self.name} waits for the Kubernetes API: {error}")
                await self._clock.sleep_until(self._clock.now() + timedelta(seconds=pause))
                wait = min(wait * 2, _LONGEST_WAIT)

    async def set_field(self, call: Call, ref: Ref, field: notes.NotedField, value: Any) -> tuple[Object, Any, bool]:
        """Set a field of an object, noted for the run. Returns the object, what it was before, and
        whether this run holds the change."""

        async def attempt() -> tuple[Object, Any, bool]:
            found = await self.cluster.get(ref)
            held = notes.notes(found, field).get(call.run_id)
            before = held.was if held else field.read(found)
            change = notes.change(found, field, value, call.run_id)
            if change is None:
                return found, before, held is not None
            return await self.cluster.patch(ref, change), before, True

        return await self.insist(call, attempt)

    async def take_back(
        self, call: Call, ref: Ref, field: notes.NotedField, of_all_runs: bool = False
    ) -> tuple[Object, str, bool]:
        """Undo `_set`. Returns the object, what came of it, and whether the value was put back."""

        async def attempt() -> tuple[Object, str, bool]:
            found = await self.cluster.get(ref)
            undone = notes.release(found, field) if of_all_runs else notes.undo(found, field, call.run_id)
            if undone.change is None:
                return found, undone.why, False
            return await self.cluster.patch(ref, undone.change), undone.why, undone.why == "put back"

        return await self.insist(call, attempt)

    async def set_or_restore(self, call: Call, field: notes.NotedField, value: Any, is_undo: bool) -> dict[str, Any]:
        """Set a field of the target's node, or as an undo put back what was there; the step's output."""
        ref = Ref(NODES, node_of(call))
        if is_undo:
            try:
                node, why, is_back = await self.take_back(call, ref, field)
            except ObjectMissing:
                return {"node": ref.name, "note": GONE}
            if is_back:
                await self.cluster.record(node, "Restored", because(call, f"{field.name} put back"))
            return {"node": ref.name, "after": {field.name: field.read(node)}, "note": why}
        node, before, is_held = await self.set_field(call, ref, field, value)
        if is_held:
            await self.cluster.record(node, "Changed", because(call, f"{field.name} set"))
        return {"node": ref.name, "before": {field.name: before}, "after": {field.name: field.read(node)}}


async def told(call: Call) -> Clearance:
    """What operators have said since the attempt began."""
    return await call.clearance() if call.clearance is not None else "go_on"


def because(call: Call, what: str) -> str:
    """The message of an Event."""
    return f"{what} by Trainmedic, playbook {call.playbook}, run {call.run_id}: {call.reason}"


def node_of(call: Call) -> str:
    """The node of the target. Raises PermanentFailure where it has none."""
    if call.target.node is None:
        raise PermanentFailure(f"this works on a node, and {call.target.key} is none")
    return call.target.node
