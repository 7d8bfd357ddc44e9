"""``k8s.cordon``, ``k8s.uncordon``, ``k8s.taint``, ``k8s.label``, on an API server."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest
from msgspec.structs import replace

from tests.kubernetes.api_server import ApiServer, Fault, Rule
from tests.kubernetes.world import World
from trainmedic_server.actions import retrying
from trainmedic_server.actions.kubernetes.nodes import CordonNode, LabelNode, TaintNode, UncordonNode
from trainmedic_server.domain.topology import ClusterNode, ClusterTopology
from trainmedic_server.errors import ClusterRefused, ObjectMissing, OutcomeUnknown, PermanentFailure, TemporaryFailure
from trainmedic_server.ports.actions import Clearance
from trainmedic_server.ports.cluster import NODES, Ref

RUN, OTHER = "0198a000-0000-7000-8000-000000000001", "0198a000-0000-7000-8000-000000000002"


async def is_cordoned(world: World, node: Ref) -> bool:
    return bool((await world.cluster.get(node)).get("spec", {}).get("unschedulable"))


async def annotations(world: World, node: Ref) -> dict[str, str]:
    return dict((await world.cluster.get(node))["metadata"].get("annotations") or {})


async def test_a_cordon_is_reverted_and_leaves_no_trace(world: World) -> None:
    """The undo lets pods onto the node again, and removes our annotation."""
    node = await world.node()
    output = await world.act(CordonNode, node, RUN)
    assert output == {"node": node.name, "before": {"cordoned": False}, "after": {"cordoned": True}}
    assert await is_cordoned(world, node)
    undone = await world.act(UncordonNode, node, RUN, restore=True)
    assert undone["after"] == {"cordoned": False}
    assert not await is_cordoned(world, node)
    assert not any("trainmedic" in name for name in await annotations(world, node))


async def test_a_node_is_found_by_its_agents_host_name(world: World) -> None:
    """It is restored by it. Before the nodes are listed, a missing name cannot be reported."""
    node = await world.node("full-name")
    world.topology = ClusterTopology((ClusterNode(node.name, ("agent-name",)),))
    output = await world.act(CordonNode, Ref(NODES, "agent-name"), RUN)
    assert (output["node"], await is_cordoned(world, node)) == (node.name, True)
    world.topology = ClusterTopology(answers=False)
    with pytest.raises(TemporaryFailure, match="until the nodes are listed"):
        await world.act(UncordonNode, Ref(NODES, "agent-name"), RUN, restore=True, timeout=0.3)
    world.topology = ClusterTopology((ClusterNode(node.name, ("agent-name",)),))
    await world.act(UncordonNode, Ref(NODES, "agent-name"), RUN, restore=True)
    assert not await is_cordoned(world, node)


async def test_a_repeated_cordon_changes_nothing(world: World) -> None:
    """The same run repeats it, and its undo still works."""
    node = await world.node()
    await world.act(CordonNode, node, RUN)
    version = (await world.cluster.get(node))["metadata"]["resourceVersion"]
    again = await world.act(CordonNode, node, RUN, resumed=True)
    assert again["before"] == {"cordoned": False}
    assert (await world.cluster.get(node))["metadata"]["resourceVersion"] == version
    await world.act(UncordonNode, node, RUN, restore=True)
    assert not await is_cordoned(world, node)


async def test_a_node_cordoned_by_another_user_stays_so(world: World) -> None:
    """The undo restores the earlier state, which was cordoned; an explicit uncordon does, too, and reports why."""
    node = await world.node(unschedulable=True)
    output = await world.act(CordonNode, node, RUN)
    assert "another party" in output["note"]
    await world.act(UncordonNode, node, RUN, restore=True)
    assert await is_cordoned(world, node)
    with pytest.raises(PermanentFailure, match="not set by Trainmedic"):
        await world.act(UncordonNode, node, OTHER)
    assert await is_cordoned(world, node)


async def test_force_uncordons_any_cordon(world: World) -> None:
    """The playbook author requests it by `force: true`."""
    node = await world.node(unschedulable=True)
    output = await world.act(UncordonNode, node, OTHER, force=True)
    assert output["before"] == {"cordoned": True}
    assert not await is_cordoned(world, node)


async def test_a_node_cordoned_again_manually_is_left_alone(world: World) -> None:
    """An operator uncordoned and cordoned it again: the API server knows, and it stays cordoned."""
    node = await world.node()
    await world.act(CordonNode, node, RUN)
    for value in (None, True):
        await patched_by_a_person(world, node, {"spec": {"unschedulable": value}})
    undone = await world.act(UncordonNode, node, RUN, restore=True)
    assert "another party" in undone["note"]
    assert await is_cordoned(world, node)
    assert not any("trainmedic" in name for name in await annotations(world, node))


async def test_two_runs_may_hold_one_node(world: World) -> None:
    """The node is uncordoned when the last of them releases it, in either order."""
    for first, second in ((RUN, OTHER), (OTHER, RUN)):
        node = await world.node(f"held-{first[-1]}")
        await world.act(CordonNode, node, RUN)
        await world.act(CordonNode, node, OTHER)
        await world.act(UncordonNode, node, first, restore=True)
        assert await is_cordoned(world, node)
        await world.act(UncordonNode, node, second, restore=True)
        assert not await is_cordoned(world, node)


async def test_an_explicit_uncordon_releases_all_our_cordons(world: World) -> None:
    """A playbook that has checked a node's health ends earlier runs' cordons; their undo finds nothing more."""
    node = await world.node()
    await world.act(CordonNode, node, RUN)
    await world.act(UncordonNode, node, OTHER)
    assert not await is_cordoned(world, node)
    later = await world.act(UncordonNode, node, RUN, restore=True)
    assert later["note"] == "this run has nothing to revert"


async def test_an_undo_of_an_unapplied_step_changes_nothing(world: World) -> None:
    """The step's outcome may have been unknown; the undo then finds no note."""
    node = await world.node(unschedulable=True)
    await world.act(UncordonNode, node, RUN, restore=True)
    assert await is_cordoned(world, node)


