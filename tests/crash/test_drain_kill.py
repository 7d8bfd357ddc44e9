"""A node is drained while the server is killed, and while the Kubernetes API is in trouble, again and again."""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from app.adapters.kubernetes_cluster import KubernetesCluster
from app.ports.cluster import Ref
from tests.kubernetes.api_server import ApiServer, Fault
from tests.kubernetes.world import Kubelet, World
from tests.live import Server, delivery, resolved

PODS = 8
PLAYBOOK = """
playbook: drain-node
on: {alert: NodeSick}
target: {node: '{{ labels.job_name }}'}
steps:
  - {id: drain, action: k8s.drain, timeout: 2m, retry: {attempts: 5, delay: 1s}, undo: on_resolve}
"""


class Node:
    """A node with pods, and its kubelet, in a thread of their own."""

    def __init__(self, kubeconfig: Path) -> None:
        self._kubeconfig = kubeconfig
        self._ready = threading.Event()
        self._over = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._live()))
        self.ref: Ref | None = None
        self.ended: list[str] = []
        self.left = PODS
        self.is_cordoned = False

    def __enter__(self) -> Node:
        self._thread.start()
        assert self._ready.wait(20)
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join(20)

    async def _live(self) -> None:
        cluster = await KubernetesCluster.opened(self._kubeconfig)
        world = World(cluster)
        await world.start()
        self.ref = await world.node()
        for number in range(PODS):
            await world.pod(f"worker-{number}", self.ref)
        async with Kubelet(world, self.ref, after=0.15) as kubelet:
            self.ended = kubelet.ended
            self._ready.set()
            while not self._over.is_set():
                await asyncio.sleep(0.05)
        await cluster.close()


@pytest.fixture
def stand_in() -> Iterator[ApiServer]:
    with ApiServer().running() as server:
        yield server


@pytest.fixture
def kubeconfig(stand_in: ApiServer, tmp_path: Path) -> Path:
    path = tmp_path / "kubeconfig.json"
    path.write_text(json.dumps(stand_in.kubeconfig()))
    return path


def test_a_drain_ends_right_however_often_the_server_and_the_api_go(
    stand_in: ApiServer, kubeconfig: Path, tmp_path: Path
) -> None:
    """Killed and cut off at random moments: every pod is evicted once, the history tells one step that
    succeeded, and when the alert resolves the node takes pods again."""
    chance = random.Random(7)
    with Node(kubeconfig) as node, Server(tmp_path / "s", PLAYBOOK, "--kubernetes", str(kubeconfig)) as server:
        assert node.ref is not None
        fired = delivery("NodeSick", node.ref.name)
        assert server.ask("/webhook", fired).status == 200
        for round_ in range(4):
            time.sleep(chance.uniform(0.1, 0.7))
            with contextlib.ExitStack() as trouble:
                if round_ == 1:
                    trouble.enter_context(stand_in.outage())
                    time.sleep(1)
                elif round_ == 2:
                    stand_in.faults.append(Fault(429, times=6, retry_after=1))
                elif round_ == 3:
                    stand_in.faults.append(Fault(500, times=6, is_done_first=True))
                server.kill()
                server.start()
        run = server.closed_run(60)
        assert run["status"] == "succeeded", run
        (step,) = run["steps"]
        assert step["output"]["left"] == []
        assert step["output"]["before"] == {"cordoned": False}
        assert sorted(node.ended) == [f"worker-{number}" for number in range(PODS)]
        assert evicted(stand_in) == {f"worker-{number}" for number in range(PODS)}
        assert is_cordoned(stand_in, node.ref)
        assert server.ask("/webhook", resolved(fired)).status == 200
        undone = server.undone_run()
        assert undone["steps"][0]["undo"]["status"] == "done"
        assert not is_cordoned(stand_in, node.ref)
        kinds = [event["kind"] for event in undone["events"]]
        assert kinds.count("step_succeeded") == 1, kinds


def evicted(stand_in: ApiServer) -> set[str]:
    return {one.name for one in stand_in.requests if one.resource == "pods/eviction"}


def is_cordoned(stand_in: ApiServer, node: Ref) -> bool:
    found = stand_in.objects.get(("v1", "nodes"), "", node.name)
    return bool(found["spec"].get("unschedulable"))
