"""`ports.Cluster`: what the adapter promises of the Kubernetes API."""

from __future__ import annotations

import asyncio
import json
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from tests.kubernetes.api_server import ApiServer, Fault, Rule
from tests.kubernetes.world import World
from trainmedic_server.adapters.kubernetes_cluster import KubernetesCluster
from trainmedic_server.errors import (
    ClusterRefused,
    ClusterUnavailable,
    ConfigurationError,
    EvictionBlocked,
    ObjectChanged,
    ObjectExists,
    ObjectMissing,
)
from trainmedic_server.ports.cluster import NODES, PODS, Ref


async def test_an_object_is_read_as_it_was_created(world: World) -> None:
    """What `create` returns, `get` and `list` return too."""
    node = await world.node()
    found = await world.cluster.get(node)
    assert found["metadata"]["name"] == node.name
    listed = await world.cluster.list(NODES, fields=f"metadata.name={node.name}")
    assert [one["metadata"]["uid"] for one in listed] == [found["metadata"]["uid"]]


async def test_a_missing_object_is_reported_as_missing(world: World) -> None:
    """Reading and changing raise ObjectMissing, which no retry fixes."""
    nobody = Ref(NODES, f"nobody-{world.tag}")
    with pytest.raises(ObjectMissing, match="Node nobody"):
        await world.cluster.get(nobody)
    with pytest.raises(ObjectMissing):
        await world.cluster.patch(nobody, {"spec": {"unschedulable": True}})


async def test_an_occupied_name_is_distinguished(world: World) -> None:
    """A second object of one name is rejected with ObjectExists."""
    node = await world.node()
    with pytest.raises(ObjectExists):
        await world.cluster.create(NODES, None, {"metadata": {"name": node.name}})


async def test_a_patch_with_an_old_version_changes_nothing(world: World) -> None:
    """With metadata.resourceVersion a patch holds only for the object as it was read."""
    node = await world.node()
    old = (await world.cluster.get(node))["metadata"]["resourceVersion"]
    await world.cluster.patch(node, {"metadata": {"labels": {"a": "1"}}})
    with pytest.raises(ObjectChanged):
        await world.cluster.patch(node, {"metadata": {"resourceVersion": old}, "spec": {"unschedulable": True}})
    assert not (await world.cluster.get(node)).get("spec", {}).get("unschedulable")


async def test_the_server_records_which_fields_are_ours(world: World) -> None:
    """managedFields names `trainmedic` as the manager of a field."""
    node = await world.node()
    found = await world.cluster.patch(node, {"spec": {"unschedulable": True}})
    ours = [entry for entry in found["metadata"]["managedFields"] if entry["manager"] == "trainmedic"]
    assert any("f:unschedulable" in entry["fieldsV1"].get("f:spec", {}) for entry in ours)


async def test_deleting_a_missing_object_succeeds_and_spares_its_successor(world: World) -> None:
    """A deletion names one UID: it can be repeated, and never affects a successor of the same name."""
    node = await world.node()
    pod = await world.pod("one", node)
    uid = (await world.cluster.get(pod))["metadata"]["uid"]
    await world.cluster.delete(pod, uid, timedelta(0))
    await world.cluster.delete(pod, uid, timedelta(0))
    await world.pod("one", node)
    with pytest.raises(ObjectChanged):
        await world.cluster.delete(pod, uid, timedelta(0))
    assert await world.exists(pod)


async def test_an_eviction_blocked_by_a_budget_is_distinguished_from_overload(world: World) -> None:
    """Both are answered 429; only the first is EvictionBlocked."""
    node = await world.node()
    pod = await world.pod("one", node, labels={"app": "guarded"})
    await world.budget("guarded", 1)
    uid = (await world.cluster.get(pod))["metadata"]["uid"]
    with pytest.raises(EvictionBlocked, match="budget"):
        await world.cluster.evict(pod, uid)
    assert await world.exists(pod)