async def test_a_taint_is_added_to_others_and_removed_alone(world: World) -> None:
    """Other taints stay unchanged, before and after."""
    node = await world.node(taints=[{"key": "other", "effect": "NoSchedule", "value": "x"}])
    output = await world.act(TaintNode, node, RUN, key="gpu-unhealthy", value="xid-79")
    assert output["before"] == {"taint/gpu-unhealthy:NoSchedule": None}
    taints = await world.taints(node)
    assert {taint["key"]: taint.get("value") for taint in taints} == {"other": "x", "gpu-unhealthy": "xid-79"}
    await world.act(TaintNode, node, RUN, key="gpu-unhealthy", restore=True)
    assert [taint["key"] for taint in await world.taints(node)] == ["other"]


async def test_a_taint_that_had_another_value_gets_it_back(world: World) -> None:
    """Undo restores the value from before."""
    node = await world.node(taints=[{"key": "health", "effect": "NoSchedule", "value": "good"}])
    await world.act(TaintNode, node, RUN, key="health", value="bad")
    await world.act(TaintNode, node, RUN, key="health", restore=True)
    assert (await world.taints(node))[0]["value"] == "good"


async def test_a_label_is_set_removed_and_restored(world: World) -> None:
    """Undo restores the earlier state after both; a value that another user has set since is kept."""
    node = await world.node()
    await patched_by_a_person(world, node, {"metadata": {"labels": {"pool": "a", "tier": "gold"}}})
    await world.act(LabelNode, node, RUN, key="pool", value="quarantine")
    await world.act(LabelNode, node, RUN, key="tier")
    labels = (await world.cluster.get(node))["metadata"]["labels"]
    assert labels["pool"] == "quarantine"
    assert "tier" not in labels
    await world.act(LabelNode, node, RUN, key="pool", restore=True)
    await patched_by_a_person(world, node, {"metadata": {"labels": {"tier": "silver"}}})
    await world.act(LabelNode, node, RUN, key="tier", restore=True)
    labels = (await world.cluster.get(node))["metadata"]["labels"]
    assert labels == labels | {"pool": "a", "tier": "silver"}


async def test_an_event_on_the_node_states_the_actor_and_the_reason(world: World) -> None:
    """`kubectl describe node` shows the playbook, the run and the reason."""
    node = await world.node()
    await world.act(CordonNode, node, RUN)
    events = await world.events(node)
    assert [one["reason"] for one in events] == ["Cordoned"]
    assert f"playbook a-playbook, run {RUN}: NodeDown fires" in events[0]["message"]


async def test_a_ready_node_is_not_cordoned_for_being_down(world: World) -> None:
    """`unless_ready`: the monitoring is at fault. Once the run has cordoned the node, a repeat is no failure."""
    node = await world.node()
    ready = {"type": "Ready", "status": "True", "reason": "KubeletReady", "message": ""}
    await world.cluster.patch(node, {"status": {"conditions": [ready]}}, "status")
    with pytest.raises(TemporaryFailure, match="Kubernetes reports it as Ready"):
        await world.act(CordonNode, node, RUN, unless_ready=True)
    assert not (await world.cluster.get(node))["spec"].get("unschedulable")
    await world.cluster.patch(node, {"status": {"conditions": [{**ready, "status": "Unknown"}]}}, "status")
    await world.act(CordonNode, node, RUN, unless_ready=True)
    await world.cluster.patch(node, {"status": {"conditions": [ready]}}, "status")
    assert (await world.act(CordonNode, node, RUN, unless_ready=True))["after"] == {"cordoned": True}


