"""``k8s.drain``, on an API server: order, budgets, what is left alone, interruptions, failures."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from datetime import timedelta
from typing import Any

import pytest
import redis.asyncio
from msgspec.structs import replace

from tests.kubernetes.api_server import ApiServer, Fault, Rule
from tests.kubernetes.world import Kubelet, World
from trainmedic.wire import envelope
from trainmedic_server import telemetry
from trainmedic_server.actions.kubernetes.drain import DrainNode, DrainParams, select_pods
from trainmedic_server.actions.kubernetes.nodes import CordonNode, UncordonNode
from trainmedic_server.adapters.redis_bus import RedisBus
from trainmedic_server.adapters.system_clock import SystemClock
from trainmedic_server.errors import ClusterRefused, NoLongerWanted, OutcomeUnknown, PermanentFailure, TemporaryFailure
from trainmedic_server.ports.actions import Clearance
from trainmedic_server.ports.cluster import Ref

RUN = "0198a000-0000-7000-8000-000000000001"


async def test_a_node_is_drained_and_its_undo_uncordons(world: World) -> None:
    """The node is cordoned, its pods end in their own time, and the output states how many."""
    node = await world.node()
    for number in range(5):
        await world.pod(f"worker-{number}", node)
    elsewhere = await world.pod("elsewhere", await world.node("other"))
    async with Kubelet(world, node, after=0.1):
        output = await world.act(DrainNode, node, RUN, timeout=60)
    assert output["gone"] == 5
    assert output["evicted"] == 5
    assert output["left"] == []
    assert output["before"] == {"cordoned": False}
    assert (await world.cluster.get(node))["spec"]["unschedulable"] is True
    assert await world.exists(elsewhere)
    await world.act(UncordonNode, node, RUN, restore=True)
    assert not (await world.cluster.get(node)).get("spec", {}).get("unschedulable")


async def test_daemon_sets_mirror_pods_and_finished_pods_are_left_alone(world: World) -> None:
    """They are counted and stay."""
    node = await world.node()
    left = [
        await world.pod("exporter", node, owner="DaemonSet"),
        await world.pod("static", node, owner="Node", annotations={"kubernetes.io/config.mirror": "abc"}),
        await world.pod("done", node, owner="Job", phase="Succeeded"),
    ]
    await world.pod("worker", node)
    async with Kubelet(world, node):
        output = await world.act(DrainNode, node, RUN, timeout=60)
    assert output["skipped"] == {"daemonset": 1, "mirror": 1, "finished": 1}
    assert output["gone"] == 1
    for pod in left:
        assert await world.exists(pod)


async def test_a_disruption_budget_is_respected_until_it_allows_eviction(world: World) -> None:
    """A blocked pod goes when its budget lets it, and delays no other."""
    node, other = await world.node(), await world.node("other")
    guarded = await world.pod("guarded", node, labels={"app": "a"})
    await world.pod("free", node)
    guard = await world.budget("a", 1)
    async with Kubelet(world, node) as kubelet:
        draining = asyncio.create_task(world.act(DrainNode, node, RUN, timeout=30))
        await _until(lambda: "free" in kubelet.ended)
        await asyncio.sleep(1.5)
        assert "deletionTimestamp" not in (await world.cluster.get(guarded))["metadata"]
        await world.pod("replacement", other, labels={"app": "a"})
        await world.recount(guard)
        output = await draining
    assert output["gone"] == 2


async def test_a_pod_with_two_budgets_is_named_and_delays_no_other(world: World) -> None:
    """The Eviction API rejects two budgets with a 500; the step names the pod."""
    node = await world.node()
    await world.pod("twice", node, labels={"app": "a"})
    await world.pod("free", node)
    for name in ("one", "two"):
        await world.budget("a", 0, name)
    async with Kubelet(world, node) as kubelet:
        with pytest.raises(TemporaryFailure, match="1 pods remain") as caught:
            await world.act(DrainNode, node, RUN, timeout=4)
    assert "more than one PodDisruptionBudget" in caught.value.output["left"][0]["why"]
    assert kubelet.ended == ["free"]


async def test_an_unfinished_drain_reports_the_remaining_pods_and_reasons(world: World) -> None:
    """At the deadline each pod has the budget or slow end that kept it. The node stays cordoned."""
    node = await world.node()
    await world.pod("guarded", node, labels={"app": "a"})
    await world.pod("slow", node)
    await world.budget("a", 1)
    told: list[str] = []

    async def tell(what: str) -> None:
        told.append(what)

    async with Kubelet(world, node, stubborn=frozenset({"slow"})):
        with pytest.raises(TemporaryFailure, match="2 pods remain") as caught:
            await world.act(DrainNode, node, RUN, timeout=4, tell=tell)
    why = {one["pod"].partition("/")[2]: one["why"] for one in caught.value.output["left"]}
    assert "disruption budget guard needs 1 healthy pods" in why["guarded"]
    assert why["slow"] == "ends"
    assert caught.value.output["before"] == {"cordoned": False}
    assert any("remain" in one for one in told)
    events = await world.events(node)
    assert {(one["reason"], one["type"]) for one in events} == {("Cordoned", "Normal"), ("DrainFailed", "Warning")}


@pytest.mark.parametrize(
    ("pod", "allowed", "why"),
    [
        ({"owner": None}, {"force": True}, "no controller"),
        ({"volumes": ({"name": "v", "emptyDir": {}},)}, {"delete_emptydir_data": True}, "emptyDir on disk"),
    ],
)
async def test_possible_data_loss_forbids_the_drain_before_any_eviction(
    world: World, pod: dict[str, Any], allowed: dict[str, bool], why: str
) -> None:
    """Nothing is touched until the playbook's author has allowed the loss."""
    node = await world.node()
    bare = await world.pod("precious", node, **pod)
    worker = await world.pod("worker", node)
    with pytest.raises(PermanentFailure, match=why):
        await world.act(DrainNode, node, RUN, timeout=5)
    for one in (bare, worker):
        assert "deletionTimestamp" not in (await world.cluster.get(one))["metadata"]
    async with Kubelet(world, node):
        output = await world.act(DrainNode, node, RUN, timeout=60, **allowed)
    assert output["gone"] == 2


