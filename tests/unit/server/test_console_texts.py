"""What the console's pages say of a cluster after a busy day, and how large they are; without a browser."""

from __future__ import annotations

import gzip
import re
from collections.abc import AsyncIterator
from datetime import timedelta
from typing import Any

import httpx
import pytest

from tests.support import busy_cluster
from tests.support.api_world import World
from tests.support.clocks import START
from trainmedic_server.ports.metric_history import MetricSeries, Points
from trainmedic_server.ports.outside import Presence

HTML = {"accept": "text/html"}
PLACES = (
    *("/", "/runs", "/approvals", "/alerts", "/playbooks?whole=1", "/playbooks/gpu-temperature-high?whole=1", "/jobs"),
    *("/jobs/llm-3", "/jobs/llm-3?whole=1", "/nodes", "/nodes/node-1", "/report?whole=1", "/audit", "/settings"),
)
ODD = re.compile(
    r"undo never|\b1 GPUs|As written|Uncounted|Person after|would depend on how"
    r"|>wait for<|>world size<|class=\"target\"[^>]*>[^<]*GPU-[0-9a-f]{8}-[0-9a-f]{4}"
)


class Measured:
    """A Prometheus that answers each query with one series; what was asked is noted."""

    def __init__(self) -> None:
        self.asked: list[str] = []

    async def read(self, query: str, begin: Any, end: Any, every: Any) -> list[MetricSeries]:
        self.asked.append(query)
        steps = int((end - begin) / every)
        points: Points = [(begin.timestamp() + every.total_seconds() * each, 2.0) for each in range(steps + 1)]
        uuid = busy_cluster.gpu_uuid("node-1", 3)
        return [MetricSeries({"uuid": uuid, "rank": "21", "rank_node": "node-2"}, points)]


@pytest.fixture
async def client() -> AsyncIterator[httpx.AsyncClient]:
    world = World(is_stored=True)
    await busy_cluster.arrange(world)
    async with world.client() as client:
        yield client


async def test_no_page_speaks_in_names_of_fields(client: httpx.AsyncClient) -> None:
    """Or says what contradicts itself; and each stays within 25 kB on the wire."""
    runs = (await client.get("/history", params={"limit": "30"})).json()["items"]
    paths = [*PLACES, *(f"/runs/{run['run_id']}" for run in runs[:9])]
    for path in paths:
        page = await client.get(path, headers=HTML)
        assert page.status_code == 200, path
        assert (path, ODD.findall(page.text)) == (path, [])
        assert (path, len(gzip.compress(page.content, 5)) <= 25_000) == (path, True)


async def test_a_failed_run_whose_alert_still_fires_waits_for_a_person(client: httpx.AsyncClient) -> None:
    """One for each playbook and target; no run whose alert has resolved."""
    standing = (await client.get("/now")).json()
    assert standing["failed"]
    assert len({(each["playbook"], each["target"]) for each in standing["failed"]}) == len(standing["failed"])
    for each in standing["failed"]:
        run = (await client.get(f"/history/{each['run_id']}")).json()
        assert (run["status"], [alert["resolved_at"] for alert in run["alerts"]]) == ("failed", [None])
    page = (await client.get("/", headers=HTML)).text
    assert f'id="bad-{standing["failed"][0]["run_id"]}"' in page


async def test_an_alert_says_how_the_run_that_it_started_ended(client: httpx.AsyncClient) -> None:
    """Not that it was started."""
    alerts = (await client.get("/alerts", params={"limit": "300"})).json()["items"]
    reactions = [reaction for alert in alerts for reaction in alert["reactions"] if reaction["run_id"]]
    assert {"failed", "succeeded", "waiting", "not_started"} <= {each["run_status"] for each in reactions}
    page = (await client.get("/alerts", params={"each": "1"}, headers=HTML)).text
    assert "<b>started</b>" not in page
    assert "failed</span>" in page


async def test_a_run_lists_what_it_has_changed_and_not_reverted(client: httpx.AsyncClient) -> None:
    """The same as the first page; nothing once it is reverted."""
    (waiting, *_) = (await client.get("/history", params={"status": "waiting"})).json()["items"]
    (change,) = (await client.get(f"/history/{waiting['run_id']}")).json()["changed"]
    assert (change["before"], change["after"], change["given_back"]) == (
        "700 W",
        "560 W",
        "when GPUTemperatureHigh resolves",
    )
    asked = {"status": "succeeded", "playbook": "gpu-temperature-high"}
    (over, *_) = (await client.get("/history", params=asked)).json()["items"]
    assert (await client.get(f"/history/{over['run_id']}")).json()["changed"] == []


async def test_a_state_with_a_risk_is_no_green_ok(client: httpx.AsyncClient) -> None:
    """Without a signing key whoever can write to Redis commands everything."""
    ready = (await client.get("/ready")).json()
    assert (ready["redis"]["ok"], ready["redis"]["caution"], ready["store"]["caution"]) == (True, True, False)
    page = (await client.get("/settings", headers=HTML)).text
    assert re.search(r"<th scope=\"row\">redis</th><td><span class=\"st going\">", page)


async def test_the_page_why_has_its_own_name_for_an_address(client: httpx.AsyncClient) -> None:
    """With what was asked."""
    answer = await client.get("/why?alertname=Hot", headers=HTML)
    assert (answer.status_code, answer.headers["location"]) == (303, "/explain?alertname=Hot")


