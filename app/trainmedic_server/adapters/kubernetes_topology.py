"""Nodes and pods of the cluster, from a watch.

Before the first list, alerts that need the topology are refused. While the API server does not answer, no node counts
as unknown.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from datetime import timedelta
from typing import Any, Final, Protocol

from trainmedic.wire.backoff import Backoff
from trainmedic_server import telemetry
from trainmedic_server.adapters.kubernetes_pods import KubernetesPods
from trainmedic_server.domain.node_names import NodeNames
from trainmedic_server.domain.topology import ClusterNode, ClusterTopology, Pod, names_of
from trainmedic_server.errors import ActionFailure, ObjectChanged
from trainmedic_server.ports.cluster import NODES, PODS, Object, Resource
from trainmedic_server.ports.outside import Clock

JOB_LABELS: Final = (
    "training.kubeflow.org/job-name",
    "jobset.sigs.k8s.io/jobset-name",
    "trainer.kubeflow.org/trainjob-name",
    "ray.io/cluster",
    "batch.kubernetes.io/job-name",
    "job-name",
)
"""The most specific first: a JobSet's pods also belong to a Job."""
GPU: Final = "nvidia.com/gpu"
WATCH_SECONDS: Final = 60  # Duration of one watch. The next continues from its last version.
_FIRST_WAIT_SECONDS: Final = 0.5
_LONGEST_WAIT_SECONDS: Final = 30.0

log = telemetry.logger(__name__)


class WatchedCluster(Protocol):
    async def list_at(self, resource: Resource) -> tuple[Sequence[Object], str]: ...
    def watch(self, resource: Resource, version: str, seconds: int) -> AsyncIterator[tuple[str, Object]]: ...


class KubernetesTopology:
    """Run `watch` in the background; other methods are safe in any thread."""

    def __init__(
        self, cluster: WatchedCluster, clock: Clock, metrics: telemetry.Metrics, pods: KubernetesPods | None = None
    ) -> None:
        self._cluster = cluster
        self._clock = clock
        self._listener = pods
        self._metrics = metrics
        self._nodes: dict[str, ClusterNode] = {}
        self._pods: dict[str, Pod] = {}
        self._topology: ClusterTopology | None = None
        self._names: NodeNames | None = None
        self._unanswered = {NODES, PODS}  # Resources whose list or watch failed last, or has not begun.
        self._answered_at = dict.fromkeys((NODES, PODS), clock.now())
        self._lock = threading.Lock()
        self.filled = asyncio.Event()  # Set after both first lists.

    @property
    def is_filled(self) -> bool:
        return self.filled.is_set()

    async def watch(self) -> None:
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._follow(NODES, self._nodes, _node))
            tasks.create_task(self._follow(PODS, self._pods, _pod))

    def topology(self) -> ClusterTopology:
        with self._lock:
            if self._topology is None:
                nodes = tuple(self._nodes.values())
                if self._names is None:
                    self._names = names_of(nodes)
                since = min((self._answered_at[each] for each in self._unanswered), default=None)
                self._topology = ClusterTopology(nodes, dict(self._pods), since is None, self._names, since)
            return self._topology

    async def _follow(self, resource: Resource, stored: dict[str, Any], read: Callable[[Object], Any]) -> None:
        backoff = Backoff(_FIRST_WAIT_SECONDS, _LONGEST_WAIT_SECONDS, jitter=True)
        while True:
            began = self._clock.now()
            try:
                objects, version = await self._cluster.list_at(resource)
                self._report_list(resource, objects)
                fresh = {listed["metadata"]["uid"]: value for listed in objects if (value := read(listed)) is not None}
                with self._lock:
                    stored.clear()
                    stored.update(fresh)
                    self._forget_topology(resource)
                self._note_answer(resource, answers=True)
                while True:
                    version = await self._watch_once(resource, version, stored, read)
                    self._answered_at[resource] = self._clock.now()
                    await asyncio.sleep(_FIRST_WAIT_SECONDS)  # a proxy may end each watch at once
            except ObjectChanged:
                pass  # The version is too old to continue from: list again.
            except ActionFailure as error:
                self._note_answer(resource, answers=False)
                log.warning("cannot watch cluster; trying again", resource=resource.plural, error=str(error))
            except Exception:  # the loop's boundary
                self._note_answer(resource, answers=False)
                self._metrics.loop_errors.labels("whereabouts").inc()
                log.exception("watching cluster failed; trying again", resource=resource.plural)
            if self._clock.now() - began >= timedelta(seconds=_LONGEST_WAIT_SECONDS):
                backoff.reset()
            await asyncio.sleep(backoff.next())

    async def _watch_once(
        self, resource: Resource, version: str, stored: dict[str, Any], read: Callable[[Object], Any]
    ) -> str:
        async for change, changed in self._cluster.watch(resource, version, WATCH_SECONDS):
            version = changed["metadata"]["resourceVersion"]
            self._answered_at[resource] = self._clock.now()
            if change == "BOOKMARK":
                continue
            self._report_change(resource, changed, is_deleted=change == "DELETED")
            value = None if change == "DELETED" else read(changed)
            uid = changed["metadata"]["uid"]
            with self._lock:
                if stored.get(uid) == value:
                    continue  # Most changes, such as a node's heartbeat, change no stored field.
                if value is None:
                    stored.pop(uid, None)
                else:
                    stored[uid] = value
                self._forget_topology(resource)
        return version

    def _report_list(self, resource: Resource, objects: Sequence[Object]) -> None:
        if self._listener is None:
            return
        if resource == PODS:
            self._listener.pods_listed(objects, job_of)
        else:
            self._listener.nodes_listed(objects)

    def _report_change(self, resource: Resource, changed: Object, *, is_deleted: bool = False) -> None:
        if self._listener is None:
            return
        if resource == PODS:
            self._listener.pod_changed(changed, job_of(changed), is_deleted=is_deleted)
        else:
            self._listener.node_changed(changed, is_deleted=is_deleted)

    def _forget_topology(self, resource: Resource) -> None:
        self._topology = None
        if resource == NODES:
            self._names = None

    def _note_answer(self, resource: Resource, *, answers: bool) -> None:
        with self._lock:
            if answers:
                self._answered_at[resource] = self._clock.now()
                self._unanswered.discard(resource)
            else:
                self._unanswered.add(resource)
            self._topology = None
        if self._listener is not None:
            self._listener.answers = not self._unanswered
        if not self._unanswered:
            self.filled.set()


