"""A cluster that the tests act on: nodes, pods and workloads, all made through the API.

Where TRAINMEDIC_TEST_KUBECONFIG names a kubeconfig it is that cluster, and the suite runs unchanged
but for what it does to the stand-in itself. Nothing here needs a kubelet: nodes and pods are objects
that the suite makes, and `Kubelet` is who ends pods.
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field, replace
from datetime import timedelta
from typing import Any, cast

from app import ports
from app.adapters.kubernetes_cluster import KubernetesCluster
from app.adapters.system_clock import SystemClock
from app.domain.alert import Alert, AlertStatus
from app.domain.target import Kind, Target
from app.errors import ActionFailure, ObjectMissing
from app.ports.cluster import NODES, PODS, Object, Ref, Resource
from trainmedic.envelope import new_id

NAMESPACES = Resource("v1", "namespaces", "Namespace", is_namespaced=False)
BUDGETS = Resource("policy/v1", "poddisruptionbudgets", "PodDisruptionBudget")
IMAGE = "registry.invalid/none:1"


@dataclass
class World:
    """What one test has made; `clean` takes it away."""

    cluster: KubernetesCluster
    tag: str = field(default_factory=lambda: uuid.uuid4().hex[:8])
    made: list[Ref] = field(default_factory=list)
    bus: ports.CommandBus | None = None
    by: Callable[[type[Any]], Awaitable[KubernetesCluster]] | None = None
    """By whose account an action works; by the suite's own where None."""

    @property
    def namespace(self) -> str:
        return f"tm-{self.tag}"

    async def start(self) -> None:
        await self.make(NAMESPACES, None, {"metadata": {"name": self.namespace}})

    async def make(self, resource: Resource, namespace: str | None, body: Mapping[str, Any]) -> Object:
        made = await self.cluster.create(resource, namespace, body)
        self.made.append(Ref(resource, made["metadata"]["name"], namespace))
        return made

    async def node(self, name: str = "node", **spec: Any) -> Ref:
        ref = Ref(NODES, f"{name}-{self.tag}")
        await self.make(NODES, None, {"metadata": {"name": ref.name}, "spec": spec})
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
                    "apiVersion": "apps/v1",
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

    async def act(self, action: type[Any], node: Ref | None = None, run_id: str | None = None, **given: Any) -> Any:
        """Perform an action once, as the engine would; returns its output."""
        return await self.perform(action, self.call(action, node, run_id, **given))

    async def perform(self, action: type[Any], call: ports.Call) -> Any:
        bus, http = cast(ports.CommandBus, self.bus), cast(ports.HttpCaller, None)
        cluster = await self.by(action) if self.by else self.cluster
        return await action(ports.Services(SystemClock(), bus, http, cluster=cluster)).perform(call)

    def again(self, call: ports.Call, **changes: Any) -> ports.Call:
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
    ) -> ports.Call:
        now = SystemClock().now()
        return ports.Call(
            command_id=command_id or new_id(),
            run_id=run_id or new_id(),
            playbook="a-playbook",
            target=Target(Kind.NODE, node=node.name) if node else Target(Kind.CLUSTER),
            params=action.Params.model_validate(params),
            reason="NodeDown fires",
            issued_at=now,
            deadline=now + timedelta(seconds=timeout),
            alert=Alert("f1", AlertStatus.FIRING, {"alertname": "NodeDown"}, {}, now),
            resumed=resumed,
            undo_of=undo_of,
            tell=tell,
        )

    async def exists(self, ref: Ref) -> bool:
        try:
            await self.cluster.get(ref)
        except ObjectMissing:
            return False
        return True

    async def clean(self) -> None:
        for ref in reversed(self.made):
            try:
                found = await self.cluster.get(ref)
                await self.cluster.delete(ref, found["metadata"]["uid"], timedelta(0))
            except ActionFailure:
                continue


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
