"""A node with pods and its kubelet, in a thread of their own, for tests that drain it with a real server.

Here: the node, and what the stand-in saw of a drain. Not here: the server (``tests.support.live``), the trouble.
"""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path

from tests.kubernetes.api_server import ApiServer
from tests.kubernetes.world import Kubelet, World
from trainmedic_server.adapters.kubernetes_cluster import KubernetesCluster
from trainmedic_server.ports.cluster import Ref


class LivingNode:
    """A node with `count` pods; each takes `after` seconds to end once it was evicted, and `stubborn` ones never do."""

    def __init__(
        self, kubeconfig: Path, count: int = 8, after: float = 0.15, stubborn: frozenset[str] = frozenset()
    ) -> None:
        self._kubeconfig = kubeconfig
        self._count, self._after, self._stubborn = count, after, stubborn
        self._ready = threading.Event()
        self._over = threading.Event()
        self._thread = threading.Thread(daemon=True, target=lambda: asyncio.run(self._live()))
        self.ref: Ref | None = None
        self.ended: list[str] = []

    @property
    def name(self) -> str:
        assert self.ref is not None
        return self.ref.name

    @property
    def pods(self) -> list[str]:
        return [f"worker-{number}" for number in range(self._count)]

    def __enter__(self) -> LivingNode:
        self._thread.start()
        assert self._ready.wait(60)
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join(20)

    async def _live(self) -> None:
        cluster = await KubernetesCluster.opened(self._kubeconfig)
        world = World(cluster)
        await world.start()
        self.ref = await world.node()
        for name in self.pods:
            await world.pod(name, self.ref)
        async with Kubelet(world, self.ref, self._after, self._stubborn) as kubelet:
            self.ended = kubelet.ended
            self._ready.set()
            while not self._over.is_set():
                await asyncio.sleep(0.05)
        await cluster.close()


def evicted(stand_in: ApiServer) -> set[str]:
    return {one.name for one in stand_in.requests if one.resource == "pods/eviction"}


def is_cordoned(stand_in: ApiServer, node: Ref | None) -> bool:
    assert node is not None
    found = stand_in.objects.get(("v1", "nodes"), "", node.name)
    return bool(found["spec"].get("unschedulable"))