@pytest.mark.parametrize(
    ("action", "given"),
    [(CordonNode, {}), (TaintNode, {"key": "example.com/ill"}), (LabelNode, {"key": "ill", "value": "yes"})],
)
async def test_an_undo_on_a_deleted_node_is_done(world: World, action: type[Any], given: dict[str, Any]) -> None:
    """Autoscalers delete nodes: the obligation neither stays permanently nor counts as failed."""
    node = await world.node()
    call = world.call(action, node, RUN, **given)
    undo = action.inverse(call.params, await world.perform(action, call))
    found = await world.cluster.get(node)
    await world.cluster.delete(node, found["metadata"]["uid"])
    taker = {one.name: one for one in (UncordonNode, TaintNode, LabelNode)}[undo.action]
    assert "it was deleted" in (await world.act(taker, node, RUN, **undo.params))["note"]


async def test_a_wait_for_an_unavailable_api_is_reported(
    world: World, stand_in: ApiServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Minutes without a message would leave users guessing."""
    monkeypatch.setattr(retrying, "REPORT_EVERY", timedelta(0))
    told: list[str] = []

    async def tell(what: str) -> None:
        told.append(what)

    node = await world.node()
    stand_in.faults.append(Fault(500, times=3))
    await world.act(CordonNode, node, RUN, timeout=20, tell=tell)
    assert "k8s.cordon waits for the Kubernetes API: the Kubernetes API fails" in told[0]


async def test_a_retry_after_of_hours_is_not_obeyed(
    world: World, stand_in: ApiServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A Retry-After is obeyed up to a bound; then the request is retried."""
    monkeypatch.setattr(retrying, "LONGEST_ASKED_FOR", 0.2)
    node = await world.node()
    stand_in.faults.append(Fault(429, times=2, retry_after=7200))
    await world.act(CordonNode, node, RUN, timeout=20)
    assert await is_cordoned(world, node)


async def test_an_expired_token_is_tolerated_until_it_is_renewed(world: World, stand_in: ApiServer) -> None:
    """During a rotation the API server knows only the new one; the message names the cause."""
    node = await world.node()
    stand_in.faults.append(Fault(401, times=3, message="Unauthorized"))
    await world.act(CordonNode, node, RUN, timeout=20)
    assert await is_cordoned(world, node)
    stand_in.faults.append(Fault(401, times=10**6, message="Unauthorized"))
    with pytest.raises(TemporaryFailure, match="does not accept our credentials"):
        await world.act(LabelNode, node, RUN, timeout=1, key="a", value="b")
    stand_in.faults.clear()


async def test_a_missing_node_is_a_clear_permanent_failure(world: World) -> None:
    """No retry fixes it, and the message names the node."""
    with pytest.raises(ObjectMissing, match="Node nobody does not exist"):
        await world.act(CordonNode, Ref(NODES, "nobody"), RUN)


@pytest.mark.parametrize("status", [409, 429, 500, 503])
async def test_a_temporarily_failing_server_is_tolerated(world: World, stand_in: ApiServer, status: int) -> None:
    """Conflicts, overload and failures in the middle are retried within the step's time."""
    node = await world.node()
    stand_in.faults += [Fault(status, times=2, verbs=frozenset({"patch"}), resource="nodes")]
    await world.act(CordonNode, node, RUN)
    assert await is_cordoned(world, node)
    assert not stand_in.faults


async def test_a_long_wait_is_reported(world: World, stand_in: ApiServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """The run shows what it waits for, before the step ends."""
    monkeypatch.setattr("trainmedic_server.actions.retrying.REPORT_EVERY", timedelta(0))
    node = await world.node()
    told: list[str] = []

    async def tell(what: str) -> None:
        told.append(what)

    stand_in.faults += [Fault(503, resource="nodes")]
    await world.act(CordonNode, node, RUN, tell=tell)
    assert told == ["k8s.cordon waits for the Kubernetes API: the Kubernetes API fails: the stand-in was told to fail"]


@pytest.mark.parametrize("status", [401, 403])
async def test_a_server_that_has_just_started_denies_all_requests_for_a_moment(
    world: World, stand_in: ApiServer, status: int
) -> None:
    """It has not read its roles and accounts yet: a temporary denial fails no step."""
    node = await world.node()
    stand_in.faults += [Fault(status, times=2, resource="nodes")]
    await world.act(CordonNode, node, RUN)
    assert await is_cordoned(world, node)


async def test_a_change_answered_with_an_error_is_detected(world: World, stand_in: ApiServer) -> None:
    """The next try finds our note, reports the true earlier state, and the undo works."""
    node = await world.node()
    stand_in.faults += [Fault(504, verbs=frozenset({"patch"}), resource="nodes", is_done_first=True)]
    output = await world.act(CordonNode, node, RUN)
    assert output["before"] == {"cordoned": False}
    await world.act(UncordonNode, node, RUN, restore=True)
    assert not await is_cordoned(world, node)


async def test_a_server_that_stays_unavailable_ends_the_attempt_in_time(world: World, stand_in: ApiServer) -> None:
    """If no change is possible, the failure is temporary; otherwise the outcome is unknown."""
    node = await world.node()
    stand_in.faults += [Fault(500, times=99, verbs=frozenset({"get"}), resource="nodes")]
    with pytest.raises(TemporaryFailure, match="not done in time"):
        await world.act(CordonNode, node, RUN, timeout=0.5)
    stand_in.faults[:] = [Fault(500, times=99, verbs=frozenset({"patch"}), resource="nodes")]
    with pytest.raises(OutcomeUnknown, match="not done in time"):
        await world.act(CordonNode, node, RUN, timeout=0.5)


@pytest.mark.parametrize("status", [500, 403])
async def test_a_server_that_stays_unavailable_does_not_deny_an_earlier_call(
    world: World, stand_in: ApiServer, status: int
) -> None:
    """The call was made, then the server killed: taken as not made, the node would stay cordoned."""
    node = await world.node()
    await world.act(CordonNode, node, RUN)
    stand_in.faults += [Fault(status, times=10**6, resource="nodes")]
    with pytest.raises(OutcomeUnknown):
        await world.act(CordonNode, node, RUN, timeout=0.5, resumed=True)


async def test_a_possible_change_that_is_then_denied_is_unknown(
    world: World, stand_in: ApiServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A denial says nothing of the try before it: the undo stays pending."""
    monkeypatch.setattr(retrying, "REPORT_EVERY", timedelta(0))
    node = await world.node()
    refusal = Fault(403, times=10**6, resource="nodes")

    async def refuse_from_now_on(what: str) -> None:
        if refusal not in stand_in.faults:
            stand_in.faults.append(refusal)

    stand_in.faults.append(Fault(504, verbs=frozenset({"patch"}), resource="nodes", is_done_first=True))
    with pytest.raises(OutcomeUnknown, match="a change may have been made before this"):
        await world.act(CordonNode, node, RUN, timeout=20, tell=refuse_from_now_on)
    stand_in.faults.clear()
    assert await is_cordoned(world, node)


async def test_without_permission_the_step_names_the_missing_one(world: World, stand_in: ApiServer) -> None:
    """A lasting 403 ends the step with the API server's own text."""
    node = await world.node()
    stand_in.rules = [Rule("", "nodes", frozenset({"get", "delete"}))]
    with pytest.raises(ClusterRefused, match='cannot patch resource "nodes"'):
        await world.act(CordonNode, node, RUN)
    stand_in.rules = None


@pytest.mark.parametrize(
    ("action", "params"),
    [
        (TaintNode, {"key": "bad key"}),
        (TaintNode, {"key": "a", "effect": "Never"}),
        (TaintNode, {"key": "a", "value": "spaces are not allowed"}),
        (LabelNode, {"key": "trainmedic.io/own", "value": "x"}),
        (LabelNode, {"key": "a", "value": "x" * 64}),
        (UncordonNode, {"forced": True}),
    ],
)
def test_bad_parameters_are_rejected(action: type[Any], params: dict[str, Any]) -> None:
    """This happens before any request to the API server."""
    with pytest.raises(ValueError, match="validation error"):
        action.Params.model_validate(params)


async def patched_by_a_person(world: World, ref: Ref, change: dict[str, Any]) -> None:
    """A change that the API server notes as made by another program."""
    await world.cluster._call(
        "PATCH",
        f"/api/v1/nodes/{ref.name}",
        {"fieldManager": "kubectl"},
        change,
        content_type="application/merge-patch+json",
    )


async def test_an_attempt_that_started_before_a_pause_continues(world: World, stand_in: ApiServer) -> None:
    """It may have made the change already, so it must not end as failed."""
    node = await world.node()
    stand_in.faults.append(Fault(503, verbs=frozenset({"patch"})))

    async def hold() -> Clearance:
        return "hold"

    await world.perform(CordonNode, replace(world.call(CordonNode, node, RUN, timeout=30), clearance=hold))
    assert await is_cordoned(world, node)
