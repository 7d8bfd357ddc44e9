"""The cached watch: what it knows of nodes and pods, and how it keeps up."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Sequence
from datetime import timedelta
from typing import Any

import pytest

from tests.kubernetes.api_server import ApiServer
from tests.kubernetes.world import World, until
from trainmedic_server import telemetry
from trainmedic_server.adapters import kubernetes_topology
from trainmedic_server.adapters.kubernetes_topology import KubernetesTopology
from trainmedic_server.adapters.system_clock import SystemClock
from trainmedic_server.domain.topology import ClusterTopology, Topology
from trainmedic_server.errors import ObjectChanged
from trainmedic_server.ports.cluster import Object, Ref, Resource


@pytest.fixture
async def cluster_watch(world: World) -> AsyncIterator[KubernetesTopology]:
    found = KubernetesTopology(world.cluster, SystemClock(), telemetry.Metrics())
    task = asyncio.create_task(found.watch())
    await until(lambda: found.is_filled)
    yield found
    task.cancel()
    await asyncio.wait([task])


async def placed(world: World, node: Ref, name: str, address: str, **labels: str) -> Ref:
    pod = await world.pod(name, node, labels={key.replace("__", "/").replace("_", "-"): v for key, v in labels.items()})
    await world.cluster.patch(pod, {"status": {"podIP": address, "podIPs": [{"ip": address}]}}, "status")
    return pod


def node_at(watch: KubernetesTopology, address: str) -> str | None:
    return Topology(cluster=watch.topology()).node_at(address)


async def test_an_address_identifies_its_node(world: World, cluster_watch: KubernetesTopology) -> None:
    """The address is that of the node, of a pod on it, or IPv6."""
    node = await world.node()
    await world.cluster.patch(
        node, {"status": {"addresses": [{"type": "InternalIP", "address": "192.0.2.10"}]}}, "status"
    )
    await placed(world, node, "exporter", "2001:db8::7")
    await until(lambda: node_at(cluster_watch, "2001:db8::7") == node.name)
    assert node_at(cluster_watch, "192.0.2.10") == node.name


async def test_a_node_that_accepts_no_new_pods_is_unavailable(world: World, cluster_watch: KubernetesTopology) -> None:
    """It is cordoned by any user, or its kubelet is silent."""
    node = await world.node()

    async def is_told(why: str) -> None:
        await until(
            lambda: [each.unavailable for each in cluster_watch.topology().nodes if each.name == node.name] == [why]
        )

    async def says(status: str) -> None:
        await world.cluster.patch(node, {"status": {"conditions": [{"type": "Ready", "status": status}]}}, "status")

    await says("True")
    await is_told("")
    await world.cluster.patch(node, {"spec": {"unschedulable": True}})
    await is_told("cordoned")
    await says("Unknown")
    await is_told("cordoned, not ready")
    await world.cluster.patch(node, {"spec": {"unschedulable": None}})
    await says("True")
    await is_told("")


async def test_a_pods_job_is_known_and_forgotten(world: World, cluster_watch: KubernetesTopology) -> None:
    """A JobSet's pod belongs to the JobSet, not to its inner Job; a deleted pod belongs to no job."""
    node = await world.node()
    labels = {"jobset.sigs.k8s.io__jobset_name": "llm-1", "batch.kubernetes.io__job_name": "llm-1-workers-0"}
    pod = await placed(world, node, "rank-0", "192.0.2.20", **labels)
    name = f"{world.namespace}/rank-0"
    await until(lambda: cluster_watch.topology().jobs_by_pod.get(name) == {"llm-1"})
    assert cluster_watch.topology().jobs_by_node[node.name] == {"llm-1"}
    await placed(world, node, "other-0", "192.0.2.21", job_name="llm-2")
    await until(lambda: cluster_watch.topology().jobs_by_node[node.name] == {"llm-1", "llm-2"})
    uid = (await world.cluster.get(pod))["metadata"]["uid"]
    await world.cluster.delete(pod, uid, timedelta(0))
    await until(lambda: name not in cluster_watch.topology().jobs_by_pod)
    assert cluster_watch.topology().jobs_by_node[node.name] == {"llm-2"}
    assert node_at(cluster_watch, "192.0.2.20") is None


