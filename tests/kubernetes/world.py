"""A cluster that the tests act on: nodes, pods and workloads, all made through the API.

Where TRAINMEDIC_TEST_KUBECONFIG names a kubeconfig it is that cluster, and the suite runs unchanged
but for what it does to the stand-in itself. Nothing here needs a kubelet: nodes and pods are objects
that the suite makes, and `Kubelet` is who ends pods. Nor does anything need a controller, or mind one:
where nobody counts a PodDisruptionBudget's pods `recount` does, the Jobs are told to be managed by the
suite, and the controllers that pods name are of a kind that no cluster knows.
"""

from __future__ import annotations

import asyncio
import contextlib
import uuid
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import Any, cast

from msgspec.structs import replace

from trainmedic.wire.envelope import new_id
from trainmedic_core.target import Target, TargetKind
from trainmedic_server.adapters.kubernetes_cluster import FIELD_MANAGER, KubernetesCluster, path_of
from trainmedic_server.adapters.system_clock import SystemClock
from trainmedic_server.domain.alert import Alert, AlertStatus
from trainmedic_server.domain.topology import ClusterTopology
from trainmedic_server.errors import ActionFailure, ObjectExists, ObjectMissing
from trainmedic_server.ports.actions import Call, Services
from trainmedic_server.ports.cluster import NODES, PODS, Object, Ref, Resource
from trainmedic_server.ports.outside import CommandBus, HttpCaller

NAMESPACES = Resource("v1", "namespaces", "Namespace", is_namespaced=False)
SERVICE_ACCOUNTS = Resource("v1", "serviceaccounts", "ServiceAccount")
CUSTOM_KINDS = Resource(
    "apiextensions.k8s.io/v1", "customresourcedefinitions", "CustomResourceDefinition", is_namespaced=False
)
EVENTS = Resource("v1", "events", "Event")
BUDGETS = Resource("policy/v1", "poddisruptionbudgets", "PodDisruptionBudget")
IMAGE = "registry.invalid/none:1"
MANAGED_BY = "suite.example.com/trainmedic"
_CONTROLLERS = "suite.example.com/v1"
"""API of the controllers of pods. Of a kind that it knows, a cluster's garbage collector would look for the
owner, and take a pod away whose owner does not exist; a controller would make pods of its own."""