async def test_shared_memory_does_not_forbid_a_drain(world: World) -> None:
    """Training pods mount an emptyDir in memory as /dev/shm; it holds nothing of value."""
    node = await world.node()
    await world.pod("rank-0", node, volumes=({"name": "shm", "emptyDir": {"medium": "Memory"}},))
    async with Kubelet(world, node):
        assert (await world.act(DrainNode, node, RUN, timeout=60))["gone"] == 1


async def test_the_grace_period_of_the_step_applies_to_the_pods(world: World) -> None:
    """It overrides the one of the pod."""
    node = await world.node()
    pod = await world.pod("worker", node)
    with pytest.raises(TemporaryFailure):
        await world.act(DrainNode, node, RUN, timeout=2, grace_period="7s")
    assert (await world.cluster.get(pod))["metadata"]["deletionGracePeriodSeconds"] == 7


async def test_an_interrupted_drain_resumes_and_evicts_no_pod_twice(world: World, stand_in: ApiServer) -> None:
    """After a kill of the server the same command finds pods that are ending, and only waits for them."""
    node = await world.node()
    for number in range(4):
        await world.pod(f"worker-{number}", node)
    call = world.call(DrainNode, node, RUN, timeout=30)
    interrupted = asyncio.create_task(world.perform(DrainNode, call))
    await _until(lambda: _evictions(stand_in) == 4)
    interrupted.cancel()
    await asyncio.wait([interrupted])
    async with Kubelet(world, node):
        output = await world.perform(DrainNode, world.again(call, deadline=call.deadline))
    assert output["left"] == []
    assert output["before"] == {"cordoned": False}
    assert _evictions(stand_in) == 4


@pytest.mark.parametrize("trouble", ["outage", "429", "500", "slow"])
async def test_a_drain_survives_a_faulty_api_server(world: World, stand_in: ApiServer, trouble: str) -> None:
    """The server is unavailable, overloaded, failing or slow: the drain waits, continues and ends correctly."""
    node = await world.node()
    for number in range(4):
        await world.pod(f"worker-{number}", node)
    async with Kubelet(world, node, after=0.2):
        draining = asyncio.create_task(world.act(DrainNode, node, RUN, timeout=60))
        await _until(lambda: _evictions(stand_in) >= 1)
        if trouble == "outage":
            with stand_in.outage():
                await asyncio.sleep(2)
        elif trouble == "slow":
            stand_in.latency = 0.4
            await asyncio.sleep(2)
            stand_in.latency = 0
        else:
            stand_in.faults.append(Fault(int(trouble), times=10, retry_after=1 if trouble == "429" else None))
        output = await draining
    assert output["left"] == []
    assert output["gone"] >= 1
    assert not stand_in.objects.list(("v1", "pods"), world.namespace)


