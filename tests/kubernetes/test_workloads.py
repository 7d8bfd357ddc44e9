"""``k8s.restart``, ``k8s.scale``, ``k8s.suspend``, ``k8s.resume``, ``k8s.delete_pod``, on an API server."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest

from tests.kubernetes.api_server import ApiServer, Fault
from tests.kubernetes.world import IMAGE, World
from trainmedic_server.actions.kubernetes.kinds import KNOWN
from trainmedic_server.actions.kubernetes.workloads import (
    DeletePod,
    RestartWorkload,
    ResumeWorkload,
    ScaleWorkload,
    SuspendWorkload,
)
from trainmedic_server.errors import ObjectMissing, PermanentFailure
from trainmedic_server.ports.cluster import DEPLOYMENTS, JOBS, PODS, Ref, Resource

RUN, OTHER = "0198a000-0000-7000-8000-000000000001", "0198a000-0000-7000-8000-000000000002"
_POD = {"spec": {"containers": [{"name": "main", "image": IMAGE}]}}


async def deployment(world: World, name: str = "web", replicas: int = 3) -> Ref:
    labels = {"app": name}
    spec = {
        "replicas": replicas,
        "selector": {"matchLabels": labels},
        "template": {"metadata": {"labels": labels}, **_POD},
    }
    await world.make(DEPLOYMENTS, world.namespace, {"metadata": {"name": name}, "spec": spec})
    return Ref(DEPLOYMENTS, name, world.namespace)


async def job(world: World, name: str = "train", suspend: bool | None = None) -> Ref:
    spec: dict[str, Any] = {"template": {"spec": {**_POD["spec"], "restartPolicy": "Never"}}}
    if suspend is not None:
        spec["suspend"] = suspend
    await world.make(JOBS, world.namespace, {"metadata": {"name": name}, "spec": spec})
    return Ref(JOBS, name, world.namespace)


async def spec_of(world: World, ref: Ref) -> dict[str, Any]:
    return dict((await world.cluster.get(ref))["spec"])


async def test_a_repeated_restart_is_one_rollout(world: World) -> None:
    """The annotation holds the moment of the command: a repeat of it changes nothing."""
    ref = await deployment(world)
    named = {"kind": "Deployment", "namespace": world.namespace, "name": ref.name}
    call = world.call(RestartWorkload, run_id=RUN, **named)
    first = await world.perform(RestartWorkload, call)
    generation = (await world.cluster.get(ref))["metadata"]["generation"]
    again = await world.perform(RestartWorkload, call)
    assert first["after"] == again["after"]
    assert (await world.cluster.get(ref))["metadata"]["generation"] == generation
    annotations = (await spec_of(world, ref))["template"]["metadata"]["annotations"]
    assert list(annotations) == ["kubectl.kubernetes.io/restartedAt"]


async def test_a_scale_is_reverted_unless_changed_meanwhile(world: World) -> None:
    """Undo restores the earlier number; a number that another user has set since is kept."""
    ref = await deployment(world)
    named = {"kind": "Deployment", "namespace": world.namespace, "name": ref.name}
    output = await world.act(ScaleWorkload, run_id=RUN, replicas=1, **named)
    assert (output["before"], output["after"]) == ({"replicas": 3}, {"replicas": 1})
    await world.act(ScaleWorkload, run_id=RUN, restore=True, **named)
    assert (await spec_of(world, ref))["replicas"] == 3

    await world.act(ScaleWorkload, run_id=OTHER, replicas=1, **named)
    await world.cluster.patch(ref, {"spec": {"replicas": 7}})
    undone = await world.act(ScaleWorkload, run_id=OTHER, restore=True, **named)
    assert "another party" in undone["note"]
    assert (await spec_of(world, ref))["replicas"] == 7


@pytest.mark.parametrize("before", [None, False])
async def test_a_job_is_suspended_and_resumed(world: World, before: bool | None) -> None:
    """Undo restores the earlier value, which may be none at all."""
    ref = await job(world, suspend=before)
    named = {"kind": "Job", "namespace": world.namespace, "name": ref.name}
    was = (await spec_of(world, ref)).get("suspend")
    await world.act(SuspendWorkload, run_id=RUN, **named)
    assert (await spec_of(world, ref))["suspend"] is True
    await world.act(SuspendWorkload, run_id=RUN, restore=True, **named)
    assert bool((await spec_of(world, ref)).get("suspend")) == bool(was)


async def test_a_suspended_job_is_resumed(world: World) -> None:
    """`k8s.resume` works whoever has suspended it."""
    ref = await job(world, suspend=True)
    await world.act(ResumeWorkload, run_id=RUN, kind="Job", namespace=world.namespace, name=ref.name)
    assert (await spec_of(world, ref))["suspend"] is False


async def test_a_training_job_of_a_custom_kind_is_suspended_by_its_own_path(world: World, stand_in: ApiServer) -> None:
    """A known kind is given by name, any other by a mapping; the effect is the same."""
    resource = KNOWN["PyTorchJob"].resource
    await world.make(resource, world.namespace, {"metadata": {"name": "llm"}, "spec": {"runPolicy": {}}})
    ref = Ref(resource, "llm", world.namespace)
    await world.act(SuspendWorkload, run_id=RUN, kind="PyTorchJob", namespace=world.namespace, name="llm")
    assert (await spec_of(world, ref))["runPolicy"]["suspend"] is True
    described = {
        "api_version": "kubeflow.org/v1",
        "plural": "pytorchjobs",
        "kind": "PyTorchJob",
        "suspend": "spec.runPolicy.suspend",
    }
    await world.act(SuspendWorkload, run_id=RUN, kind=described, namespace=world.namespace, name="llm", restore=True)
    assert "suspend" not in (await spec_of(world, ref))["runPolicy"]


async def test_a_custom_kind_is_suspended_and_restored(world: World) -> None:
    """The step describes it by a path that exists neither before nor after."""
    resource = await world.kind_of_ones_own()
    world.by = None  # which permission that takes is the chart's tests' business
    ref = Ref(resource, "llm", world.namespace)
    await world.make(resource, world.namespace, {"metadata": {"name": "llm"}, "spec": {"steps": 9}})
    kind = {
        "api_version": resource.api_version,
        "plural": resource.plural,
        "kind": "Training",
        "suspend": "spec.paused",
    }
    named = {"kind": kind, "namespace": world.namespace, "name": "llm"}
    output = await world.act(SuspendWorkload, run_id=RUN, **named)
    assert (output["before"], output["after"]) == ({"suspend": None}, {"suspend": True})
    assert await spec_of(world, ref) == {"steps": 9, "paused": True}
    await world.act(SuspendWorkload, run_id=RUN, restore=True, **named)
    assert await spec_of(world, ref) == {"steps": 9}
    assert sorted(one["reason"] for one in await world.events(ref)) == ["Resumed", "Suspended"]


async def test_an_unsupported_operation_of_a_kind_is_a_clear_failure(world: World) -> None:
    """A DaemonSet has no replicas, a Deployment is not suspended."""
    with pytest.raises(PermanentFailure, match="does not work on a DaemonSet"):
        await world.act(ScaleWorkload, replicas=1, kind="DaemonSet", namespace="x", name="y")
    with pytest.raises(PermanentFailure, match="does not work on a Deployment"):
        await world.act(SuspendWorkload, kind="Deployment", namespace="x", name="y")


async def test_an_undo_of_a_deleted_object_is_done(world: World) -> None:
    """An obligation to restore a deleted object does not stay permanently."""
    undone = await world.act(ScaleWorkload, restore=True, kind="Deployment", namespace=world.namespace, name="gone")
    assert "it was deleted" in undone["note"]


async def test_a_pod_is_deleted_and_its_successor_is_not(world: World) -> None:
    """Resumed after a kill, the command finds a younger pod of that name and leaves it."""
    node = await world.node()
    old = await world.pod("worker-0", node)
    uid = (await world.cluster.get(old))["metadata"]["uid"]
    named = {"namespace": world.namespace, "pod": "worker-0"}
    call = world.call(DeletePod, run_id=RUN, grace_period="0s", **named)
    output = await world.perform(DeletePod, call)
    assert output["before"]["uid"] == uid
    assert not await world.exists(old)
    gone = await world.perform(DeletePod, world.again(call))
    assert gone["note"] == "it is gone"
    await world.pod("worker-0", node)
    later = world.again(call, issued_at=call.issued_at - timedelta(seconds=5))
    assert "another" in (await world.perform(DeletePod, later))["note"]
    assert await world.exists(old)


async def test_a_deletion_whose_answer_was_lost_is_done(world: World, stand_in: ApiServer) -> None:
    """The pod is gone when the deletion is retried, as requested."""
    node = await world.node()
    pod = await world.pod("worker-0", node)
    stand_in.faults.append(Fault(502, verbs=frozenset({"delete"}), resource="pods", is_done_first=True))
    output = await world.act(DeletePod, namespace=world.namespace, pod="worker-0", grace_period="0s")
    assert output["note"] == "deleted"
    assert not await world.exists(pod)


async def test_a_pod_that_never_existed_is_reported_as_missing(world: World) -> None:
    """A first attempt on a wrong name is a failure, not a success."""
    with pytest.raises(ObjectMissing, match="/nobody does not exist"):
        await world.act(DeletePod, namespace=world.namespace, pod="nobody")


@pytest.mark.parametrize(
    ("action", "params"),
    [
        (RestartWorkload, {"kind": "Deploymnt", "namespace": "a", "name": "b"}),
        (RestartWorkload, {"kind": "Deployment", "namespace": "a/../b", "name": "b"}),
        (ScaleWorkload, {"kind": "Deployment", "namespace": "a", "name": "b"}),
        (ScaleWorkload, {"kind": "Deployment", "namespace": "a", "name": "b", "replicas": -1}),
        (
            SuspendWorkload,
            {"kind": {"api_version": "v1", "plural": "../x", "kind": "X"}, "namespace": "a", "name": "b"},
        ),
        (DeletePod, {"namespace": "a", "pod": "../../nodes/x"}),
    ],
)
def test_bad_parameters_are_rejected(action: type[Any], params: dict[str, Any]) -> None:
    """They include names that could escape their place in a path."""
    with pytest.raises(ValueError, match="validation error"):
        action.Params.model_validate(params)


def test_pods_and_custom_kinds_have_their_paths() -> None:
    """Each known kind in the table has its own name and a field to set."""
    for kind, workload in KNOWN.items():
        assert workload.resource.kind == kind
        assert workload.replicas or workload.suspend or workload.template
    assert Resource("v1", "pods", "Pod") == PODS
