"""``GET /jobs/{job}/logs``: what is asked of who keeps the lines, and how the answer is written."""

from __future__ import annotations

import hashlib
import json
from datetime import timedelta
from typing import Any

import pytest

from tests.support.api_world import World
from tests.support.clocks import START
from trainmedic_logs.domain.known_finding import JobPlace
from trainmedic_logs.domain.log_search import FoundLine, LogLevel, LogQuery
from trainmedic_server import errors
from trainmedic_server.auth.auth import Authenticator
from trainmedic_server.auth.tokens import Token, TokenRole
from trainmedic_server.domain.topology import ClusterTopology, Pod
from trainmedic_server.live.job_location import JobLocations
from trainmedic_server.ports.logs import LogBatch
from trainmedic_server.ports.outside import Presence

LINE = FoundLine(START, "CUDA out of memory \u2028", "gpu-07", "training", LogLevel.ERROR, "llm-1", 3, 7)
TOLD = {
    "at": LINE.at.strftime("%Y-%m-%dT%H:%M:%S.000000Z"),
    "node": "gpu-07",
    "source": "training",
    "level": "error",
    "job": "llm-1",
    "attempt": 3,
    "rank": 7,
    "line": "CUDA out of memory \u2028",
}


def world(*batches: LogBatch | Exception) -> World:
    made = World()
    made.logs.batches = list(batches)
    return made


async def test_lines_and_notes_come_as_ndjson() -> None:
    """One object in each line, whatever is in the text."""
    made = world(LogBatch([LINE]), LogBatch([LINE], ["no lines of 1 node are here: gpu-08: did not answer"]))
    async with made.client() as client:
        answer = await client.get("/jobs/llm-1/logs")
    assert answer.headers["content-type"] == "application/x-ndjson"
    assert [json.loads(line) for line in answer.text.split("\n")[:-1]] == [
        TOLD,
        TOLD,
        {"note": "no lines of 1 node are here: gpu-08: did not answer"},
    ]
    assert made.logs.closed == 1


async def test_who_follows_gets_server_sent_events() -> None:
    """With a comment while nothing is new."""
    made = world(LogBatch([LINE]), LogBatch(), LogBatch(notes=["a note"]))
    async with made.client() as client:
        answer = await client.get("/jobs/llm-1/logs?follow=true")
    assert answer.headers["content-type"].startswith("text/event-stream")
    first, second, third, _ = answer.text.split("\n\n")
    assert first.startswith("event: line\ndata: {")
    assert json.loads(first.partition("data: ")[2]) == TOLD
    assert second == ": still here"
    assert third == 'event: note\ndata: {"note":"a note"}'
    assert made.logs.asked[0][2] is None


async def test_all_that_is_asked_reaches_who_keeps_the_lines() -> None:
    """And the nodes where the job runs, and where it ran before."""
    made = world()
    placement = [{"rank": 0, "node": "gpu-07", "gpu": None}]
    made.bus.present = [Presence("team/llm", START, {"placement": placement})]
    before = {
        JobPlace("team/llm", "gpu-01"): START,
        JobPlace("team/llm", "gpu-02"): START + timedelta(hours=1),
        JobPlace("other", "gpu-03"): START,
    }
    await made.findings.transact(lambda tx: tx.findings.save_job_places(before))
    params: dict[str, Any] = {"rank": 7, "node_rank": 0, "node": "gpu-07", "attempt": 3, "since": "1h", "until": "30m"}
    params |= {"grep": "loss|grad", "level": "warning", "kernel": "true", "limit": 5}
    async with made.client() as client:
        assert (await client.get("/jobs/team%2Fllm/logs", params=params)).status_code == 200
    ((query, nodes, most),) = made.logs.asked
    assert query == LogQuery(
        "team/llm",
        START - timedelta(hours=1),
        START - timedelta(minutes=30),
        attempt=3,
        rank=7,
        node_rank=0,
        node="gpu-07",
        grep="loss|grad",
        level=LogLevel.WARNING,
        kernel=True,
    )
    assert (nodes, most) == (("gpu-07", "gpu-02", "gpu-01"), 5)


@pytest.mark.parametrize(("params", "since"), [("", timedelta(minutes=10)), ("?attempt=2", timedelta(days=30))])
async def test_without_since_the_last_minutes_are_meant_or_a_whole_attempt(params: str, since: timedelta) -> None:
    """Who names an attempt wants to see its end, however long ago that was."""
    made = world()
    async with made.client() as client:
        await client.get(f"/jobs/llm-1/logs{params}")
    assert made.logs.asked[0][0].since == START - since


