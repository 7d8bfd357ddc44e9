"""A model of a small site: one node with two GPUs in a cluster, and a training job on it. It remembers what was done to
it and when, which is what the tests compare with what the server says.

It stands behind the real actions: `SiteCluster` is their Kubernetes API, `SiteBus` carries their commands.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import Any

from trainmedic.wire import undoing
from trainmedic.wire.envelope import APPLIED, FAILED, REJECTED, UNSUPPORTED, Command, Reply
from trainmedic_server import errors
from trainmedic_server.domain.message import Severity
from trainmedic_server.ports.cluster import JOBS, NODES, PODS, Object, Ref, Resource
from trainmedic_server.ports.metric_history import MetricSeries
from trainmedic_server.ports.outside import Clock, Presence

GPUS = ("0", "1")
SLOW = {"job.checkpoint": 20.0, "job.rollback": 15.0, "disk.clean": 20.0, "job.scale_batch": 10.0}
"""Seconds that a command takes; any other takes two."""
POD_ENDS_AFTER = 6.0
CHECK_LASTS = 40.0


@dataclass(frozen=True)
class Deed:
    """Something that was done to the site."""

    at: datetime
    action: str
    """The name of the action that does such a thing; ``cordon`` and ``uncordon`` for the two of a node."""
    is_undo: bool = False


@dataclass
class Site:
    """What is true of it now, and all that was done to it."""

    clock: Clock
    node: str = "node-a7"
    job: str = "olmo-3"
    faults: Mapping[str, str] = field(default_factory=dict)
    """What becomes of a command, by its action: ``rejected``, ``failed``, ``silent`` (nobody takes it) or ``lost`` (it
    is carried out, and the answer is lost); for ``check``, that the health check fails."""
    workers: int = 4
    deeds: list[Deed] = field(default_factory=list)
    applied: set[str] = field(default_factory=set)
    """The ids of the commands that were carried out."""
    caps: set[str] = field(default_factory=set)
    scales: dict[str, float] = field(default_factory=dict)
    """By what the job's learning rate, batch and accumulation were multiplied so far."""
    is_paused: bool = False
    excluded: set[str] = field(default_factory=set)
    is_elastic: bool = False
    """Whether each node of the job has a launcher of its own."""
    waiting: set[str] = field(default_factory=lambda: {"spare-9"})
    """Nodes of an elastic job that were left out for load before the run began."""
    failed_checks: int = 0
    told: list[str] = field(default_factory=list)

    def note(self, action: str, *, is_undo: bool = False) -> None:
        self.deeds.append(Deed(self.clock.now(), action, is_undo))

    def carry_out(self, command: Command) -> Mapping[str, Any]:
        """Change the site as the command says; what the receiver answers."""
        undo_of, params = command.undo_of, command.params
        if undo_of is not None and undo_of not in self.applied and not command.action.startswith("launcher."):
            return {undoing.NOTHING: True, undoing.KNOWN: undoing.NEVER_APPLIED}
        self.applied.add(command.id)
        match command.action:
            case "gpu.power_limit" if undo_of is not None:
                self.caps.discard(undo_of)
            case "gpu.power_limit":
                self.caps.add(command.id)
                return {"previous_watts": 700.0, "limit_watts": 500.0, "lease_seconds": 300}
            case "job.scale_lr" | "job.scale_batch" | "job.accumulate":
                self.scales[command.action] = self.scales.get(command.action, 1.0) * params["factor"]
            case "job.dataloader_workers":
                previous, self.workers = self.workers, params.get("at_most", params.get("count"))
                return {"previous": previous, "count": self.workers}
            case "job.pause":
                self.is_paused = True
            case "job.resume":
                self.is_paused = False
            case "job.rollback":
                return {"step": 4200}
            case "launcher.exclude_node":
                (self.waiting if params["node"] == "spare-9" else self.excluded).add(params["node"])
            case "launcher.include_node":
                self.excluded.discard(params["node"])
                self.waiting.discard(params["node"])
            case "node.facts":
                return {"cpu": {"percent": 95}, "memory": {"percent": 93}, "gpu": {"temperature_celsius": 91}}
        return {}


