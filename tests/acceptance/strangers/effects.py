"""What has really changed on nodes, GPUs, jobs and in the cluster, read where it takes effect.

A change is a line of text: ``cap dgx-a07/0 560``, ``cordon dgx-a07``, ``evict nlp/qwen-0``, ``clean dgx-a07``,
``command qwen-sft job.empty_cache``. `Effects.since` compares two moments, and has what was changed for a moment too:
the driver logs every limit that it sets, the API server every request. `Effects.restore` puts back what a case has left
behind, so that the next one begins on the same cluster.

Not here: who causes a change (``site``), which change is right (``cases``).
"""

from __future__ import annotations

import json
import os
import threading
import time
import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.acceptance.strangers.fleet import NODES, PODS, Job, Pod
from tests.driver.driver import Driver
from tests.kubernetes.api_server import ApiServer, Request

_NAMESPACES = ("v1", "namespaces")
_ACCOUNTS = ("v1", "serviceaccounts")
_NODES = ("v1", "nodes")
_PODS = ("v1", "pods")
_JOBS = ("batch/v1", "jobs")
_SOURCES = "suite.example.com/v1"
DEFAULT_WATTS = 700
OLD_FILE = "scratch/old.tmp"
_OLD = 30 * 86400


@dataclass(frozen=True)
class Moment:
    """State of everything that can change, at one moment."""

    watts: Mapping[str, int]
    """The power limit of each GPU, by ``<node>/<index>``."""
    sets: Mapping[str, int]
    """Number of times that the driver has set the limit of each GPU."""
    closed: frozenset[str]
    """Nodes that take no new pods."""
    pods: frozenset[str]
    """Pods that run, as ``<namespace>/<name>``."""
    files: Mapping[str, frozenset[str]]
    """Files on the disk of each agent's node."""
    commands: Mapping[str, tuple[str, ...]]
    """Commands that each job has received, oldest first."""
    requests: int
    """Number of requests to the API server."""


