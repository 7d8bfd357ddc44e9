"""``k8s.create_job``, on an API server."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from msgspec.structs import replace

from tests.kubernetes.api_server import ApiServer, Fault
from tests.kubernetes.world import IMAGE, MANAGED_BY, World
from trainmedic_server.actions.kubernetes.jobs import CreateClusterJob
from trainmedic_server.engine.performing import GRACE
from trainmedic_server.errors import (
    ActionFailure,
    NoLongerWanted,
    ObjectExists,
    OutcomeUnknown,
    PermanentFailure,
    TemporaryFailure,
)
from trainmedic_server.ports.actions import Clearance
from trainmedic_server.ports.cluster import JOBS, Ref

MANIFEST: dict[str, Any] = {
    "metadata": {"name": "health", "labels": {"app": "health"}},
    "spec": {
        "backoffLimit": 0,
        "managedBy": MANAGED_BY,
        "template": {"spec": {"restartPolicy": "Never", "containers": [{"name": "check", "image": IMAGE}]}},
    },
}


async def made(world: World) -> Ref:
    async with asyncio.timeout(60):
        while not (found := await world.cluster.list(JOBS, world.namespace)):
            await asyncio.sleep(0.02)
    ref = Ref(JOBS, found[0]["metadata"]["name"], world.namespace)
    world.made.append(ref)
    return ref


async def test_a_job_is_created_and_waited_for(world: World) -> None:
    """The step ends when the Job has succeeded."""
    running = asyncio.create_task(world.act(CreateClusterJob, manifest=MANIFEST, namespace=world.namespace, timeout=60))
    ref = await made(world)
    assert ref.name.startswith("health-")
    await world.end(ref, "Complete")
    output = await running
    assert output["job"] == f"{world.namespace}/{ref.name}"
    assert output["result"] == "succeeded"
    spec = (await world.cluster.get(ref))["spec"]
    assert spec["ttlSecondsAfterFinished"] == 86400


async def test_a_job_that_fails_fails_the_step_with_its_reason(world: World) -> None:
    """It fails permanently: the node was found unhealthy, which a retry does not fix."""
    running = asyncio.create_task(world.act(CreateClusterJob, manifest=MANIFEST, namespace=world.namespace, timeout=60))
    await world.end(await made(world), "Failed", "Job has reached the specified backoff limit")
    with pytest.raises(PermanentFailure, match="backoff limit") as caught:
        await running
    assert caught.value.output["result"] == "failed"


async def test_a_job_that_does_not_end_is_reported_as_running(world: World) -> None:
    """At the deadline the outcome is unknown, so that a retry keeps the ID and waits for the same Job."""
    call = world.call(CreateClusterJob, manifest=MANIFEST, namespace=world.namespace, timeout=0.5)
    with pytest.raises(OutcomeUnknown, match="has not ended in time") as caught:
        await world.perform(CreateClusterJob, call)
    assert caught.value.output["result"] == "running"
    await world.end(await made(world), "Complete")
    assert (await world.perform(CreateClusterJob, world.again(call)))["result"] == "succeeded"
    assert len(await world.cluster.list(JOBS, world.namespace)) == 1


async def test_a_repeated_command_creates_no_second_job(world: World) -> None:
    """Resumed after a kill it finds the Job that it had created; another command creates another."""
    given = {"manifest": MANIFEST, "namespace": world.namespace, "wait": False}
    call = world.call(CreateClusterJob, **given)
    first = await world.perform(CreateClusterJob, call)
    again = await world.perform(CreateClusterJob, world.again(call))
    assert first["uid"] == again["uid"]
    await world.act(CreateClusterJob, **given)
    assert len(await world.cluster.list(JOBS, world.namespace)) == 2


async def test_a_creation_whose_answer_was_lost_is_found(world: World, stand_in: ApiServer) -> None:
    """The API server created it and failed: the next try recognizes it as ours."""
    stand_in.faults.append(Fault(504, verbs=frozenset({"create"}), resource="jobs", is_done_first=True))
    output = await world.act(CreateClusterJob, manifest=MANIFEST, namespace=world.namespace, wait=False)
    assert output["result"] == "created"
    assert len(await world.cluster.list(JOBS, world.namespace)) == 1


@pytest.mark.parametrize("is_done_first", [True, False])
async def test_a_job_that_may_exist_is_named_if_the_api_stays_unavailable(
    world: World, stand_in: ApiServer, is_done_first: bool
) -> None:
    """Reason and output have the name, so that an operator finds the Job or sees that there is none."""
    fault = Fault(504, times=100, verbs=frozenset({"create"}), resource="jobs", is_done_first=is_done_first)
    gone = Fault(504, times=100, verbs=frozenset({"get"}), resource="jobs")
    stand_in.faults.extend([fault, gone])
    with pytest.raises(OutcomeUnknown, match="may exist") as caught:
        await world.act(CreateClusterJob, manifest=MANIFEST, namespace=world.namespace, timeout=1)
    stand_in.faults.clear()
    name = caught.value.output["job"]
    assert name in str(caught.value)
    found = [each["metadata"]["name"] for each in await world.cluster.list(JOBS, world.namespace)]
    assert found == ([name.partition("/")[2]] if is_done_first else [])


@pytest.mark.parametrize(("clearance", "kind"), [("stop", OutcomeUnknown), ("resolved", NoLongerWanted)])
async def test_a_job_that_may_exist_is_named_when_the_run_ends(
    world: World, stand_in: ApiServer, clearance: Clearance, kind: type[ActionFailure]
) -> None:
    """A cancelled run and a resolved alert give up the wait for the API, not the name."""
    stand_in.faults.append(Fault(504, times=100, verbs=frozenset({"create"}), resource="jobs"))
    call = world.call(CreateClusterJob, manifest=MANIFEST, namespace=world.namespace)

    async def ended() -> Clearance:
        return clearance

    with pytest.raises(kind, match=f"Job {world.namespace}/health-.* may exist") as caught:
        await world.perform(CreateClusterJob, replace(call, clearance=ended))
    assert caught.value.output["job"].startswith(f"{world.namespace}/health-")


async def test_a_job_that_may_exist_is_named_when_the_api_hangs(world: World, stand_in: ApiServer) -> None:
    """A request without an answer ends soon after the deadline, before the engine cancels the action."""
    stand_in.latency = 20.0
    with pytest.raises(OutcomeUnknown, match="may exist") as caught:
        async with asyncio.timeout(0.2 + GRACE.total_seconds()):
            await world.act(CreateClusterJob, manifest=MANIFEST, namespace=world.namespace, timeout=0.2)
    stand_in.latency = 0.0
    assert caught.value.output["job"].startswith(f"{world.namespace}/health-")


async def test_a_job_whose_end_cannot_be_read_is_named(world: World, stand_in: ApiServer) -> None:
    """The Job was created; the API stays unavailable while the step waits for its end."""
    stand_in.faults.append(Fault(503, times=100, verbs=frozenset({"get"}), resource="jobs"))
    with pytest.raises(OutcomeUnknown, match="its end is unknown") as caught:
        await world.act(CreateClusterJob, manifest=MANIFEST, namespace=world.namespace, timeout=0.5)
    stand_in.faults.clear()
    ref = await made(world)
    assert caught.value.output["job"] == f"{world.namespace}/{ref.name}"
    assert caught.value.output["result"] == "unknown"
    assert ref.name in str(caught.value)


async def test_a_rejected_job_is_not_said_to_exist(world: World, stand_in: ApiServer) -> None:
    """A rejection is certain: there is no Job to look for."""
    stand_in.faults.append(Fault(429, times=100, verbs=frozenset({"create"}), resource="jobs"))
    with pytest.raises(TemporaryFailure, match="not done in time") as caught:
        await world.act(CreateClusterJob, manifest=MANIFEST, namespace=world.namespace, timeout=0.5)
    assert "may exist" not in str(caught.value)


async def test_another_users_job_of_that_name_is_left_alone(world: World) -> None:
    """A Job that our command did not create is not treated as ours."""
    call = world.call(CreateClusterJob, manifest=MANIFEST, namespace=world.namespace, wait=False)
    output = await world.perform(CreateClusterJob, call)
    ref = Ref(JOBS, output["job"].partition("/")[2], world.namespace)
    await world.cluster.patch(ref, {"metadata": {"annotations": {"trainmedic.io/command": "another"}}})
    with pytest.raises(ObjectExists):
        await world.perform(CreateClusterJob, world.again(call))


async def test_a_job_without_a_namespace_is_a_clear_failure(world: World) -> None:
    """Neither the step nor the manifest states one."""
    with pytest.raises(PermanentFailure, match="has no namespace"):
        await world.act(CreateClusterJob, manifest=MANIFEST)
