"""``GET /jobs``: what a job said of itself, and where it is known to run."""

from __future__ import annotations

from typing import Any

from tests.support.api_world import World
from tests.support.clocks import START
from trainmedic_server.api.jobs import JobDirectory, JobView, members_of
from trainmedic_server.domain.topology import AgentTopology, ClusterTopology, Pod
from trainmedic_server.ports.outside import Presence

A, B = "GPU-aaaa0000-0000-0000-0000-000000000000", "GPU-bbbb0000-0000-0000-0000-000000000000"
AGENT = Presence("n1", START, {"gpus": [{"uuid": A, "index": 0, "pods": ["u1"]}, {"uuid": B, "pods": ["u2"]}]})
PODS = [
    Pod("u1", "ml", "llm-0", "n1", "llm-jobset"),
    Pod("u2", "ml", "old-0", "n1", "old"),
    Pod("u3", "ml", "old-1", "n2", "old"),
    Pod("u4", "ml", "exporter", "n2", None),
]


def directory() -> JobDirectory:
    return JobDirectory(
        AgentTopology.of({AGENT.name: AGENT.details}), ClusterTopology((), {pod.uid: pod for pod in PODS})
    )


def connected(jobs: JobDirectory, job: Presence) -> JobView:
    return jobs.connected(job, members_of(job, (), False))


def shown(view: JobView) -> dict[str, Any]:
    return view.model_dump(exclude_unset=True, exclude={"last_seen"})


def test_a_job_with_the_sdk_is_shown_with_its_ranks_places_and_the_pods_on_them() -> None:
    """Though its pods' labels call it by another name."""
    details = {"placement": [{"rank": 0, "node": "n1", "gpu": A}, {"rank": 1, "node": "n3", "gpu": None}]}
    assert shown(connected(directory(), Presence("llm", START, details))) == {
        "name": "llm",
        "details": details,
        "nodes": ["n1", "n3"],
        "gpus": [{"node": "n1", "uuid": A}],
        "pods": [{"namespace": "ml", "name": "llm-0", "node": "n1"}],
    }


def test_a_job_that_does_not_say_where_it_runs_is_found_by_its_pods() -> None:
    """Those whose labels have its name, and the GPUs that the agents see them on."""
    view = shown(connected(directory(), Presence("old", START, {})))
    assert view["nodes"] == ["n1", "n2"]
    assert view["gpus"] == [{"node": "n1", "uuid": B}]
    assert [pod["name"] for pod in view["pods"]] == ["old-0", "old-1"]


def test_jobs_that_only_the_cluster_knows_are_those_whose_pods_are_nobody_elses() -> None:
    """One whose pods a connected job works in is that job."""
    jobs = directory()
    details = {"placement": [{"rank": 0, "node": "n1", "gpu": A}]}
    (other,) = jobs.only_in_cluster([connected(jobs, Presence("llm", START, details))], START)
    assert (other.name, other.connected, other.nodes) == ("old", False, ["n1", "n2"])


async def test_where_nothing_is_known_nothing_is_said() -> None:
    """As ever; also of what a job itself says to be null."""
    world = World()
    details = {"placement": [{"rank": 0, "gpu": None}]}
    world.bus.present = [Presence("llm", START, details)]
    async with world.client() as client:
        for path in ("/jobs", "/jobs?cluster=true"):
            (item,) = (await client.get(path)).json()["items"]
            assert item == {"name": "llm", "last_seen": "2026-01-31T12:00:00Z", "details": details}
        assert (await client.get("/jobs?cluster=maybe")).status_code == 422


async def test_who_is_not_believed_is_shown_with_the_doubt() -> None:
    """And what is claimed stands apart from what is known."""
    world = World()
    world.bus.is_signed = True
    world.bus.present = [
        Presence("forged", START, doubt="it has a wrong signature", claims={"step": 7}),
        Presence("genuine", START, {"step": 8}, uses_previous_key=True),
    ]
    async with world.client() as client:
        for path in ("/jobs", "/agents"):
            forged, genuine = (await client.get(path)).json()["items"]
            assert (forged["believed"], forged["doubts"]) == (False, ["it has a wrong signature"])
            assert (forged["details"], forged["claims"]) == ({}, {"step": 7})
            assert (genuine["believed"], genuine["signed_with"]) == (True, "previous key")
            assert "doubts" not in genuine


async def test_jobs_that_name_the_same_gpu_are_shown_with_what_contradicts_them() -> None:
    """Both, since nobody knows which of them is right."""
    world = World()
    world.bus.present = [
        Presence(name, START, {"placement": [{"rank": 0, "node": "n1", "gpu": A}]}) for name in ("llm-1", "llm-2")
    ]
    async with world.client() as client:
        first, second = (await client.get("/jobs")).json()["items"]
    assert first["doubts"] == [f"{A} is named by job llm-2 too"]
    assert second["doubts"] == [f"{A} is named by job llm-1 too"]