class Effects:
    """The cluster's state, by the stand-ins for its parts: `drivers` and `disks` by node, `logs` by job."""

    def __init__(
        self,
        cluster: ApiServer,
        drivers: Mapping[str, Driver],
        disks: Mapping[str, Path],
        logs: Mapping[str, Path],
    ) -> None:
        self._cluster = cluster
        self._drivers = drivers
        self._disks = disks
        self._logs = logs

    # --- the beginning --------------------------------------------------------------------------------

    def build(self) -> None:
        """Create all nodes, pods and files."""
        namespaces = {pod.namespace for pod in PODS} | {"trainmedic"}
        with self._cluster._lock:
            for namespace in sorted(namespaces):
                self._create(_NAMESPACES, "", {"metadata": {"name": namespace}})
                self._create(_ACCOUNTS, namespace, {"metadata": {"name": "default"}})
            for node in NODES.values():
                self._create(_NODES, "", {"metadata": {"name": node.name, "labels": {"kubernetes.io/os": "linux"}}})
                kinds = ("InternalIP" if _is_address(one) else "Hostname" for one in node.addresses)
                addresses = [{"type": kind, "address": one} for kind, one in zip(kinds, node.addresses, strict=True)]
                self._patch(_NODES, "", node.name, {"spec": {"taints": None}, "status": {"addresses": addresses}})
                self.set_ready(node.name, True)
            for pod in PODS:
                self._run(pod)
        for disk in self._disks.values():
            self._put_old_file(disk)

    def set_ready(self, node: str, is_ready: bool) -> None:
        """Set what the node's kubelet reports."""
        condition = {"type": "Ready", "status": "True" if is_ready else "Unknown"}
        with self._cluster._lock:
            self._patch(_NODES, "", node, {"status": {"conditions": [condition]}})

    @contextmanager
    def living(self) -> Iterator[None]:
        """Kubelets and the Job controller are at work: evicted pods end, and health checks pass."""
        over = threading.Event()

        def live() -> None:
            while not over.wait(0.05):
                self._live_once()

        thread = threading.Thread(daemon=True, target=live, name="kubelets")
        thread.start()
        try:
            yield
        finally:
            over.set()
            thread.join(5)

    def _live_once(self) -> None:
        with self._cluster._lock:
            for pod in self._cluster.objects.list(_PODS, None):
                if "deletionTimestamp" in pod["metadata"]:
                    place = (pod["metadata"]["namespace"], pod["metadata"]["name"])
                    self._cluster.objects.delete(_PODS, *place, {"gracePeriodSeconds": 0})
            for job in self._cluster.objects.list(_JOBS, None):
                if not (job.get("status") or {}).get("conditions"):
                    conditions = [{"type": one, "status": "True"} for one in ("SuccessCriteriaMet", "Complete")]
                    times = dict.fromkeys(("startTime", "completionTime"), "2026-01-31T12:00:00Z")
                    place = (job["metadata"]["namespace"], job["metadata"]["name"])
                    self._patch(_JOBS, *place, {"status": {"conditions": conditions, **times}})

    # --- what changed ---------------------------------------------------------------------------------

    def now(self) -> Moment:
        """The state at this moment."""
        with self._cluster._lock:
            nodes = self._cluster.objects.list(_NODES, None)
            pods = self._cluster.objects.list(_PODS, None)
        gpus = {f"{node}/{index}": (driver, index) for node, driver, index in self._gpus()}
        return Moment(
            watts={gpu: round(driver.watts(index)) for gpu, (driver, index) in gpus.items()},
            sets={gpu: len(driver.sets(index)) for gpu, (driver, index) in gpus.items()},
            closed=frozenset(_name(node) for node in nodes if _takes_no_pods(node)),
            pods=frozenset(_full_name(pod) for pod in pods if "deletionTimestamp" not in pod["metadata"]),
            files={node: _files(disk) for node, disk in self._disks.items()},
            commands={job: _actions(log) for job, log in self._logs.items()},
            requests=len(self._cluster.requests),
        )

    def since(self, before: Moment) -> tuple[str, ...]:
        """Return the changes since that moment, one line each, in a fixed order."""
        now = self.now()
        caps = {
            f"cap {node}/{index} {call.watts:g}"
            for node, driver, index in self._gpus()
            for call in driver.sets(index)[before.sets[f"{node}/{index}"] :]
        }
        cordons = [f"cordon {node}" for node in now.closed - before.closed]
        opened = [f"uncordon {node}" for node in before.closed - now.closed]
        evictions = [f"evict {pod}" for pod in before.pods - now.pods]
        cleanings = [f"clean {node}" for node, files in now.files.items() if before.files[node] - files]
        commands = [
            f"command {job} {action}"
            for job, actions in now.commands.items()
            for action in actions[len(before.commands[job]) :]
        ]
        changed = now.closed ^ before.closed
        writes = [
            f"write {request.verb} {request.resource} {request.namespace}/{request.name}"
            for request in self._cluster.requests[before.requests :]
            if _is_unexplained(request, changed)
        ]
        in_any_order = (*caps, *cordons, *opened, *evictions, *cleanings, *writes)
        return tuple(sorted(in_any_order)) + tuple(commands)

    def still_changed(self, before: Moment) -> tuple[str, ...]:
        """Return what can be reverted and is not. Evicted pods, deleted files and commands to jobs cannot be
        reverted."""
        now = self.now()
        caps = [f"{gpu} has {watts} W" for gpu, watts in now.watts.items() if watts != before.watts[gpu]]
        return (*caps, *(f"{node} is closed" for node in now.closed - before.closed))

    def restore(self) -> None:
        """Restore everything manually."""
        with self._cluster._lock:
            running = {_full_name(pod) for pod in self._cluster.objects.list(_PODS, None)}
            for pod in PODS:
                if f"{pod.namespace}/{pod.name}" not in running:
                    self._run(pod)
            for node in self._cluster.objects.list(_NODES, None):
                if _takes_no_pods(node):
                    self._patch(_NODES, "", _name(node), {"spec": {"unschedulable": None}})
            for job in self._cluster.objects.list(_JOBS, None):
                place = (job["metadata"]["namespace"], job["metadata"]["name"])
                self._cluster.objects.delete(_JOBS, *place, {})
        for _, driver, index in self._gpus():
            if round(driver.watts(index)) != DEFAULT_WATTS:
                driver.set_watts(index, DEFAULT_WATTS)
        for disk in self._disks.values():
            self._put_old_file(disk)

    def _gpus(self) -> Iterator[tuple[str, Driver, int]]:
        for node, driver in self._drivers.items():
            for index in range(len(driver.cards)):
                yield node, driver, index

    # --- the stand-ins --------------------------------------------------------------------------------

    def _run(self, pod: Pod) -> None:
        kind = {"apiVersion": _SOURCES, "kind": pod.owner}
        owner = kind | {"name": f"{pod.name}-owner", "uid": str(uuid.uuid4()), "controller": True}
        metadata = {"name": pod.name, "labels": dict(pod.labels), "ownerReferences": [owner]}
        containers = [{"name": "main", "image": "registry.invalid/none:1"}]
        spec = {"nodeName": pod.node, "containers": containers, "terminationGracePeriodSeconds": 30}
        self._create(_PODS, pod.namespace, {"metadata": metadata, "spec": spec})
        addresses = [{"ip": address} for address in pod.addresses]
        conditions = [{"type": "Ready", "status": "True"}]
        status = {"phase": "Running", "conditions": conditions, "podIPs": addresses}
        self._patch(_PODS, pod.namespace, pod.name, {"status": status})

    def _create(self, place: tuple[str, str], namespace: str, body: dict[str, Any]) -> None:
        self._cluster.objects.create(place, namespace, body, "kubelet")

    def _patch(self, place: tuple[str, str], namespace: str, name: str, change: dict[str, Any]) -> None:
        self._cluster.objects.patch(place, namespace, name, change, "kubelet")

    def _put_old_file(self, disk: Path) -> None:
        path = disk / OLD_FILE
        if path.exists():
            return
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"old")
        then = time.time() - _OLD
        for one in (path, path.parent):
            os.utime(one, (then, then))


def log_of(directory: Path, job: Job) -> Path:
    """Return where the program of a job records its commands."""
    return directory / job.name / "commands"


def _actions(log: Path) -> tuple[str, ...]:
    lines = log.read_text().splitlines() if log.exists() else []
    return tuple(json.loads(line)["action"] for line in lines)


def _files(disk: Path) -> frozenset[str]:
    return frozenset(str(path.relative_to(disk)) for path in disk.rglob("*") if path.is_file())


def _takes_no_pods(node: Mapping[str, Any]) -> bool:
    spec = node.get("spec") or {}
    return bool(spec.get("unschedulable")) or any(
        not taint["key"].startswith("node.kubernetes.io/") for taint in spec.get("taints") or ()
    )


def _is_unexplained(request: Request, changed: frozenset[str]) -> bool:
    """Return whether a request writes something other than an event, an eviction, or a node's cordon."""
    if request.verb in ("get", "list", "watch") or request.resource in ("events", "pods/eviction"):
        return False
    return request.resource != "nodes" or request.name not in changed


def _name(found: Mapping[str, Any]) -> str:
    return str(found["metadata"]["name"])


def _full_name(pod: Mapping[str, Any]) -> str:
    return f"{pod['metadata']['namespace']}/{pod['metadata']['name']}"


def _is_address(text: str) -> bool:
    return ":" in text or text.replace(".", "").isdigit()
