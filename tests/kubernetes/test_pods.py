"""Verdicts by pods, from the API: their status as the watch sees it, their events, and what may not be read."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from tests.helm import charts
from tests.kubernetes.accounts import client
from tests.kubernetes.api_server import ApiServer, Fault
from tests.kubernetes.world import EVENTS, World, until
from tests.support.pods import JOBSET, disrupted, ended, waiting, written
from tests.unit.diagnosis.test_job_diagnoses import World as Server
from trainmedic_logs.domain.pod_fault import PodFaultKind
from trainmedic_server import telemetry
from trainmedic_server.adapters import kubernetes_pods
from trainmedic_server.adapters.kubernetes_cluster import KubernetesCluster
from trainmedic_server.adapters.kubernetes_pods import KubernetesPods
from trainmedic_server.adapters.kubernetes_topology import KubernetesTopology
from trainmedic_server.adapters.system_clock import SystemClock
from trainmedic_server.engine.job_diagnoses import JobDiagnoses
from trainmedic_server.ports.cluster import Ref

JOB = "llm-7"


@pytest.fixture
async def pods(world: World) -> AsyncIterator[KubernetesPods]:
    """What the watch knows of pods."""
    made = KubernetesPods(world.cluster, SystemClock(), telemetry.Metrics())
    watched = KubernetesTopology(world.cluster, SystemClock(), telemetry.Metrics(), made)
    task = asyncio.create_task(watched.watch())
    await until(lambda: watched.is_filled)
    yield made
    task.cancel()
    await asyncio.wait([task])


async def a_worker(world: World, name: str = "worker-0", **status: Any) -> Ref:
    """A pod of the job, whose status is then this."""
    ref = await world.pod(name, await world.node(name), labels={JOBSET: JOB}, gpus=8)
    await world.cluster.patch(ref, {"status": status}, "status")
    return ref


async def tell(world: World, pod: Ref, reason: str, message: str) -> None:
    """Leave an event on a pod, as the kubelet does."""
    found = await world.cluster.get(pod)
    now = written(datetime.now(UTC))
    about = {"apiVersion": "v1", "kind": "Pod", "name": pod.name, "namespace": pod.namespace}
    event = {
        "metadata": {"generateName": f"{pod.name}."},
        "involvedObject": {**about, "uid": found["metadata"]["uid"]},
        "reason": reason,
        "message": message,
        "type": "Warning",
        "source": {"component": "kubelet"},
        "firstTimestamp": now,
        "lastTimestamp": now,
        "count": 1,
    }
    await world.make(EVENTS, pod.namespace, event)


def kinds(pods: KubernetesPods) -> list[PodFaultKind]:
    return [fault.kind for fault in pods.faults().get(JOB, ())]


async def verdict(pods: KubernetesPods) -> dict[str, Any]:
    """What a server says of the job a minute and a half later."""
    server = Server()
    server.clock.time = datetime.now(UTC) + timedelta(seconds=90)
    every = timedelta(minutes=1)
    diagnoses = JobDiagnoses(server.store, server, server, server.clock, telemetry.Metrics(), every, pods=pods)  # type: ignore[arg-type]
    await diagnoses.look()
    [known] = await server.store.verdicts_of(JOB, 10)
    return dict(known.plain)


async def test_a_killed_container_is_known_by_its_status(world: World, pods: KubernetesPods) -> None:
    """This holds even after the pod is gone."""
    now = datetime.now(UTC)
    pod = await a_worker(world, containerStatuses=[status_of(ended(now, 137, "OOMKilled"))])
    await until(lambda: kinds(pods) == [PodFaultKind.OUT_OF_MEMORY])
    uid = (await world.cluster.get(pod))["metadata"]["uid"]
    await world.cluster.delete(pod, uid, timedelta(0))
    said = await verdict(pods)
    assert (said["cause"], said["confidence"]) == ("host_memory", "high")
    assert f"{world.namespace}/worker-0 was killed, out of memory" in said["summary"]


async def test_an_eviction_names_the_resource(world: World, pods: KubernetesPods) -> None:
    """The pod's status is as the kubelet writes it."""
    message = "The node was low on resource: ephemeral-storage. Threshold quantity: 10Gi, available: 8Gi. "
    condition = disrupted(datetime.now(UTC), "TerminationByKubelet", message)
    await a_worker(world, phase="Failed", reason="Evicted", message=message, conditions=[condition])
    await until(lambda: kinds(pods) == [PodFaultKind.EVICTED])
    assert (await verdict(pods))["cause"] == "storage"


