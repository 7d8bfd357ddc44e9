"""What everybody promises who looks up the lines of jobs: the agents, and each store of logs."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any
from uuid import uuid4

import httpx
import pytest
from msgspec.structs import replace
from starlette.applications import Starlette
from starlette.testclient import TestClient

from tests.support.log_stores.lines import INDEX_TEMPLATE, DocumentWriter, LineWriter, LokiPusher, poster
from tests.support.log_stores.loki_stand_in import LokiStandIn
from tests.support.log_stores.opensearch_stand_in import OpenSearchStandIn
from tests.support.log_stores.victorialogs_stand_in import VictoriaLogsStandIn
from tests.support.nodes_with_logs import BusOfNodes, LogNode, names
from trainmedic_logs.domain.log_search import FoundLine, LogLevel, LogQuery
from trainmedic_server.adapters.agent_logs import AgentLogs
from trainmedic_server.adapters.log_stores.loki import Loki
from trainmedic_server.adapters.log_stores.opensearch import OpenSearch
from trainmedic_server.adapters.log_stores.paging import LineStore, StoredLogs
from trainmedic_server.adapters.log_stores.store_http import StoreHttp
from trainmedic_server.adapters.log_stores.victorialogs import VictoriaLogs
from trainmedic_server.adapters.system_clock import SystemClock
from trainmedic_server.ports.logs import LogBatch, LogSource

NOW = datetime.now(UTC).replace(microsecond=0)
NODES = ("gpu-01", "gpu-02")


@dataclass
class Kept:
    """A source, and how lines come to it: job, attempt, node, time, text."""

    source: LogSource
    job: str
    write: Callable[[str, int, str, datetime, str], None]
    write_kernel: Callable[[str, datetime, str], None]
    http: StoreHttp | None = None
    settles: float = 0.0
    """Seconds until what was written can be found."""

    @property
    def query(self) -> LogQuery:
        return LogQuery(self.job, NOW - timedelta(hours=1))

    async def texts(self, most: int = 10_000, **conditions: Any) -> list[str]:
        return [line.text.partition(" ")[2] or line.text for line in await self.lines(most, **conditions)]

    async def lines(self, most: int = 10_000, **conditions: Any) -> list[FoundLine]:
        batches = await self.batches(most, **conditions)
        return [line for batch in batches for line in batch.lines]

    async def batches(self, most: int = 10_000, **conditions: Any) -> list[LogBatch]:
        await asyncio.sleep(self.settles)
        return [batch async for batch in self.source.search(replace(self.query, **conditions), NODES, most)]


def of_agents(tmp_path: Path) -> Kept:
    nodes = names([LogNode(tmp_path, node) for node in NODES])

    def write(job: str, attempt: int, node: str, at: datetime, text: str) -> None:
        nodes[node].write(job, attempt, at, text)

    def write_kernel(node: str, at: datetime, text: str) -> None:
        nodes[node].write_kernel(at, text)

    return Kept(AgentLogs(BusOfNodes(nodes), SystemClock()), "llm-1", write, write_kernel)


def of_store(make: Callable[[StoreHttp], LineStore], http: StoreHttp, writer: LineWriter, settles: float = 0.0) -> Kept:
    """With small pages, so that there are many. Each test has a job of its own: a real store keeps its lines."""
    source = StoredLogs(make(http), SystemClock(), page=5)
    return Kept(source, f"llm-{uuid4()}", writer.write, writer.write_kernel, http, settles)


def stand_in(app: Starlette, path: str) -> tuple[StoreHttp, Callable[[Any], None]]:
    """How it is read, and what posts to it."""
    client = TestClient(app)

    def post(document: Any) -> None:
        answer = client.post(path, json=document)
        assert answer.is_success, answer.text

    return StoreHttp("http://store", {}, transport=httpx.ASGITransport(app)), post


def loki(tmp_path: Path) -> Kept:
    http, post = stand_in(LokiStandIn().app, "/loki/api/v1/push")
    return of_store(Loki, http, LokiPusher(post))


def victorialogs(tmp_path: Path) -> Kept:
    http, post = stand_in(VictoriaLogsStandIn().app, "/insert/loki/api/v1/push")
    return of_store(VictoriaLogs, http, LokiPusher(post))


def opensearch(tmp_path: Path) -> Kept:
    http, post = stand_in(OpenSearchStandIn().app, "/logs-trainmedic/_doc")
    return of_store(OpenSearch, http, DocumentWriter(post))


def real_loki(tmp_path: Path) -> Kept:
    url = os.environ["TRAINMEDIC_TEST_LOKI_URL"]
    return of_store(Loki, StoreHttp(url, {}), LokiPusher(poster(url, "/loki/api/v1/push")), 1.0)


def real_victorialogs(tmp_path: Path) -> Kept:
    url = os.environ["TRAINMEDIC_TEST_VICTORIALOGS_URL"]
    return of_store(VictoriaLogs, StoreHttp(url, {}), LokiPusher(poster(url, "/insert/loki/api/v1/push")), 4.0)


def real_opensearch(tmp_path: Path) -> Kept:
    url = os.environ["TRAINMEDIC_TEST_OPENSEARCH_URL"]
    httpx.put(f"{url}/_index_template/logs-trainmedic", json=INDEX_TEMPLATE).raise_for_status()
    return of_store(OpenSearch, StoreHttp(url, {}), DocumentWriter(poster(url, "/logs-trainmedic/_doc?refresh=true")))


KINDS: dict[str, Callable[[Path], Kept]] = {
    "agents": of_agents,
    "Loki's stand-in": loki,
    "VictoriaLogs' stand-in": victorialogs,
    "OpenSearch's stand-in": opensearch,
}
REAL = {"LOKI": real_loki, "VICTORIALOGS": real_victorialogs, "OPENSEARCH": real_opensearch}
KINDS |= {name: make for name, make in REAL.items() if os.environ.get(f"TRAINMEDIC_TEST_{name}_URL")}


@pytest.fixture(params=KINDS)
async def kept(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Kept]:
    made = KINDS[request.param](tmp_path)
    yield made
    if made.http is not None:
        await made.http.close()


def ago(seconds: float) -> datetime:
    return NOW - timedelta(seconds=seconds)


async def test_the_lines_of_all_nodes_come_oldest_first(kept: Kept) -> None:
    """This holds for any number of lines."""
    for number in range(100):
        kept.write(kept.job, 1, NODES[number % 2], ago(2000 - number), f"line {number}")
    lines = await kept.lines()
    assert [line.at for line in lines] == [ago(2000 - number) for number in range(100)]
    assert [line.node for line in lines] == [NODES[number % 2] for number in range(100)]
    assert {(line.job, line.attempt, line.source) for line in lines} == {(kept.job, 1, "launcher")}


@pytest.mark.parametrize(
    ("conditions", "expected"),
    [
        ({}, ["one", "ERROR two", "three"]),
        ({"node": "gpu-02"}, ["ERROR two"]),
        ({"attempt": 2}, ["three"]),
        ({"since": ago(25)}, ["ERROR two", "three"]),
        ({"until": ago(15)}, ["one", "ERROR two"]),
        ({"until": ago(20)}, ["one"]),
        ({"grep": "^.*t[hw].*e?o?$"}, ["ERROR two", "three"]),
        ({"grep": 'a "quoted\\\\ `thing'}, []),
        ({"level": LogLevel.WARNING}, ["ERROR two"]),
        ({"job": "another {job}"}, ["of another"]),
        ({"job": 'no"such{job}'}, []),
    ],
)
async def test_each_part_of_a_query_filters_the_lines(
    kept: Kept, conditions: dict[str, Any], expected: list[str]
) -> None:
    """Times are those of the lines; the end is exclusive."""
    if "job" in conditions:
        conditions = {**conditions, "job": conditions["job"] + kept.job}
    kept.write(kept.job, 1, "gpu-01", ago(30), "one")
    kept.write(kept.job, 1, "gpu-02", ago(20), "ERROR two")
    kept.write(kept.job, 2, "gpu-01", ago(10), "three")
    kept.write("another {job}" + kept.job, 1, "gpu-01", ago(10), "of another")
    assert await kept.texts(**conditions) == expected


async def test_the_kernel_logs_of_the_nodes_are_included_on_request(kept: Kept) -> None:
    """Their lines come between those of the job."""
    kept.write(kept.job, 1, "gpu-01", ago(30), "before")
    kept.write_kernel("gpu-01", ago(20), "NVRM: Xid (PCI:0000:9b:00): 79")
    kept.write(kept.job, 1, "gpu-01", ago(10), "after")
    assert await kept.texts() == ["before", "after"]
    lines = await kept.lines(kernel=True, since=ago(40))  # a real store keeps those of earlier tests
    assert [(line.source, line.node) for line in lines] == [
        ("launcher", "gpu-01"),
        ("kernel", "gpu-01"),
        ("launcher", "gpu-01"),
    ]
    assert lines[1].text == "NVRM: Xid (PCI:0000:9b:00): 79"


async def test_all_lines_of_one_moment_are_read(kept: Kept) -> None:
    """There are more than fit on a page; each comes once."""
    for number in range(4):
        kept.write(kept.job, 1, "gpu-01", ago(30), f"before {number}")
    for number in range(8):
        kept.write(kept.job, 1, NODES[number % 2], ago(20), f"line {number}")
    kept.write(kept.job, 1, "gpu-01", ago(10), "after")
    texts = await kept.texts()
    assert sorted(texts[4:12]) == [f"line {number}" for number in range(8)]
    assert texts[12:] == ["after"]


async def test_a_limited_result_has_a_note(kept: Kept) -> None:
    """It holds the oldest lines, so that the reader can continue after them."""
    for number in range(20):
        kept.write(kept.job, 1, NODES[number % 2], ago(2000 - number), f"line {number}")
    batches = await kept.batches(most=7)
    assert [line.text.partition(" ")[2] for batch in batches for line in batch.lines] == [
        f"line {number}" for number in range(7)
    ]
    assert "more than 7 lines answer" in batches[-1].notes[-1]
    assert "more than 1 line answers" in (await kept.batches(most=1))[-1].notes[-1]
    assert not [note for batch in await kept.batches(most=20) for note in batch.notes]


async def test_a_follower_gets_existing_lines_and_then_new_ones(kept: Kept) -> None:
    """Each line comes once; those of a new file may come a little later."""
    kept.write(kept.job, 1, "gpu-01", ago(30), "first")
    await asyncio.sleep(kept.settles)
    found: list[str] = []
    has_first = asyncio.Event()

    async def follow() -> None:
        async for batch in kept.source.follow(kept.query, NODES):
            found.extend(line.text.partition(" ")[2] for line in batch.lines)
            if found:
                has_first.set()
            if len(found) >= 3:
                return

    following = asyncio.create_task(follow())
    await asyncio.wait_for(has_first.wait(), 60)
    kept.write(kept.job, 1, "gpu-02", datetime.now(UTC), "second")
    kept.write(kept.job, 1, "gpu-01", datetime.now(UTC) + timedelta(milliseconds=1), "third")
    await asyncio.wait_for(following, 60)
    assert (found[0], sorted(found[1:])) == ("first", ["second", "third"])
