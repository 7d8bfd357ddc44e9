"""Who is where in the cluster: nodes and pods by address, pods by name and by job, from a cached watch.

It implements `ports.Pods`. Kept are the few fields that are asked for, so that ten thousand pods take some
megabytes. What is answered may be a moment old; before the first list has come, and for what it does not
know, the answer is empty, and an alert that needs it is refused, never guessed. Who calls it: wiring runs it
beside the engine and hands its answers to the resolution of targets.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Protocol

from trainmedic_server import telemetry
from trainmedic_server.domain.topology import Known, Pod, one_or_all
from trainmedic_server.errors import ActionFailure, ObjectChanged
from trainmedic_server.ports.cluster import NODES, PODS, Object, Resource

JOB_LABELS: Final = (
    "training.kubeflow.org/job-name",
    "jobset.sigs.k8s.io/jobset-name",
    "trainer.kubeflow.org/trainjob-name",
    "ray.io/cluster",
    "batch.kubernetes.io/job-name",
    "job-name",
)
"""By which a pod says whose it is, most telling first: a JobSet's pods belong to a Job as well."""
GPU: Final = "nvidia.com/gpu"
WATCH_SECONDS: Final = 300
_FIRST_WAIT: Final = 0.5
_LONGEST_WAIT: Final = 30.0

log = telemetry.logger(__name__)


class Watched(Protocol):
    """The part of the cluster's adapter that is needed here."""

    async def list_at(self, resource: Resource) -> tuple[Sequence[Object], str]: ...
    def watch(self, resource: Resource, version: str, seconds: int) -> AsyncIterator[tuple[str, Object]]: ...


@dataclass(frozen=True, slots=True)
class Node:
    """What is kept of a node."""

    name: str
    addresses: tuple[str, ...]


class KubernetesTopology:
    """Run `watch` in the background; ask at any time."""

    def __init__(self, cluster: Watched, metrics: telemetry.Metrics) -> None:
        self._cluster = cluster
        self._metrics = metrics
        self._nodes: dict[str, Node] = {}
        self._pods: dict[str, Pod] = {}
        self._inventory: dict[str, str | tuple[str, ...]] | None = None
        self.is_filled = False

    async def watch(self) -> None:
        """Keep up with the cluster until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._follow(NODES, self._nodes, _node))
            tasks.create_task(self._follow(PODS, self._pods, _pod))

    def inventory(self) -> Known:
        """What `domain.target` asks for.

        A pod in its node's network has the node's address; it is the node's.
        """
        if self._inventory is None:
            found: dict[str, str | tuple[str, ...]] = {}
            jobs: dict[str, set[str]] = {}
            for pod in self._pods.values():
                found |= dict.fromkeys(pod.addresses, pod.node)
                if pod.job is not None:
                    found[f"pod:{pod}"] = pod.job
                    jobs.setdefault(pod.node, set()).add(pod.job)
            found |= {address: node.name for node in self._nodes.values() for address in node.addresses}
            found |= {f"node:{node}": one_or_all(on) for node, on in jobs.items()}
            self._inventory = found
        return self._inventory

    def pod(self, uid: str) -> Pod | None:
        return self._pods.get(uid)

    def pods(self) -> Sequence[Pod]:
        return tuple(self._pods.values())

    def pods_of(self, job: str) -> Sequence[Pod]:
        return tuple(pod for pod in self._pods.values() if pod.job == job)

    async def _follow(self, resource: Resource, kept: dict[str, Any], read: Callable[[Object], Any]) -> None:
        wait = _FIRST_WAIT
        while True:
            try:
                found, version = await self._cluster.list_at(resource)
                fresh = {one["metadata"]["uid"]: value for one in found if (value := read(one)) is not None}
                kept.clear()
                kept.update(fresh)
                self._inventory = None
                self.is_filled = True
                wait = _FIRST_WAIT
                while True:
                    version = await self._watch_once(resource, version, kept, read)
            except ObjectChanged:
                continue  # the version is too old to go on from: list again
            except ActionFailure as error:
                log.warning("the cluster cannot be watched; trying again", resource=resource.plural, error=str(error))
            except Exception:  # the loop's boundary
                self._metrics.loop_errors.labels("whereabouts").inc()
                log.exception("watching the cluster failed; trying again", resource=resource.plural)
            await asyncio.sleep(wait * random.uniform(0.5, 1.0))  # noqa: S311 - to spread out
            wait = min(wait * 2, _LONGEST_WAIT)

    async def _watch_once(
        self, resource: Resource, version: str, kept: dict[str, Any], read: Callable[[Object], Any]
    ) -> str:
        """Take in what changes until the watch ends by itself; the version that was reached."""
        async for type_, found in self._cluster.watch(resource, version, WATCH_SECONDS):
            version = found["metadata"]["resourceVersion"]
            if type_ == "BOOKMARK":
                continue
            value = None if type_ == "DELETED" else read(found)
            if value is None:
                kept.pop(found["metadata"]["uid"], None)
            else:
                kept[found["metadata"]["uid"]] = value
            self._inventory = None
        return version


def _node(found: Object) -> Node:
    addresses = (found.get("status") or {}).get("addresses") or ()
    return Node(found["metadata"]["name"], tuple(str(one["address"]) for one in addresses if one.get("address")))


def _pod(found: Object) -> Pod | None:
    node = (found.get("spec") or {}).get("nodeName")
    status = found.get("status") or {}
    if not node or status.get("phase") in ("Succeeded", "Failed"):
        return None
    labels = found["metadata"].get("labels") or {}
    addresses = tuple(one["ip"] for one in status.get("podIPs") or () if one.get("ip"))
    return Pod(
        uid=found["metadata"]["uid"],
        namespace=found["metadata"]["namespace"],
        name=found["metadata"]["name"],
        node=node,
        job=next((labels[name] for name in JOB_LABELS if labels.get(name)), None),
        addresses=addresses or ((status["podIP"],) if status.get("podIP") else ()),
        gpus=_gpus(found["spec"]),
    )


def _gpus(spec: Mapping[str, Any]) -> int:
    """How many whole GPUs a pod asks for; of shares and MIG instances it is only known that they are on one."""
    asked = [(container.get("resources") or {}).get("limits") or {} for container in spec.get("containers") or ()]
    whole = sum(int(limits[GPU]) for limits in asked if str(limits.get(GPU, "")).isdigit())
    return whole or int(any(name.startswith("nvidia.com/") for limits in asked for name in limits))