@pytest.mark.parametrize(
    ("params", "field"),
    [
        ("grep=(", "grep"),
        ("since=yesterday", "since"),
        ("since=1m&until=5m", "until"),
        ("level=loud", "level"),
        ("rank=-1", "rank"),
        ("limit=0", "limit"),
    ],
)
async def test_what_makes_no_sense_is_refused_with_its_place(params: str, field: str) -> None:
    """Before anybody is asked."""
    made = world()
    async with made.client() as client:
        answer = await client.get(f"/jobs/llm-1/logs?{params}")
    assert answer.status_code == 422
    assert field in answer.json()["field"]
    assert made.logs.asked == []


@pytest.mark.parametrize(
    ("error", "status"),
    [(errors.LogsUnavailable("no agent can be asked"), 503), (errors.LogQueryRefused("too many"), 422)],
)
async def test_where_nobody_can_answer_the_status_says_so(error: Exception, status: int) -> None:
    """Nothing was sent yet."""
    made = world(error)
    async with made.client() as client:
        answer = await client.get("/jobs/llm-1/logs")
    assert answer.status_code == status
    assert answer.json()["detail"].startswith(str(error))


@pytest.mark.parametrize(("away", "status"), [(None, 404), (errors.BusUnavailable, 503)])
async def test_a_job_that_could_not_be_asked_is_not_said_to_be_unknown(
    away: type[errors.BusUnavailable] | None, status: int
) -> None:
    """Once Redis is back, its node may be known again."""
    made = world(errors.NotFound("no job 'llm-1' is connected"))
    made.bus.away = away
    async with made.client() as client:
        answer = await client.get("/jobs/llm-1/logs")
    assert answer.status_code == status


async def test_a_tenant_sees_its_own_jobs_and_no_kernel() -> None:
    """A kernel's lines name processes of others."""
    digest = hashlib.sha256(b"tenant").digest()
    auth = Authenticator([Token("tenant", digest, frozenset({TokenRole.VIEWER}), ("llm-*",))])
    made = World(auth=auth)
    headers = {"Authorization": "Bearer tenant"}
    async with made.client() as client:
        for path, status in (
            ("/jobs/llm-1/logs", 200),
            ("/jobs/other/logs", 403),
            ("/jobs/llm-1/logs?kernel=true", 403),
            ("/jobs", 403),
            ("/history", 403),
        ):
            assert (await client.get(path, headers=headers)).status_code == status, path
    assert len(made.logs.asked) == 1


async def test_so_many_answers_are_streamed_at_a_time_and_no_more() -> None:
    """A turn is given back also where nobody could answer."""
    made = world(errors.LogsUnavailable("nobody"))
    async with made.client() as client:
        for _ in range(made.limits.log_searches + 5):
            assert (await client.get("/jobs/llm-1/logs")).status_code == 503
        made.logs.batches = []
        assert (await client.get("/jobs/llm-1/logs")).status_code == 200


async def test_of_a_job_of_which_no_node_is_known_all_who_read_logs_are_asked() -> None:
    """A job that no SDK reports is known by its files alone; who names a node has that one asked."""
    made = world()
    made.bus.present = [
        Presence("gpu-02", START, {"logs": {"files": 3}}),
        Presence("gpu-01", START, {"logs": {"files": 0, "rules": "v1"}}),
        Presence("gpu-03", START, {}),
    ]
    async with made.client() as client:
        assert (await client.get("/jobs/foreign/logs?local_rank=2")).status_code == 200
        assert (await client.get("/jobs/foreign/logs?node=gpu-03&follow=true")).status_code == 200
    (first, second) = made.logs.asked
    assert (first[0].is_search, first[0].local_rank, first[1]) == (True, 2, ("gpu-01", "gpu-02"))
    assert (second[0].is_search, second[0].node, second[1]) == (False, "gpu-03", ())


async def test_the_agent_of_a_node_that_the_cluster_calls_otherwise_is_asked() -> None:
    """By its own name, to which alone it answers."""
    made = World()
    made.bus.present = [Presence("gpu-7", START, {})]
    cluster = ClusterTopology((), {"u1": Pod("u1", "ml", "llm-0", "gpu-7.site.example", "llm-1")})
    locations = JobLocations(made.bus, made.findings, lambda: cluster)  # type: ignore[arg-type]
    assert (await locations.of("llm-1")).nodes == ("gpu-7",)