def _node(node: Object) -> ClusterNode:
    addresses = (node.get("status") or {}).get("addresses") or ()
    return ClusterNode(
        node["metadata"]["name"],
        tuple(str(entry["address"]) for entry in addresses if entry.get("address")),
        _attributes(node["metadata"].get("labels") or {}),
        _why_unavailable(node),
    )


def _why_unavailable(node: Object) -> str:
    """Return "" if new pods may start on the node."""
    conditions = (node.get("status") or {}).get("conditions") or ()
    is_ready = all(each.get("status") == "True" for each in conditions if each.get("type") == "Ready")
    is_cordoned = bool((node.get("spec") or {}).get("unschedulable"))
    return ", ".join(name for name, holds in (("cordoned", is_cordoned), ("not ready", not is_ready)) if holds)


def _attributes(labels: Mapping[str, Any]) -> Mapping[str, str]:
    """Add names without their prefix (``rack`` for ``example.com/rack``) where only one label has them."""
    short: dict[str, list[str]] = {}
    for name, value in labels.items():
        short.setdefault(str(name).rpartition("/")[2], []).append(str(value))
    unique = {name: values[0] for name, values in short.items() if len(values) == 1}
    return {**unique, **{str(name): str(value) for name, value in labels.items()}}


def _pod(pod: Object) -> Pod | None:
    """Return None if the pod has no node or has ended."""
    node = (pod.get("spec") or {}).get("nodeName")
    status = pod.get("status") or {}
    if not node or status.get("phase") in ("Succeeded", "Failed"):
        return None
    addresses = tuple(entry["ip"] for entry in status.get("podIPs") or () if entry.get("ip"))
    return Pod(
        uid=pod["metadata"]["uid"],
        namespace=pod["metadata"]["namespace"],
        name=pod["metadata"]["name"],
        node=node,
        job=job_of(pod),
        addresses=addresses or ((status["podIP"],) if status.get("podIP") else ()),
        gpus=_gpus(pod["spec"]),
        is_per_node=_is_per_node(pod["metadata"].get("ownerReferences") or ()),
        is_ending=bool(pod["metadata"].get("deletionTimestamp")),
    )


def job_of(pod: Object) -> str | None:
    labels = pod["metadata"].get("labels") or {}
    return next((str(labels[name]) for name in JOB_LABELS if labels.get(name)), None)


def _is_per_node(owners: Sequence[Mapping[str, Any]]) -> bool | None:
    """Return whether a DaemonSet or, for a static pod, the node owns the pod; None without owners."""
    kinds = {owner.get("kind") for owner in owners if owner.get("controller")} or {each.get("kind") for each in owners}
    return bool(kinds & {"DaemonSet", "Node"}) if kinds else None


def _gpus(spec: Mapping[str, Any]) -> int:
    """Count a pod's GPUs. Without whole ones, shares and MIG instances count as one GPU together."""
    limits = [(container.get("resources") or {}).get("limits") or {} for container in spec.get("containers") or ()]
    whole = sum(int(of_container[GPU]) for of_container in limits if str(of_container.get(GPU, "")).isdigit())
    return whole or int(any(name.startswith("nvidia.com/") for of_container in limits for name in of_container))
