"""``GET /jobs/{job}/report`` and ``GET /report``: what they answer from the history alone."""

from __future__ import annotations

import asyncio
from datetime import timedelta
from typing import Any

import pytest
from msgspec.structs import replace

from tests.support.api_world import World, payload
from tests.support.clocks import START
from trainmedic_server.auth.auth import Authenticator
from trainmedic_server.auth.tokens import parse
from trainmedic_server.domain.run import Event, Status


def job_event(kind: str, minutes: float, job: str = "llm-1", **data: Any) -> Event:
    return Event(kind, START - timedelta(minutes=minutes), data={"job": job, **data})


def troubled(**parts: Any) -> World:
    """A job of eight ranks that failed for a quarter of an hour, one that is gone, and a node with two alerts."""
    world = World(**parts)
    world.history.events += [
        job_event("job_failed", 60, reason="its process ended by RuntimeError", ranks=8),
        job_event("job_restarted", 45),
        job_event("job_gone", 30, job="team/llm-2"),
    ]
    return world


async def get(world: World, path: str) -> tuple[int, Any]:
    async with world.client() as client:
        answer = await client.get(path)
        return answer.status_code, answer.json()


async def test_the_report_of_a_job_has_what_the_store_knows() -> None:
    """And says of each other figure why it is null."""
    status, report = await get(troubled(), "/jobs/llm-1/report")
    assert status == 200
    assert report["job"] == "llm-1"
    assert report["time_range"] == {"since": "2026-01-30T12:00:00Z", "until": "2026-01-31T12:00:00Z"}
    (failure,) = report["failures"]
    assert failure == {
        "at": "2026-01-31T11:00:00Z",
        "kind": "job_failed",
        "reason": "its process ended by RuntimeError",
        "down_seconds": 900.0,
        "verdict": None,
    }
    assert (report["failure_count"], report["restart_count"], report["repair_count"]) == (1, 1, 0)
    nulls = {name for name, value in report.items() if value is None}
    assert nulls - {"throughput_unit", "anomaly_count"} == report["unknown"].keys() - {"anomalies"}
    of_prometheus = {
        name for name, why in report["unknown"].items() if why == "no Prometheus is set (--prometheus-url)"
    }
    assert report["unknown"].keys() - of_prometheus == {"oom_events", "network_errors", "evaluations"}


async def test_a_job_may_have_a_slash_in_its_name() -> None:
    """As in the other calls on jobs."""
    status, report = await get(troubled(), "/jobs/team/llm-2/report")
    assert (status, report["job"], report["failure_count"]) == (200, "team/llm-2", 1)


@pytest.mark.parametrize(
    ("path", "status"),
    [
        ("/jobs/nobody/report", 404),
        ("/jobs/llm-1/report?since=yesterday", 422),
        ("/jobs/llm-1/report?since=10s", 422),
        ("/jobs/llm-1/report?since=1h&until=2h", 422),
        ("/report?since=2y", 422),
        ("/jobs/llm-1/report?since=5m", 404),
    ],
)
async def test_what_makes_no_sense_is_refused(path: str, status: int) -> None:
    """A time that is none or ends before it begins, and a job that nobody has heard of in that time."""
    answered, problem = await get(troubled(), path)
    assert (answered, problem["status"]) == (status, status)


async def test_the_report_on_all_jobs_counts_causes_nodes_and_repairs() -> None:
    """Hours are counted by ranks where they are known, and what is not counted is said."""
    world = troubled()
    async with world.client() as client:
        for fingerprint in ("a" * 16, "b" * 16):
            alert = payload()["alerts"][0] | {"fingerprint": fingerprint}
            assert (await client.post("/webhook", json=payload(alert))).status_code == 200
    for run_id, record in world.history.records.items():
        run = replace(record.run, status=Status.SUCCEEDED, ended_at=START + timedelta(seconds=90))
        world.history.records[run_id] = replace(record, run=replace(run, created_at=START - timedelta(seconds=1)))
    status, report = await get(world, "/report")
    assert status == 200
    assert report["failures"] == 2
    (cause,) = report["causes"]
    assert cause == {
        "cause": "unknown",
        "failures": 2,
        "jobs": 2,
        "down_seconds": 900.0,
        "not_back": 1,
        "lost_gpu_hours": 2.0,
        "uncounted": 1,
    }
    assert [(node["node"], node["alerts"], node["alert_names"]) for node in report["nodes"]] == [
        ("node-1", 2, ["GPUHot"])
    ]
    (repair,) = report["repairs"]
    assert (repair["playbook"], repair["runs"], repair["succeeded"], repair["median_seconds"]) == ("cool", 2, 2, 91.0)
    assert report["unknown"] == {"causes": "no failure was diagnosed in that time"}


async def test_reports_are_for_viewers() -> None:
    """Who only sends alerts reads none."""
    hashed = "260d3f4a59208a7765414c461b0e7f7a3046a6b59f4cc0f170b4b2a051b0b667"
    world = World(auth=Authenticator(parse(f"- {{name: am, sha256: {hashed}, roles: [webhook]}}", "tokens")))
    for path in ("/report", "/jobs/llm-1/report"):
        assert (await get(world, path))[0] == 401


async def test_a_store_that_is_away_is_told() -> None:
    """With 503, so that it is asked again."""
    world = troubled()
    world.history.away = True
    assert (await get(world, "/report"))[0] == 503


class Silent:
    """A Prometheus that takes every question and answers none."""

    def __init__(self) -> None:
        self.questions = 0

    async def read(self, *_: Any) -> list[Any]:
        self.questions += 1
        await asyncio.Event().wait()
        return []


async def test_reports_that_wait_for_prometheus_hold_up_no_page_of_the_history() -> None:
    """However many are asked for: two are made at a time, few wait, and more are refused."""
    world = troubled(metric_history=Silent())
    async with world.client() as client:
        waiting = [asyncio.create_task(client.get("/jobs/llm-1/report")) for _ in range(30)]
        await asyncio.sleep(0)
        async with asyncio.timeout(60):
            while sum(task.done() for task in waiting) < 12:
                await asyncio.sleep(0.01)
            assert {task.result().status_code for task in waiting if task.done()} == {503}
            assert (await client.get("/history")).status_code == 200
        for task in waiting:
            task.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)
    assert world.metric_history.questions == 2