@dataclass
class World:
    """What one test has made; `clean` takes it away."""

    cluster: KubernetesCluster
    tag: str = field(default_factory=lambda: uuid.uuid4().hex[:8])
    made: list[Ref] = field(default_factory=list)
    bus: CommandBus | None = None
    by: Callable[[type[Any]], Awaitable[KubernetesCluster]] | None = None
    """By whose account an action works; by the suite's own where None."""
    topology: ClusterTopology = field(default_factory=ClusterTopology)
    """What a watch over the cluster knows, as actions ask it."""
    patience: float = 5.0
    """Seconds to wait for the cluster's own controllers; 0 once it is known that there are none."""

    @property
    def namespace(self) -> str:
        return f"tm-{self.tag}"

    async def start(self) -> None:
        await self.make(NAMESPACES, None, {"metadata": {"name": self.namespace}})
        # No pod is let in before it is there, and who makes it, if anybody does, takes a moment.
        with contextlib.suppress(ObjectExists):
            await self.cluster.create(SERVICE_ACCOUNTS, self.namespace, {"metadata": {"name": "default"}})

    async def make(self, resource: Resource, namespace: str | None, body: Mapping[str, Any]) -> Object:
        kind = {"apiVersion": resource.api_version, "kind": resource.kind}
        made = await self.cluster.create(resource, namespace, {**kind, **body})
        self.made.append(Ref(resource, made["metadata"]["name"], namespace))
        return made

    async def node(self, name: str = "node", **spec: Any) -> Ref:
        ref = Ref(NODES, f"{name}-{self.tag}")
        # With a label, as any node has. The API server notes nobody's changes of an object that was made empty.
        metadata = {"name": ref.name, "labels": {"suite.example.com/tag": self.tag}}
        await self.make(NODES, None, {"metadata": metadata, "spec": spec})
        return ref

    async def pod(
        self,
        name: str,
        node: Ref,
        labels: Mapping[str, str] | None = None,
        owner: str | None = "ReplicaSet",
        annotations: Mapping[str, str] | None = None,
        volumes: tuple[Mapping[str, Any], ...] = (),
        phase: str = "Running",
        gpus: int = 0,
    ) -> Ref:
        """A pod on `node` that runs and is Ready, of a controller of the kind `owner`."""
        metadata: dict[str, Any] = {"name": name, "labels": dict(labels or {}), "annotations": dict(annotations or {})}
        if owner is not None:
            metadata["ownerReferences"] = [
                {
                    "apiVersion": _CONTROLLERS,
                    "kind": owner,
                    "name": f"{name}-owner",
                    "uid": str(uuid.uuid4()),
                    "controller": True,
                }
            ]
        asked = {"limits": {"nvidia.com/gpu": str(gpus)}}
        spec = {
            "nodeName": node.name,
            "containers": [{"name": "main", "image": IMAGE, **({"resources": asked} if gpus else {})}],
            "volumes": [dict(one) for one in volumes],
            "terminationGracePeriodSeconds": 30,
        }
        await self.make(PODS, self.namespace, {"metadata": metadata, "spec": spec})
        ref = Ref(PODS, name, self.namespace)
        ready = {"type": "Ready", "status": "True" if phase == "Running" else "False"}
        await self.cluster.patch(ref, {"status": {"phase": phase, "conditions": [ready]}}, "status")
        return ref

    async def budget(self, app: str, least: int, name: str = "guard") -> Ref:
        """A PodDisruptionBudget for the pods with the label app, counted."""
        spec = {"minAvailable": least, "selector": {"matchLabels": {"app": app}}}
        ref = Ref(BUDGETS, name, self.namespace)
        await self.make(BUDGETS, self.namespace, {"metadata": {"name": name}, "spec": spec})
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self.patience):
                while "observedGeneration" not in (await self.cluster.get(ref)).get("status", {}):
                    await asyncio.sleep(0.05)
                return ref
        self.patience = 0.0  # there is no disruption controller here: be one
        await self.recount(ref)
        return ref

    async def recount(self, ref: Ref) -> None:
        """Count a budget's pods, as kube-controller-manager does, where nothing else has."""
        if self.patience > 0:
            return
        found = await self.cluster.get(ref)
        labels = ",".join(f"{name}={value}" for name, value in found["spec"]["selector"]["matchLabels"].items())
        pods = await self.cluster.list(PODS, self.namespace, labels)
        healthy = sum(is_ready(pod) and "deletionTimestamp" not in pod["metadata"] for pod in pods)
        least = int(found["spec"]["minAvailable"])
        status = {
            "observedGeneration": found["metadata"]["generation"],
            "currentHealthy": healthy,
            "desiredHealthy": least,
            "expectedPods": len(pods),
            "disruptionsAllowed": max(0, healthy - least),
        }
        await self.cluster.patch(ref, {"status": status}, "status")

    async def end(self, job: Ref, how: str, message: str = "") -> None:
        """Have a Job end, Complete or Failed, in the steps that the API server asks of whoever manages Jobs."""
        now = datetime.now(UTC).isoformat(timespec="seconds").replace("+00:00", "Z")
        steps = ["SuccessCriteriaMet" if how == "Complete" else "FailureTarget", how]
        conditions = [
            {"type": one, "status": "True", "lastTransitionTime": now, "reason": "OfTheSuite", "message": message}
            for one in steps
        ]
        started = {"startTime": now}
        await self.cluster.patch(job, {"status": {**started, "conditions": conditions[:1]}}, "status")
        finished = {"completionTime": now} if how == "Complete" else {}
        await self.cluster.patch(job, {"status": {**finished, "conditions": conditions}}, "status")

    async def kind_of_ones_own(self) -> Resource:
        """A custom kind of this test alone: ``spec.paused`` suspends it."""
        group, schema = f"t{self.tag}.example.com", {"type": "object", "x-kubernetes-preserve-unknown-fields": True}
        version = {"name": "v1", "served": True, "storage": True, "schema": {"openAPIV3Schema": schema}}
        names = {"plural": "trainings", "singular": "training", "kind": "Training", "listKind": "TrainingList"}
        spec = {"group": group, "scope": "Namespaced", "names": names, "versions": [version]}
        ref = Ref(CUSTOM_KINDS, f"trainings.{group}")
        await self.make(CUSTOM_KINDS, None, {"metadata": {"name": ref.name}, "spec": spec})
        async with asyncio.timeout(60):
            while not _is_established(await self.cluster.get(ref)):
                await asyncio.sleep(0.05)
        return Resource(f"{group}/v1", "trainings", "Training")

    async def taints(self, node: Ref) -> list[Object]:
        """A node's taints, without those that the cluster itself puts on a node that is not ready."""
        found = (await self.cluster.get(node)).get("spec", {}).get("taints") or ()
        return [one for one in found if not one["key"].startswith("node.kubernetes.io/")]

    async def events(self, about: Ref) -> list[Object]:
        """The Events that Trainmedic has left on an object of the cluster; others leave theirs."""
        uid = (await self.cluster.get(about))["metadata"]["uid"]
        found = await self.cluster.list(EVENTS, about.namespace or "default", fields=f"involvedObject.uid={uid}")
        return [one for one in found if (one.get("source") or {}).get("component") == FIELD_MANAGER]

    async def act(self, action: type[Any], node: Ref | None = None, run_id: str | None = None, **given: Any) -> Any:
        """Perform an action once, as the engine would; returns its output."""
        return await self.perform(action, self.call(action, node, run_id, **given))

    async def perform(self, action: type[Any], call: Call) -> Any:
        bus, http = cast(CommandBus, self.bus), cast(HttpCaller, None)
        cluster = await self.by(action) if self.by else self.cluster
        services = Services(SystemClock(), bus, http, cluster=cluster, cluster_topology=lambda: self.topology)
        return await action(services).perform(call)

    def again(self, call: Call, **changes: Any) -> Call:
        """The same call as a restarted server makes it."""
        return replace(call, **{"resumed": True, "deadline": SystemClock().now() + timedelta(seconds=5), **changes})

    def call(
        self,
        action: type[Any],
        node: Ref | None = None,
        run_id: str | None = None,
        timeout: float = 5.0,
        undo_of: str | None = None,
        resumed: bool = False,
        tell: Any = None,
        command_id: str | None = None,
        **params: Any,
    ) -> Call:
        now = SystemClock().now()
        return Call(
            command_id=command_id or new_id(),
            run_id=run_id or new_id(),
            playbook="a-playbook",
            target=Target(TargetKind.NODE, node=node.name) if node else Target(TargetKind.CLUSTER),
            params=action.Params.model_validate(params),
            reason="NodeDown fires",
            issued_at=now,
            deadline=now + timedelta(seconds=timeout),
            alert=Alert("f1", AlertStatus.FIRING, {"alertname": "NodeDown"}, {}, now),
            resumed=resumed,
            undo_of=undo_of,
            report_wait=tell,
        )

    async def exists(self, ref: Ref) -> bool:
        try:
            await self.cluster.get(ref)
        except ObjectMissing:
            return False
        return True

    async def clean(self) -> None:
        """Leave nothing behind: not what was made, nor Events on nodes, nor pods that end in their own time."""
        with contextlib.suppress(ActionFailure):
            found = await self.cluster.list(PODS, self.namespace)
            for pod in found:
                await self._take_away(Ref(PODS, pod["metadata"]["name"], self.namespace))
        for ref in reversed(self.made):
            if ref.resource == NODES:
                with contextlib.suppress(ActionFailure):
                    uid = (await self.cluster.get(ref))["metadata"]["uid"]
                    for event in await self.cluster.list(EVENTS, "default", fields=f"involvedObject.uid={uid}"):
                        await self._take_away(Ref(EVENTS, event["metadata"]["name"], "default"))
            await self._take_away(ref)

    async def _take_away(self, ref: Ref) -> None:
        # A Job's pods are not to be orphaned, for which it would wait for a garbage collector.
        options = {"gracePeriodSeconds": 0, "propagationPolicy": "Background"}
        with contextlib.suppress(ActionFailure):
            await self.cluster._call("DELETE", path_of(ref), None, options)