async def test_an_evicted_pod_ends_in_its_own_time(world: World) -> None:
    """The pod is marked and stays until its kubelet has ended it."""
    node = await world.node()
    pod = await world.pod("one", node)
    uid = (await world.cluster.get(pod))["metadata"]["uid"]
    await world.cluster.evict(pod, uid, timedelta(seconds=20))
    marked = await world.cluster.get(pod)
    assert marked["metadata"]["deletionGracePeriodSeconds"] == 20


async def test_an_event_is_recorded_on_the_object(world: World) -> None:
    """`record` makes an Event that names the object by kind, name and uid."""
    node = await world.node()
    found = await world.cluster.get(node)
    await world.cluster.record(found, "Cordoned", "by a test")
    mine = await world.events(node)
    assert [(event["reason"], event["message"], event["type"]) for event in mine] == [
        ("Cordoned", "by a test", "Normal")
    ]


async def test_a_long_list_is_complete(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """The pages of a list are combined."""
    monkeypatch.setattr("trainmedic_server.adapters.kubernetes_cluster.PAGE", 3)
    node = await world.node()
    for number in range(8):
        await world.pod(f"pod-{number}", node)
    found = await world.cluster.list(PODS, world.namespace)
    assert [one["metadata"]["name"] for one in found] == [f"pod-{number}" for number in range(8)]


async def test_a_list_whose_continuation_expires_starts_again(
    world: World, stand_in: ApiServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The API server discards the position in the middle of a long list."""
    monkeypatch.setattr("trainmedic_server.adapters.kubernetes_cluster.PAGE", 3)
    node = await world.node()
    for number in range(8):
        await world.pod(f"pod-{number}", node)
    pages = 0
    page = stand_in._page

    def forgetting(*arguments: object) -> object:
        nonlocal pages
        pages += 1
        if pages == 2:
            stand_in.objects.forget_the_past()
        return page(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(stand_in, "_page", forgetting)
    assert len(await world.cluster.list(PODS, world.namespace)) == 8
    assert pages == 3


@pytest.mark.parametrize("status", [429, 500, 502, 503, 504])
async def test_a_failing_server_is_temporary(world: World, stand_in: ApiServer, status: int) -> None:
    """An overloaded or failing API server is worth a retry after the time that it states."""
    node = await world.node()
    stand_in.faults.append(Fault(status, retry_after=7))
    with pytest.raises(ClusterUnavailable) as caught:
        await world.cluster.get(node)
    assert caught.value.retry_after == 7
    assert (await world.cluster.get(node))["metadata"]["name"] == node.name


async def test_an_unavailable_server_is_temporary(world: World, stand_in: ApiServer) -> None:
    """A cut connection is ClusterUnavailable, and the next call after the outage works."""
    node = await world.node()
    with stand_in.outage(), pytest.raises(ClusterUnavailable):
        await world.cluster.get(node)
    await world.cluster.check()


async def test_an_untrusted_connection_gives_the_reason(world: World, stand_in: ApiServer, tmp_path: Path) -> None:
    """A peer without TLS and a missing one are distinguished; both are worth a retry."""
    told = []
    for server in (stand_in.url.replace("http://", "https://"), "https://127.0.0.1:1"):
        config = stand_in.kubeconfig()
        config["clusters"][0]["cluster"]["server"] = server
        path = tmp_path / "kubeconfig-tls.json"
        path.write_text(json.dumps(config))
        cluster = await KubernetesCluster.opened(path)
        with pytest.raises(ClusterUnavailable) as caught:
            await cluster.check()
        told.append(str(caught.value))
        await cluster.close()
    assert "no TLS connection could be made" in told[0]
    assert "127.0.0.1:1 cannot be reached" in told[1]


async def test_a_forbidden_operation_is_permanent(world: World, stand_in: ApiServer) -> None:
    """A 403 states the account and the operation; no retry fixes it."""
    node = await world.node()
    stand_in.rules = [Rule("", "nodes", frozenset({"get"}))]
    await world.cluster.get(node)
    with pytest.raises(ClusterRefused, match="cannot patch resource"):
        await world.cluster.patch(node, {"spec": {"unschedulable": True}})
    stand_in.rules = None


async def test_a_watch_reports_changes_until_it_breaks(world: World, stand_in: ApiServer) -> None:
    """Each change after the list's version comes once; a lost connection is ClusterUnavailable."""
    node = await world.node()
    _, version = await world.cluster.list_at(PODS)
    seen: list[tuple[str, str]] = []

    async def follow() -> None:
        async for type_, found in world.cluster.watch(PODS, version, 30):
            if type_ != "BOOKMARK":
                seen.append((type_, found["metadata"]["name"]))
                if len(seen) == 2:
                    stand_in.break_watches()

    following = asyncio.create_task(follow())
    await world.pod("one", node)  # made, then its status set
    with pytest.raises(ClusterUnavailable):
        await asyncio.wait_for(following, 60)
    assert seen == [("ADDED", "one"), ("MODIFIED", "one")]


async def test_a_watch_reports_objects_of_any_size(world: World) -> None:
    """Annotations may be up to 256 KiB, and an object comes in one line."""
    pod = await world.pod("one", await world.node())
    _, version = await world.cluster.list_at(PODS)
    await world.cluster.patch(pod, {"metadata": {"annotations": {"example.com/large": "x" * 250_000}}})
    async with asyncio.timeout(60):
        async for type_, found in world.cluster.watch(PODS, version, 30):
            if type_ == "MODIFIED" and found["metadata"]["namespace"] == world.namespace:
                break
    assert len(found["metadata"]["annotations"]["example.com/large"]) == 250_000


async def test_a_watch_from_an_expired_version_reports_it(world: World, stand_in: ApiServer) -> None:
    """ObjectChanged means to list again. Real servers decide themselves when a version expires."""
    _, version = await world.cluster.list_at(PODS)
    stand_in.objects.forget_the_past()
    with pytest.raises(ObjectChanged):
        async for _ in world.cluster.watch(PODS, version, 5):
            pass


async def test_a_list_that_always_expires_ends(world: World, stand_in: ApiServer) -> None:
    """A list in one piece cannot expire midway."""
    stand_in.faults.append(Fault(410, times=3, verbs=frozenset({"list"}), resource="pods"))
    with pytest.raises(ClusterUnavailable, match="the list of pods expires at once"):
        await world.cluster.list_at(PODS)
    stand_in.faults.clear()


@pytest.mark.parametrize("answer", [{}, {"metadata": {}}, {"metadata": {}, "items": {}}, {"items": []}])
async def test_an_answer_without_a_list_is_not_an_empty_list(
    world: World, stand_in: ApiServer, monkeypatch: pytest.MonkeyPatch, answer: dict[str, Any]
) -> None:
    """A gateway may send it. A list whose objects are null is empty."""
    monkeypatch.setattr(stand_in, "_page", lambda *_: answer)
    with pytest.raises(ClusterUnavailable, match="no list of pods"):
        await world.cluster.list(PODS)
    with pytest.raises(ClusterUnavailable, match="no list of pods"):
        await world.cluster.list_some(PODS, "default", "", 3)
    monkeypatch.setattr(stand_in, "_page", lambda *_: {"metadata": {}, "items": None})
    assert list(await world.cluster.list(PODS)) == []


async def test_a_watch_without_permission_reports_it(world: World, stand_in: ApiServer) -> None:
    """It is rejected as a whole, before the first change."""
    _, version = await world.cluster.list_at(PODS)
    stand_in.rules = [Rule("", "pods", frozenset({"list"}))]
    with pytest.raises(ClusterRefused, match="cannot watch resource"):
        async for _ in world.cluster.watch(PODS, version, 5):
            pass
    stand_in.rules = None


async def test_no_kubeconfig_is_a_clear_error(tmp_path: Path) -> None:
    """A missing file and a broken one name the file."""
    with pytest.raises(ConfigurationError, match="nowhere: no such file"):
        await KubernetesCluster.opened(tmp_path / "nowhere")
    broken = tmp_path / "broken"
    broken.write_text("clusters: [")
    with pytest.raises(ConfigurationError, match="broken"):
        await KubernetesCluster.opened(broken)