async def test_a_missing_image_is_a_job_that_did_not_start(world: World, pods: KubernetesPods) -> None:
    """The event has the registry's message if the status has none."""
    pod = await a_worker(
        world, phase="Pending", containerStatuses=[status_of(waiting("ImagePullBackOff", "Back-off pulling image"))]
    )
    await tell(world, pod, "Failed", 'Failed to pull image "r.example/llm:v9": r.example/llm:v9: not found')
    await until(lambda: kinds(pods) == [PodFaultKind.IMAGE])
    said = await verdict(pods)
    assert said["summary"].startswith("The job did not start")
    assert said["advice"] == "ask"


async def test_pods_from_before_the_server_start_are_read_from_the_list(world: World) -> None:
    """These are the pods that still exist."""
    await a_worker(world, containerStatuses=[status_of(ended(datetime.now(UTC), 137, "OOMKilled"))])
    made = KubernetesPods(world.cluster, SystemClock(), telemetry.Metrics())
    watched = KubernetesTopology(world.cluster, SystemClock(), telemetry.Metrics(), made)
    task = asyncio.create_task(watched.watch())
    await until(lambda: kinds(made) == [PodFaultKind.OUT_OF_MEMORY])
    task.cancel()
    await asyncio.wait([task])


async def test_a_node_that_is_not_ready_is_known_while_it_lasts(world: World, pods: KubernetesPods) -> None:
    """Its condition shows it."""
    pod = await a_worker(world)
    node = Ref(world.made[-2].resource, (await world.cluster.get(pod))["spec"]["nodeName"])
    silent = {"type": "Ready", "status": "Unknown", "reason": "NodeStatusUnknown"}
    silent["lastTransitionTime"] = written(datetime.now(UTC))
    await world.cluster.patch(node, {"status": {"conditions": [silent]}}, "status")

    async def nodes() -> list[str]:
        return [each.node for each in (await pods.reading(JOB, lambda *_: True)).not_ready]

    await _until_async(lambda: nodes(), [node.name])
    await world.cluster.patch(node, {"status": {"conditions": [{**silent, "status": "True"}]}}, "status")
    await _until_async(lambda: nodes(), [])


@pytest.mark.parametrize("trouble", ["outage", "overloaded", "forbidden"])
async def test_a_verdict_names_the_events_that_it_could_not_read(
    world: World, stand_in: ApiServer, pods: KubernetesPods, tmp_path: Path, trouble: str
) -> None:
    """The API server is unavailable or overloaded, or the account may not list events."""
    await a_worker(world, containerStatuses=[status_of(ended(datetime.now(UTC), 137, "OOMKilled"))])
    await until(lambda: kinds(pods) == [PodFaultKind.OUT_OF_MEMORY])
    if trouble == "outage":
        with stand_in.outage():
            await until(lambda: not pods.answers)
            said = await verdict(pods)
        assert "the newest status of the pods: Kubernetes does not answer" in said["missing"]
    elif trouble == "overloaded":
        stand_in.faults.append(Fault(429, times=9, resource="events"))
        said = await verdict(pods)
    else:
        rules = [rule for rule in charts.rules({"kubernetes": {"identity": True}}) if rule.resource != "events"]
        async with client(stand_in, "no-events", rules, tmp_path) as cluster:
            said = await verdict(_by(pods, cluster))
    assert said["cause"] == "host_memory"
    assert any(each.startswith("the events of worker-0: ") for each in said["missing"])


async def test_many_events_are_read_in_one_request(
    world: World, stand_in: ApiServer, pods: KubernetesPods, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each pod's events are read once with a limit, however many a namespace has."""
    monkeypatch.setattr(kubernetes_pods, "MOST_EVENTS", 5)
    pod = await a_worker(world, containerStatuses=[status_of(ended(datetime.now(UTC), 137, "OOMKilled"))])
    await until(lambda: kinds(pods) == [PodFaultKind.OUT_OF_MEMORY])
    for number in range(7):
        await tell(world, pod, "Unhealthy", f"Readiness probe failed: {number}")
    stand_in.requests.clear()
    said = await verdict(pods)
    assert [each.verb for each in stand_in.requests if each.resource == "events"] == ["list"]
    assert any("there are more than 5" in each for each in said["missing"])


def status_of(container: dict[str, Any]) -> dict[str, Any]:
    """A container's status with all members that the API server asks for."""
    return {"image": "none", "imageID": "", "ready": False, "restartCount": 0, **container}


def _by(pods: KubernetesPods, cluster: KubernetesCluster) -> KubernetesPods:
    """The same by another account."""
    pods._cluster = cluster
    return pods


async def _until_async(ask: Callable[[], Any], expected: Any) -> None:
    async with asyncio.timeout(60):
        while await ask() != expected:
            await asyncio.sleep(0.02)