async def test_a_jobs_page_draws_what_prometheus_knows_and_says_what_is_missing(client: httpx.AsyncClient) -> None:
    """Without one, no curve is drawn, and nothing is said of what would be lost."""
    page = (await client.get("/jobs/llm-3?whole=1", headers=HTML)).text
    assert "No curve is drawn: no Prometheus is set" in page
    assert "Unknown: no Prometheus is set" in page
    assert "<polyline class=" not in page
    world = World(is_stored=True, metric_history=Measured())
    await busy_cluster.arrange(world)
    async with world.client() as measured:
        page = (await measured.get("/jobs/llm-3?whole=1", headers=HTML)).text
        node = (await measured.get("/nodes/node-1?whole=1", headers=HTML)).text
        curves = (await measured.get("/jobs/llm-3/curves")).json()
    assert page.count('class="picture"') == 4
    assert "It would lose its work since the checkpoint of step 2" in page
    assert 'class="mark act"' in page
    assert [each["rank"] for each in curves["ranks"]] == ["21"]
    assert len(curves["curves"][0]["points"]) <= 121
    assert 'job_name="llm-3"' in world.metric_history.asked[0]
    assert node.count("2 °C") == 1


async def test_without_prometheus_the_pictures_are_of_what_jobs_and_agents_reported() -> None:
    """With the source and its first report on the page, in the API too."""
    world = World(is_stored=True)
    await busy_cluster.arrange(world)
    for minute in range(30):
        world.bus.present, world.bus.present_jobs = [_cooling(minute)], [_reporting(minute)]
        await world.reported.look()
    async with world.client() as client:
        page = (await client.get("/jobs/llm-3?whole=1", headers=HTML)).text
        node = (await client.get("/nodes/node-1?whole=1", headers=HTML)).text
        curves = (await client.get("/jobs/llm-3/curves")).json()
        readings = (await client.get("/agents/node-1/readings")).json()
    assert page.count('class="picture"') == 3
    assert "Reported by the job since 11:30:00" in page
    assert "Prometheus is not used: no Prometheus is set (--prometheus-url)" in page
    assert "It would lose its work since the checkpoint of step 20" in page
    assert (curves["source"], curves["reported_since"]) == ("reports", "2026-01-31T11:30:00Z")
    assert "Reported by its agent since 11:30:00" in node
    assert "61 °C" in node
    assert "temperature: 61 to 90 °C" in node
    assert [each["name"] for each in readings["gpus"][0]["curves"]] == ["temperature", "power limit"]


async def test_without_prometheus_a_run_shows_what_its_gpu_or_job_reported_around_the_act() -> None:
    """With the act marked, nothing from outside those 20 minutes, and the effect still not measured."""
    world = World(is_stored=True)
    await busy_cluster.arrange(world)
    async with world.client() as client:
        (waiting, *_) = (await client.get("/history", params={"node": "node-1", "status": "waiting"})).json()["items"]
        asked = {"playbook": "training-loss-spike", "status": "succeeded"}
        (over, *_) = (await client.get("/history", params=asked)).json()["items"]
        before = (await client.get(f"/runs/{waiting['run_id']}", headers=HTML)).text
        for minute in range(30):
            world.bus.present = [_cooling(minute, 3)]
            world.bus.present_jobs = [_reporting(minute, over["job"])]
            await world.reported.look()
        on_gpu, on_job = [(await client.get(f"/runs/{run['run_id']}", headers=HTML)).text for run in (waiting, over)]
    assert 'class="picture"' not in before
    assert "Reported by the node" not in before
    assert "not measured" in on_gpu
    assert re.search(r"<b>temperature</b> 74 → 61 °C", on_gpu)
    assert 'class="mark act"' in on_gpu
    assert "Prometheus is not used: no Prometheus is set (--prometheus-url)" in on_gpu
    assert "Reported by the job since 11:30:00" in on_job
    assert on_job.count('class="mark act"') == 3


def _reporting(minute: int, job: str = "llm-3") -> Presence:
    at = START - timedelta(minutes=30 - minute)
    checkpoint = {"step": 20, "at": "2026-01-31T11:40:00Z"}
    figures = {"losses": {"median": 3 - minute / 30}, "learning_rate": 1e-4, "tokens_per_second": 9000.0 + minute}
    return Presence(job, at, {"step": 10 * minute, "checkpoint": checkpoint, **figures})


def _cooling(minute: int, gpu: int = 0) -> Presence:
    uuid = busy_cluster.gpu_uuid("node-1", gpu)
    gpus = [{"index": gpu, "uuid": uuid, "power_limit_watts": 700 if minute < 10 else 560}]
    readings = [{"uuid": uuid, "temperature_celsius": 90 - minute, "utilization_percent": 99}]
    at = START - timedelta(minutes=30 - minute)
    return Presence("node-1", at, {"gpus": gpus, "gpu_readings": readings})


async def test_curves_begin_and_end_where_they_are_asked_for(client: httpx.AsyncClient) -> None:
    """And a span that is no span is refused."""
    read = (await client.get("/jobs/llm-3/curves", params={"since": "1h"})).json()
    assert read["until"] == START.isoformat().replace("+00:00", "Z")
    assert (await client.get("/jobs/llm-3/curves", params={"since": "1s"})).status_code == 422
    assert (await client.get("/agents/node-1/readings")).json()["gpus"] == []