class SiteBus:
    """Agents, the job and its launcher, which answer after a while."""

    is_signed = True

    def __init__(self, site: Site) -> None:
        self._site = site
        self._answered: dict[str, Reply] = {}

    async def request(
        self, command: Command, unheard: Callable[[], Awaitable[bool]] | None = None
    ) -> tuple[Reply, ...]:
        site = self._site
        if command.id in self._answered:
            return (self._answered[command.id],)
        fault = site.faults.get(command.action) if command.undo_of is None else None
        sender = command.target.get("job") or command.target.get("node") or ""
        if fault == "lost":
            site.note(command.action)
            site.carry_out(command)
        if fault in ("lost", "silent"):
            await site.clock.sleep_until(command.expires_at + timedelta(seconds=1))
            return ()
        status = {"rejected": REJECTED, "failed": FAILED}.get(fault or "", APPLIED)
        if site.workers <= command.params.get("at_most", site.workers - 1):
            status = UNSUPPORTED  # there is nothing to lower
        output: Mapping[str, Any] = {"reason": "the test wants it so"}
        if status == APPLIED:
            if command.action != "gpu.renew_lease":
                site.note(command.action, is_undo=command.undo_of is not None)
            output = site.carry_out(command)
        await asyncio.sleep(SLOW.get(command.action, 2.0))
        reply = Reply(command.id, sender, status, None, output, site.clock.now(), job=command.target.get("job"))
        self._answered[command.id] = reply
        return (reply,)

    def tell(self, command: Command) -> None:
        """Ignore what expects no reply."""

    def acknowledge(self, command_id: str) -> None:
        """Keep the answer: whoever asks again gets the same."""

    async def agents(self) -> list[Presence]:
        return [Presence(self._site.node, self._site.clock.now(), {"gpus": [{"index": int(gpu)} for gpu in GPUS]})]

    async def jobs(self) -> list[Presence]:
        ranks = [{"rank": number, "node": self._site.node, "gpu": gpu} for number, gpu in enumerate(GPUS)]
        details = {"placement": ranks}
        return [Presence(self._site.job, self._site.clock.now(), details)]

    async def launchers(self) -> list[Presence]:
        site = self._site
        if site.is_elastic:
            return [self._launcher(node) for node in (site.node, "spare-1", "spare-9")]
        left_out = sorted(site.excluded)
        details = {"node": "login", "starts_all_nodes": True, "max_nodes": 4, "left_out": left_out}
        return [Presence(self._site.job, self._site.clock.now(), details)]

    def _launcher(self, node: str) -> Presence:
        site = self._site
        is_out, waits = node in site.excluded | site.waiting, node in site.waiting
        details = {"node": node, "state": "left_out" if is_out else "running", "min_nodes": 1, "max_nodes": 3}
        details["left_out"] = [node] if is_out else []
        return Presence(site.job, site.clock.now(), {**details, **({"left_out_for_load": [node]} if waits else {})})

    async def check(self) -> None:
        """It answers."""