def _is_established(definition: Object) -> bool:
    conditions = (definition.get("status") or {}).get("conditions") or ()
    return any((one["type"], one["status"]) == ("Established", "True") for one in conditions)


def is_ready(pod: Object) -> bool:
    conditions = (pod.get("status") or {}).get("conditions") or ()
    return any(one.get("type") == "Ready" and one.get("status") == "True" for one in conditions)


@dataclass
class Kubelet:
    """Ends the pods of a node that are to be deleted, `after` so many seconds, as a kubelet does."""

    world: World
    node: Ref
    after: float = 0.0
    stubborn: frozenset[str] = frozenset()
    """Pods that it never ends."""
    ended: list[str] = field(default_factory=list)
    _task: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Kubelet:
        self._task = asyncio.create_task(self._run())
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._task is not None
        self._task.cancel()
        await asyncio.wait([self._task])

    async def _run(self) -> None:
        while True:
            try:
                for pod in await self.world.cluster.list(PODS, fields=f"spec.nodeName={self.node.name}"):
                    name = pod["metadata"]["name"]
                    if "deletionTimestamp" in pod["metadata"] and name not in self.stubborn:
                        await asyncio.sleep(self.after)
                        ref = Ref(PODS, name, pod["metadata"]["namespace"])
                        await self.world.cluster.delete(ref, pod["metadata"]["uid"], timedelta(0))
                        self.ended.append(name)
            except ActionFailure:
                pass  # the API server is away; it will be back
            await asyncio.sleep(0.05)


async def until(condition: Callable[[], Any]) -> None:
    async with asyncio.timeout(60):
        while not condition():
            await asyncio.sleep(0.02)