async def test_a_drain_survives_an_api_server_that_briefly_denies_all_requests(
    world: World, stand_in: ApiServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A server does so just after its start: once it has read its roles the drain continues."""
    monkeypatch.setattr("trainmedic_server.actions.retrying.REFUSAL_GRACE", timedelta(seconds=10))
    node = await world.node()
    await world.pod("worker", node)
    draining = asyncio.create_task(world.act(DrainNode, node, RUN, timeout=30))
    await _until(lambda: _evictions(stand_in) == 1)
    stand_in.faults.append(Fault(403, times=2, token="k8s.drain"))
    await _until(lambda: not stand_in.faults)
    async with Kubelet(world, node):
        assert (await draining)["left"] == []


async def test_an_api_server_that_stays_unavailable_leaves_a_clear_failure(world: World, stand_in: ApiServer) -> None:
    """At the deadline the failure says that it waited for the API."""
    node = await world.node()
    await world.pod("worker", node)
    draining = asyncio.create_task(world.act(DrainNode, node, RUN, timeout=4))
    await _until(lambda: _evictions(stand_in) == 1)
    with stand_in.outage(), pytest.raises((TemporaryFailure, OutcomeUnknown), match="Kubernetes API"):
        await draining


async def test_the_declared_permissions_are_those_required(world: World, stand_in: ApiServer) -> None:
    """With them alone it works; without the right to evict it reports that."""
    node = await world.node()
    await world.pod("worker", node)
    declared = [Rule(one.group, one.resource, frozenset(one.verbs)) for one in DrainNode.permissions]
    stand_in.rules = [one for one in declared if one.resource != "pods/eviction"]
    with pytest.raises(ClusterRefused, match="pods/eviction"):
        await world.act(DrainNode, node, RUN, timeout=5)
    stand_in.rules = [*declared, Rule("", "pods", frozenset({"delete"}))]  # the kubelet's
    async with Kubelet(world, node):
        await world.act(DrainNode, node, RUN, timeout=60)
    stand_in.rules = None


@pytest.fixture
async def bus(redis_url: str) -> AsyncIterator[RedisBus]:
    bus = RedisBus(redis_url, SystemClock(), telemetry.Metrics())
    await bus.start()
    yield bus
    await bus.close()


async def test_a_drain_waits_for_the_checkpoint_of_the_job_on_its_node(
    world: World, bus: RedisBus, redis_url: str, stand_in: ApiServer
) -> None:
    """No pod is evicted until the job has answered; a job on other nodes is not asked."""

    node = await world.node()
    await world.pod("rank-0", node)
    client = redis.asyncio.Redis.from_url(redis_url)
    for name, place in (("here", node.name), ("elsewhere", "another-node")):
        presence = {"job": name, "at": envelope.write_time(SystemClock().now()), "ranks": [0]}
        presence["placement"] = [{"rank": 0, "node": place}]
        await client.set(envelope.job_presence(name), json.dumps(presence), ex=30)
    world.bus = bus
    async with Kubelet(world, node):
        draining = asyncio.create_task(world.act(DrainNode, node, RUN, timeout=30, checkpoint="20s"))
        entry = await client.xread({envelope.job_commands("here"): "0"}, block=5000)
        sent = envelope.Command.decode(next(iter(entry))[1][0][1][b"command"])
        assert sent.action == "job.checkpoint"
        await asyncio.sleep(0.5)
        assert _evictions(stand_in) == 0
        reply = envelope.Reply(sent.id, "here/0", envelope.APPLIED, 0, {"step": 7})
        await client.xadd(envelope.REPLIES, {"reply": reply.encode()})
        output = await draining
    assert output["checkpoints"] == {"here": "written"}
    assert output["gone"] == 1
    assert not await client.exists(envelope.job_commands("elsewhere"))
    await client.aclose()


async def test_a_silent_job_delays_the_drain_only_for_a_limited_time(
    world: World, bus: RedisBus, redis_url: str
) -> None:
    """The deadline of the checkpoint passes, and the drain continues; the output names the silent job."""

    node = await world.node()
    client = redis.asyncio.Redis.from_url(redis_url)
    presence = {"job": "mute", "ranks": [0], "placement": [{"rank": 0, "node": node.name}]}
    presence["at"] = envelope.write_time(SystemClock().now())
    await client.set(envelope.job_presence("mute"), json.dumps(presence), ex=30)
    world.bus = bus
    output = await world.act(DrainNode, node, RUN, timeout=30, checkpoint="1s")
    assert output["checkpoints"] == {"mute": "no answer in time"}
    await client.aclose()


def test_terminating_pods_are_waited_for_whatever_they_are() -> None:
    """A deleted pod without a controller forbids nothing."""
    pod = {"metadata": {"name": "a", "namespace": "b", "uid": "c", "deletionTimestamp": "2026-01-01T00:00:00Z"}}
    assert select_pods([pod], DrainParams()).ending == (pod,)


async def test_a_drain_after_a_cordon_of_the_same_run_shares_its_undo(world: World) -> None:
    """Both steps' undos may run: the node is uncordoned once, and the second finds nothing."""
    node = await world.node()
    await world.act(CordonNode, node, RUN)
    await world.act(DrainNode, node, RUN, timeout=5)
    first = await world.act(UncordonNode, node, RUN, restore=True)
    second = await world.act(UncordonNode, node, RUN, restore=True)
    assert (first["note"], second["note"]) == ("put back", "this run has nothing to revert")


async def test_a_fault_of_one_pod_delays_no_other(world: World, stand_in: ApiServer) -> None:
    """The API server fails for one (with two budgets, say), or its namespace is being deleted: the
    others go, the reason is told, and it goes when it may."""
    node = await world.node()
    for name in ("free", "twice-guarded", "leaving"):
        await world.pod(name, node)
    guarded = Fault(500, times=10**6, resource="pods/eviction", name="twice-guarded", message="more than one budget")
    cause = {
        "reason": "NamespaceTerminating",
        "message": "namespace is being terminated",
        "field": "metadata.namespace",
    }
    leaving = Fault(403, times=10**6, resource="pods/eviction", name="leaving", message="forbidden", causes=(cause,))
    stand_in.faults += [guarded, leaving]
    async with Kubelet(world, node) as kubelet:
        with pytest.raises(TemporaryFailure, match="2 pods remain") as caught:
            await world.act(DrainNode, node, RUN, timeout=3)
        assert kubelet.ended == ["free"]
        why = {one["pod"].partition("/")[2]: one["why"] for one in caught.value.output["left"]}
        assert "more than one budget" in why["twice-guarded"]
        assert "forbidden" in why["leaving"]
        stand_in.faults.clear()
        assert (await world.act(DrainNode, node, RUN, timeout=60))["left"] == []


async def test_a_pod_held_by_finalizers_is_reported(world: World) -> None:
    """It is ending but does not go: the output names the finalizers."""
    node = await world.node()
    pod = await world.pod("held", node)
    await world.cluster.patch(pod, {"metadata": {"finalizers": ["example.com/backup"]}})
    async with Kubelet(world, node, stubborn=frozenset({"held"})):
        with pytest.raises(TemporaryFailure) as caught:
            await world.act(DrainNode, node, RUN, timeout=4)
    await world.cluster.patch(pod, {"metadata": {"finalizers": None}})
    assert caught.value.output["left"][0]["why"] == "ends, and is held by its finalizers: example.com/backup"


async def test_a_paused_drain_evicts_no_more_and_a_cancelled_one_ends(world: World, stand_in: ApiServer) -> None:
    """Operator commands count in the middle of it; what it had started can be reverted."""
    node = await world.node()
    pods = [await world.pod(name, node) for name in ("a", "b")]
    words: list[Clearance] = ["hold"]

    async def word() -> Clearance:
        return words.pop(0) if words else "stop"

    with pytest.raises(TemporaryFailure, match="the run was cancelled: evictions are paused") as caught:
        await world.perform(DrainNode, replace(world.call(DrainNode, node, RUN, timeout=30), clearance=word))
    assert caught.value.is_begun
    assert caught.value.output["before"] == {"cordoned": False}
    assert _evictions(stand_in) == 0
    assert all([await world.exists(pod) for pod in pods])


async def test_a_drain_whose_alert_resolves_evicts_no_more(world: World, stand_in: ApiServer) -> None:
    """The alert is checked before each eviction; the cordon can be reverted."""
    node = await world.node()
    pods = [await world.pod(f"worker-{number}", node) for number in range(4)]
    words: list[Clearance] = ["go_on", "go_on", "go_on"]

    async def word() -> Clearance:
        return words.pop(0) if words else "resolved"

    with pytest.raises(NoLongerWanted, match="the alert resolved: ") as caught:
        await world.perform(DrainNode, replace(world.call(DrainNode, node, RUN, timeout=30), clearance=word))
    assert caught.value.is_begun
    assert _evictions(stand_in) == 2
    assert caught.value.output["evicted"] == 2
    left = [pod for pod in pods if "deletionTimestamp" not in (await world.cluster.get(pod))["metadata"]]
    assert len(left) == 2


async def test_a_drain_whose_alert_resolves_during_a_checkpoint_evicts_nothing(
    world: World, stand_in: ApiServer, bus: RedisBus, redis_url: str
) -> None:
    """It does not wait for the checkpoint, either."""
    node = await world.node()
    await world.pod("rank-0", node)
    client = redis.asyncio.Redis.from_url(redis_url)
    await _presence(client, "slow", node)
    world.bus = bus
    began = asyncio.get_running_loop().time()

    async def word() -> Clearance:
        return "resolved" if asyncio.get_running_loop().time() - began > 0.5 else "go_on"

    call = world.call(DrainNode, node, RUN, timeout=30, checkpoint="25s")
    with pytest.raises(NoLongerWanted):
        await world.perform(DrainNode, replace(call, clearance=word))
    assert _evictions(stand_in) == 0
    assert asyncio.get_running_loop().time() - began < 15
    await client.aclose()


async def test_a_forbidden_drain_asks_no_job_for_a_checkpoint(world: World, bus: RedisBus, redis_url: str) -> None:
    """No training is delayed for a drain that does not happen."""
    node = await world.node()
    await world.pod("precious", node, owner=None)
    client = redis.asyncio.Redis.from_url(redis_url)
    await _presence(client, "spared", node)
    world.bus = bus
    with pytest.raises(PermanentFailure, match="no controller"):
        await world.act(DrainNode, node, RUN, timeout=30, checkpoint="20s")
    assert not await client.exists(envelope.job_commands("spared"))
    await client.aclose()


async def test_the_checkpoint_of_each_of_several_jobs_is_reported(world: World, bus: RedisBus, redis_url: str) -> None:
    """One writes it, one refuses, one is silent: the drain waits for the last at most its time, and continues."""
    node = await world.node()
    await world.pod("rank-0", node)
    client = redis.asyncio.Redis.from_url(redis_url)
    for name in ("good", "full", "mute"):
        await _presence(client, name, node)
    world.bus = bus
    async with Kubelet(world, node):
        draining = asyncio.create_task(world.act(DrainNode, node, RUN, timeout=30, checkpoint="2s"))
        for name, status, output in (
            ("good", envelope.APPLIED, {"step": 7}),
            ("full", envelope.FAILED, {"reason": "no space left"}),
        ):
            entry = await client.xread({envelope.job_commands(name): "0"}, block=5000)
            sent = envelope.Command.decode(next(iter(entry))[1][0][1][b"command"])
            reply = envelope.Reply(sent.id, f"{name}/0", status, 0, output)
            await client.xadd(envelope.REPLIES, {"reply": reply.encode()})
        output = await draining
    assert output["checkpoints"] == {"good": "written", "full": "failed: no space left", "mute": "no answer in time"}
    assert output["gone"] == 1
    await client.aclose()


async def _presence(client: redis.asyncio.Redis, job: str, node: Ref) -> None:
    presence = {"job": job, "ranks": [0], "placement": [{"rank": 0, "node": node.name}]}
    presence["at"] = envelope.write_time(SystemClock().now())
    await client.set(envelope.job_presence(job), json.dumps(presence), ex=30)


def _evictions(stand_in: ApiServer) -> int:
    return sum(one.resource == "pods/eviction" for one in stand_in.requests)


async def _until(condition: Any, patience: timedelta = timedelta(seconds=10)) -> None:
    async with asyncio.timeout(patience.total_seconds()):
        while not condition():
            await asyncio.sleep(0.02)