class SiteMetrics:
    """A Prometheus by which the job trains at the same speed whatever is done to it."""

    async def read(self, query: str, begin: datetime, end: datetime, every: timedelta) -> Sequence[MetricSeries]:
        looks = [begin + number * every for number in range((end - begin) // every + 1)]
        return [
            MetricSeries({}, [(at.timestamp(), at.timestamp() if "steps_total" in query else 90.0) for at in looks])
        ]


class SiteCluster:
    """The Kubernetes API with the node, two pods on it, and the Jobs that are created."""

    def __init__(self, site: Site) -> None:
        self._site = site
        self._node: dict[str, Any] = {"metadata": {"name": site.node, "resourceVersion": "1", "uid": "n"}, "spec": {}}
        owner = [{"kind": "Job", "controller": True}]
        self._pods = {
            name: {"metadata": {"name": name, "namespace": "ml", "uid": name, "ownerReferences": owner}, "spec": {}}
            for name in ("rank-0", "rank-1")
        }
        self._ended_at: dict[str, datetime] = {}
        self._jobs: dict[str, tuple[dict[str, Any], datetime]] = {}

    @property
    def is_cordoned(self) -> bool:
        return bool(self._node["spec"].get("unschedulable"))

    async def get(self, ref: Ref) -> Object:
        await asyncio.sleep(0.1)
        if ref.resource == NODES:
            return deepcopy(self._node)
        if ref.resource == JOBS and ref.name in self._jobs:
            return self._job(ref.name)
        raise errors.ObjectMissing(f"there is no {ref}")

    async def list(
        self, resource: Resource, namespace: str | None = None, labels: str = "", fields: str = ""
    ) -> Sequence[Object]:
        assert resource == PODS
        now = self._site.clock.now()
        return [pod for name, pod in self._pods.items() if self._ended_at.get(name, now) >= now]

    async def patch(self, ref: Ref, change: Mapping[str, Any], subresource: str = "") -> Object:
        if "k8s.cordon" in self._site.faults and change.get("spec", {}).get("unschedulable"):
            raise errors.ClusterRefused("the test wants it so", may_pass=False)
        was = self.is_cordoned
        self._node = _merged(self._node, {key: value for key, value in change.items() if key != "status"})
        self._node["metadata"]["resourceVersion"] = str(int(self._node["metadata"]["resourceVersion"]) + 1)
        if was is not self.is_cordoned:
            self._site.note("cordon" if self.is_cordoned else "uncordon")
        return deepcopy(self._node)

    async def create(self, resource: Resource, namespace: str | None, body: Object) -> Object:
        self._site.note("k8s.create_job")
        made = {**deepcopy(dict(body)), "metadata": {**body["metadata"], "uid": body["metadata"]["name"]}}
        self._jobs[body["metadata"]["name"]] = (made, self._site.clock.now())
        return made

    async def delete(self, ref: Ref, uid: str, grace: timedelta | None = None) -> None:
        self._site.note("k8s.delete_pod")

    async def evict(self, ref: Ref, uid: str, grace: timedelta | None = None) -> None:
        self._site.note("k8s.drain")
        if "k8s.drain" in self._site.faults or (ref.name == "rank-1" and len(self._ended_at) == 0):
            raise errors.EvictionBlocked("its budget allows one at a time")
        self._ended_at[ref.name] = self._site.clock.now() + timedelta(seconds=POD_ENDS_AFTER)
        self._pods[ref.name]["metadata"]["deletionTimestamp"] = self._site.clock.now().isoformat()

    async def record(self, about: Object, reason: str, message: str, warning: bool = False) -> None:
        """Events change nothing."""

    async def check(self) -> None:
        """It answers."""

    def _job(self, name: str) -> Object:
        job, made_at = self._jobs[name]
        if self._site.clock.now() - made_at < timedelta(seconds=CHECK_LASTS):
            return job
        has_failed = "check" in self._site.faults
        self._site.failed_checks += has_failed
        kind = "Failed" if has_failed else "Complete"
        return {**job, "status": {"conditions": [{"type": kind, "status": "True"}]}}


class SiteNotifier:
    """Remembers what people were told."""

    def __init__(self, site: Site) -> None:
        self._site = site

    async def notify(self, title: str, message: str, to: str | None, severity: Severity = Severity.INFO) -> None:
        self._site.told.append(title)


def _merged(present: Mapping[str, Any], change: Mapping[str, Any]) -> dict[str, Any]:
    """A JSON merge patch (RFC 7386)."""
    result = dict(present)
    for name, value in change.items():
        if value is None:
            result.pop(name, None)
        elif isinstance(value, Mapping):
            result[name] = _merged(result.get(name) or {}, value)
        else:
            result[name] = value
    return result