async def test_a_finished_pods_address_belongs_to_no_pod(world: World, cluster_watch: KubernetesTopology) -> None:
    """The cluster assigns it to another pod."""
    node = await world.node()
    pod = await placed(world, node, "done", "192.0.2.30")
    await until(lambda: node_at(cluster_watch, "192.0.2.30") is not None)
    await world.cluster.patch(pod, {"status": {"phase": "Succeeded"}}, "status")
    await until(lambda: node_at(cluster_watch, "192.0.2.30") is None)


@pytest.mark.parametrize("trouble", ["broken", "compacted", "outage"])
async def test_changes_during_a_watch_outage_are_known_afterwards(
    world: World, cluster_watch: KubernetesTopology, stand_in: ApiServer, trouble: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The watch broke, its version was too old, or the server was unavailable."""
    monkeypatch.setattr("trainmedic_server.adapters.kubernetes_topology._FIRST_WAIT_SECONDS", 0.05)
    node = await world.node()
    await placed(world, node, "before", "192.0.2.40")
    await until(lambda: node_at(cluster_watch, "192.0.2.40") is not None)
    if trouble == "outage":
        with stand_in.outage():
            await asyncio.sleep(0.5)
    elif trouble == "compacted":
        stand_in.objects.forget_the_past()
        stand_in.break_watches()
    else:
        stand_in.break_watches()
    await placed(world, node, "after", "192.0.2.41")
    await until(lambda: node_at(cluster_watch, "192.0.2.41") is not None)
    assert node_at(cluster_watch, "192.0.2.40") is not None


async def test_a_change_during_a_query_of_another_thread_is_known_to_the_next(
    world: World, cluster_watch: KubernetesTopology, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The run store's thread queries while the watch applies a change: the cached result must not stay."""
    node = await world.node()
    await placed(world, node, "before", "192.0.2.50")
    await until(lambda: node_at(cluster_watch, "192.0.2.50") is not None)
    puts_together, has_changed = threading.Event(), threading.Event()

    def slowly(*known: Any) -> ClusterTopology:
        puts_together.set()
        has_changed.wait(1)  # which comes only where the watch does not wait for this
        return ClusterTopology(*known)

    await placed(world, node, "asked-for", "192.0.2.51")
    with monkeypatch.context() as patch:
        patch.setattr("trainmedic_server.adapters.kubernetes_topology.ClusterTopology", slowly)
        asking = asyncio.create_task(_in_threads(cluster_watch.topology, puts_together.is_set))
        await until(puts_together.is_set)
        await placed(world, node, "after", "192.0.2.52")
        await asyncio.sleep(0.1)
        has_changed.set()
        await asking
    await until(lambda: node_at(cluster_watch, "192.0.2.52") is not None)


async def test_while_the_api_server_is_unavailable_no_node_is_unknown(
    world: World, stand_in: ApiServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """This includes the time before the first list. Known nodes stay known."""
    monkeypatch.setattr("trainmedic_server.adapters.kubernetes_topology._FIRST_WAIT_SECONDS", 0.05)
    watched = KubernetesTopology(world.cluster, SystemClock(), telemetry.Metrics())
    assert not watched.topology().answers
    started = watched.topology().silent_since
    assert started is not None
    task = asyncio.create_task(watched.watch())
    await until(lambda: watched.is_filled)
    node = await world.node()
    await until(lambda: node.name in watched.topology().names.names)
    assert watched.topology().answers
    with stand_in.outage():
        await until(lambda: not watched.topology().answers)
        assert node.name in watched.topology().names.names
        silent = watched.topology().silent_since
        assert silent is not None
        assert started < silent <= SystemClock().now()
    await until(lambda: watched.topology().answers)
    assert watched.topology().silent_since is None
    task.cancel()
    await asyncio.wait([task])


@pytest.mark.parametrize(("owner", "is_per_node"), [("DaemonSet", True), ("ReplicaSet", False), (None, None)])
async def test_the_owner_shows_whether_each_node_has_such_a_pod(
    world: World, cluster_watch: KubernetesTopology, owner: str | None, is_per_node: bool | None
) -> None:
    """A single exporter measures other machines than its own."""
    pod = await world.pod("exporter", await world.node(), owner=owner)
    name = f"{pod.namespace}/{pod.name}"
    await until(lambda: name in cluster_watch.topology().pods_by_full_name)
    assert cluster_watch.topology().pods_by_full_name[name].is_per_node is is_per_node


async def test_an_address_shared_by_two_pods_belongs_to_neither(
    world: World, cluster_watch: KubernetesTopology
) -> None:
    """One of them is gone, and the cluster has not noticed yet."""
    first, second = await world.node("first"), await world.node("second")
    await placed(world, first, "before", "192.0.2.60")
    await until(lambda: node_at(cluster_watch, "192.0.2.60") == first.name)
    await placed(world, second, "after", "192.0.2.60")
    await until(lambda: node_at(cluster_watch, "192.0.2.60") is None)


async def test_a_change_of_an_unused_field_changes_nothing(world: World, cluster_watch: KubernetesTopology) -> None:
    """Nodes report heartbeats all the time: the data computed from them stay in use."""
    node = await world.node()
    await until(lambda: node.name in cluster_watch.topology().names.names)
    before = cluster_watch.topology().names
    await world.cluster.patch(node, {"metadata": {"annotations": {"beat": "1"}}})
    await placed(world, node, "later", "192.0.2.70")
    await until(lambda: node_at(cluster_watch, "192.0.2.70") is not None)
    assert cluster_watch.topology().names is before


async def _in_threads(ask: Callable[[], Any], is_enough: Callable[[], bool]) -> None:
    while not is_enough():
        await asyncio.to_thread(ask)


async def test_permanently_expired_versions_are_requested_with_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    """The API server answers every watch with 410."""
    monkeypatch.setattr(kubernetes_topology, "_FIRST_WAIT_SECONDS", 3600.0)
    listed: list[Resource] = []

    class Cluster:
        async def list_at(self, resource: Resource) -> tuple[Sequence[Object], str]:
            await asyncio.sleep(0)
            listed.append(resource)
            return [], "1"

        async def watch(self, resource: Resource, version: str, seconds: int) -> AsyncIterator[tuple[str, Object]]:
            raise ObjectChanged("too old resource version")
            yield

    watched = KubernetesTopology(Cluster(), SystemClock(), telemetry.Metrics())
    task = asyncio.create_task(watched.watch())
    for _ in range(1000):
        await asyncio.sleep(0)
    task.cancel()
    await asyncio.wait([task])
    assert len(listed) == 2


async def test_watches_that_end_at_once_are_restarted_with_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    """A proxy closes them."""
    monkeypatch.setattr(kubernetes_topology, "_FIRST_WAIT_SECONDS", 3600.0)
    begun: list[Resource] = []

    class Cluster:
        async def list_at(self, resource: Resource) -> tuple[Sequence[Object], str]:
            return [], "1"

        async def watch(self, resource: Resource, version: str, seconds: int) -> AsyncIterator[tuple[str, Object]]:
            begun.append(resource)
            await asyncio.sleep(0)
            for nothing in ():
                yield nothing

    watched = KubernetesTopology(Cluster(), SystemClock(), telemetry.Metrics())
    task = asyncio.create_task(watched.watch())
    for _ in range(1000):
        await asyncio.sleep(0)
    task.cancel()
    await asyncio.wait([task])
    assert watched.is_filled
    assert len(begun) == 2
