"""Action ``k8s.drain``. Each round lists the pods again, so a drain continues after a server restart."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Mapping, Sequence
from datetime import datetime, timedelta
from typing import Any, ClassVar, cast

from msgspec import Struct, field
from pydantic import BaseModel, Field

from trainmedic.wire.backoff import Backoff
from trainmedic_core import words
from trainmedic_core.fields import Duration
from trainmedic_core.target import TargetKind
from trainmedic_server import errors
from trainmedic_server.actions import node_checkpoints
from trainmedic_server.actions.base import ActionParams, check_wanted, clearance_of
from trainmedic_server.actions.kubernetes import nodes
from trainmedic_server.actions.kubernetes.base import (
    EVENTS,
    ClusterAction,
    Permission,
    because,
    node_of,
    node_ref,
)
from trainmedic_server.actions.retrying import LONGEST_ASKED_FOR, REPORT_EVERY, PermissionGrace
from trainmedic_server.domain.value_types import ANY, BOOLEAN, NUMBER, TEXT, Shape
from trainmedic_server.ports.actions import Action, Call, Inverse
from trainmedic_server.ports.cluster import PODS, Object, Ref

# Seconds between two rounds. Doubles, up to `_LONGEST_ROUND`, in a pause and while every eviction or call fails.
ROUND = 1.0
_LONGEST_ROUND = 10.0
_EVICTIONS_AT_ONCE = 20
_SHOWN = 20  # pods in the output's `left`
_MIRROR = "kubernetes.io/config.mirror"  # annotation of static pods, which the kubelet runs without the API


class DrainParams(ActionParams):
    grace_period: Duration | None = Field(
        None, description="Time for each pod to end. By default what the pod requests."
    )
    checkpoint: Duration | None = Field(
        None,
        description="First let the training jobs on the node write a checkpoint, and delay the drain until they have, "
        "or until this time is over.",
    )
    force: bool = Field(False, description="Also end pods without a controller, which nothing recreates.")
    delete_emptydir_data: bool = Field(
        False, description="Also end pods with an emptyDir on disk, whose data is lost. One in memory never counts."
    )


class PodSelection(Struct, frozen=True):
    ending: tuple[Object, ...]  # To evict, or terminating already
    skipped: Mapping[str, int]  # Numbers of pods that stay, by reason
    forbidding: Mapping[str, str]
    """Reasons by pod why the drain must not begin or continue."""


class _Progress(Struct):
    """Pods by UID. ``evicted``: terminating, also by others. ``why``: why one remains. ``trouble``: the API's last
    failure, or "".
    """

    evicted: set[str] = field(default_factory=set)
    gone: set[str] = field(default_factory=set)
    why: dict[str, str] = field(default_factory=dict)
    seen: set[str] = field(default_factory=set)
    skipped: Mapping[str, int] = field(default_factory=dict)
    trouble: str = ""
    is_paused: bool = False
    reported_at: datetime | None = None

    def record_ending(self, pod: Object) -> None:
        holders = ", ".join(map(str, pod["metadata"].get("finalizers") or ()))
        self.evicted.add(uid_of(pod))
        self.why[uid_of(pod)] = f"ends, and is held by its finalizers: {holders}" if holders else "ends"

    def output(self, left: Sequence[Object]) -> dict[str, Any]:
        waiting = [{"pod": name_of(pod), "why": self.why.get(uid_of(pod), "ends")} for pod in left[:_SHOWN]]
        return {
            "evicted": len(self.evicted),
            "gone": len(self.gone),
            "left": waiting,
            "skipped": dict(self.skipped),
        }


class DrainNode(ClusterAction):
    name: ClassVar[str] = "k8s.drain"
    summary: ClassVar[str] = "Cordon the node and evict its pods, as their disruption budgets allow; undo uncordons."
    targets: ClassVar[frozenset[TargetKind]] = frozenset({TargetKind.NODE, TargetKind.GPU})
    leaves_disks: ClassVar[bool] = True
    default_timeout: ClassVar[timedelta] = timedelta(minutes=30)
    Params: ClassVar[type[BaseModel]] = DrainParams
    outputs: ClassVar[Mapping[str, Shape]] = {
        "node": TEXT,
        "before": {"cordoned": BOOLEAN},
        "evicted": NUMBER,
        "gone": NUMBER,
        "left": ANY,
        "skipped": ANY,
        "checkpoints": ANY,
    }
    permissions: ClassVar[tuple[Permission, ...]] = (
        Permission("", "nodes", ("get", "patch")),
        Permission("", "pods", ("list",)),
        Permission("", "pods/eviction", ("create",)),
        EVENTS,
    )

    async def perform(self, call: Call) -> Mapping[str, Any]:
        params = cast(DrainParams, call.params)
        before = await nodes.cordon(self, call)
        output: dict[str, Any] = {"node": before["node"], "before": before["before"]}
        try:
            if params.checkpoint is not None:
                await self._check_may_begin(call, params)
                output["checkpoints"] = await node_checkpoints.request_checkpoints(
                    self.services.bus, self._clock, call, node_of(call), params.checkpoint
                )
            output |= await self._evict_until_empty(call, params)
        except errors.ActionFailure as failure:
            failure.output = {**output, **failure.output}
            failure.is_begun = True  # The node is cordoned, which the undo reverts.
            is_wanted = not isinstance(failure, errors.NoLongerWanted)
            await self._leave_event(call, "DrainFailed" if is_wanted else "DrainStopped", str(failure), is_wanted)
            raise
        await self._leave_event(call, "Drained", f"{output['gone']} pods gone")
        return output

    @classmethod
    def inverse(cls, params: BaseModel, output: Mapping[str, Any] | None) -> Inverse | None:
        return Inverse(nodes.UncordonNode.name, {"restore": True})

    async def _check_may_begin(self, call: Call, params: DrainParams) -> None:
        """Raise PermanentFailure before jobs write a needless checkpoint."""
        try:
            await self._list_remaining(call, params, _Progress())
        except (errors.ClusterUnavailable, errors.ObjectChanged):
            pass  # The drain itself tries again.
        except errors.ClusterRefused as error:
            if not error.may_pass:
                raise

    async def _evict_until_empty(self, call: Call, params: DrainParams) -> dict[str, Any]:
        progress, permission_grace, backoff = _Progress(), PermissionGrace(), Backoff(2 * ROUND, _LONGEST_ROUND)
        left: Sequence[Object] = ()
        while True:
            try:
                left = await self._list_remaining(call, params, progress)
                if not left:
                    return progress.output(())
                clearance = await clearance_of(call)
                check_wanted(clearance, _describe_unfinished(left, progress), progress.output(left))
                progress.is_paused = clearance == "hold"
                is_stuck, retry_after = (True, 0.0)
                if not progress.is_paused:
                    is_stuck, retry_after = await self._evict_all(call, left, params, progress)
                if not is_stuck:
                    backoff.reset()
                wait = max(backoff.next(), min(retry_after, LONGEST_ASKED_FOR)) if is_stuck else ROUND
                progress.trouble, permission_grace = "", PermissionGrace()
            except (errors.ClusterUnavailable, errors.ObjectChanged, errors.ClusterRefused) as error:
                permission_grace.record(error, self._clock.now())
                if permission_grace.is_over:
                    raise
                progress.trouble = str(error)
                retry_after = getattr(error, "retry_after", None) or 0.0
                wait = max(backoff.next(), min(retry_after, LONGEST_ASKED_FOR))
            await self._report(call, left, progress)
            again_at = self._clock.now() + timedelta(seconds=wait)
            if again_at >= call.deadline:
                raise errors.TemporaryFailure(_describe_unfinished(left, progress), progress.output(left))
            await self._clock.sleep_until(again_at)

    async def _list_remaining(self, call: Call, params: DrainParams, progress: _Progress) -> Sequence[Object]:
        pods = await self.cluster.list(PODS, fields=f"spec.nodeName={(await node_ref(self, call)).name}")
        selection = select_pods(pods, params)
        if forbidding := selection.forbidding:
            shown = words.some([f"{pod} {why}" for pod, why in forbidding.items()], 5)
            begun = "the drain stopped" if progress.evicted else "nothing was evicted"
            raise errors.PermanentFailure(f"{begun}: {shown}", progress.output(selection.ending))
        present = {uid_of(pod) for pod in selection.ending}
        progress.seen |= present
        progress.gone |= progress.seen - present
        progress.skipped = selection.skipped
        return selection.ending

    async def _evict_all(
        self, call: Call, pods: Sequence[Object], params: DrainParams, progress: _Progress
    ) -> tuple[bool, float]:
        """Return whether every eviction was refused (False without any), and the seconds that the API asks to wait."""
        gate = asyncio.Semaphore(_EVICTIONS_AT_ONCE)
        asked = [pod for pod in pods if not pod["metadata"].get("deletionTimestamp")]
        for pod in pods:
            if pod["metadata"].get("deletionTimestamp"):
                progress.record_ending(pod)

        async def ask(pod: Object) -> errors.ActionFailure | None:
            ref = Ref(PODS, pod["metadata"]["name"], pod["metadata"]["namespace"])
            async with gate:
                if await clearance_of(call) != "go_on":
                    return None  # The next round reports why.
                try:
                    await self.cluster.evict(ref, uid_of(pod), params.grace_period)
                except errors.EvictionBlocked as error:
                    progress.why[uid_of(pod)] = f"blocked by its disruption budget: {error}"
                    return error
                except errors.ActionFailure as error:
                    progress.why[uid_of(pod)] = f"cannot be evicted: {error}"
                    return error
            progress.record_ending(pod)
            return None

        failures = [error for error in await asyncio.gather(*(ask(pod) for pod in asked)) if error is not None]
        for error in failures:
            if isinstance(error, errors.PermanentFailure):
                error.output = progress.output(pods)
                raise error
        pauses = [getattr(error, "retry_after", None) or 0.0 for error in failures]
        return bool(failures) and len(failures) == len(asked), max(pauses, default=0.0)

    async def _report(self, call: Call, left: Sequence[Object], progress: _Progress) -> None:
        now = self._clock.now()
        if call.report_wait is None or (progress.reported_at and now - progress.reported_at < REPORT_EVERY):
            return
        progress.reported_at = now
        await call.report_wait(_describe_unfinished(left, progress))

    async def _leave_event(self, call: Call, reason: str, message: str, warning: bool = False) -> None:
        try:
            node = await self.cluster.get(await node_ref(self, call))
        except errors.ActionFailure:
            return  # The history has it as well.
        await self.cluster.record(node, reason, because(call, message), warning)


def select_pods(pods: Sequence[Object], params: DrainParams) -> PodSelection:
    ending: list[Object] = []
    skipped: Counter[str] = Counter()
    forbidding: dict[str, str] = {}
    for pod in pods:
        owner = _controller(pod)
        finished = (pod.get("status") or {}).get("phase") in ("Succeeded", "Failed")
        if _MIRROR in (pod["metadata"].get("annotations") or {}):
            skipped["mirror"] += 1
        elif owner is not None and owner.get("kind") == "DaemonSet":
            skipped["daemonset"] += 1
        elif finished:
            skipped["finished"] += 1
        elif pod["metadata"].get("deletionTimestamp"):
            ending.append(pod)  # It is terminating already: only wait for it.
        elif owner is None and not params.force:
            forbidding[name_of(pod)] = "has no controller that would recreate it (force: true ends it)"
        elif _has_data_on_disk(pod) and not params.delete_emptydir_data:
            forbidding[name_of(pod)] = "has an emptyDir on disk (delete_emptydir_data: true ends it)"
        else:
            ending.append(pod)
    return PodSelection(tuple(ending), dict(skipped), forbidding)


def name_of(pod: Object) -> str:
    return f"{pod['metadata'].get('namespace')}/{pod['metadata']['name']}"


def uid_of(pod: Object) -> str:
    return str(pod["metadata"]["uid"])


def _controller(pod: Object) -> Mapping[str, Any] | None:
    return next((owner for owner in pod["metadata"].get("ownerReferences") or () if owner.get("controller")), None)


def _has_data_on_disk(pod: Object) -> bool:
    volumes = (pod.get("spec") or {}).get("volumes") or ()
    return any("emptyDir" in volume and (volume["emptyDir"] or {}).get("medium") != "Memory" for volume in volumes)


def _describe_unfinished(left: Sequence[Object], progress: _Progress) -> str:
    if progress.trouble:
        return f"the drain waits for the Kubernetes API: {progress.trouble}"
    if progress.is_paused:
        return f"evictions are paused with the server; {len(left)} pods remain"
    pods = [f"{name_of(pod)} {progress.why.get(uid_of(pod), 'is there')}" for pod in left]
    return f"{len(left)} pods remain: {words.some(pods, 3)}"


ACTIONS: tuple[type[Action], ...] = (DrainNode,)
