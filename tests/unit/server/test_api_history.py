"""``GET /history`` and ``/history/{run_id}``, without a socket."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import AsyncIterator
from datetime import timedelta
from typing import Any

import httpx
import pytest
from msgspec.structs import replace

from tests.support.api_world import World, alert, payload
from tests.support.clocks import START
from trainmedic_core.target import Target, TargetKind
from trainmedic_server.api.payload import delivery
from trainmedic_server.domain.alert import AlertRecord, Identity
from trainmedic_server.domain.playbook import Mode, UndoTrigger
from trainmedic_server.domain.run import Attempt, Decision, Run, Status, StepState, StepStatus, Undo
from trainmedic_server.ports.store import RunRecord

ITEM = ["run_id", "timestamp", "alert_name", "alert_labels", "playbook", "target", "mode", "status", "decision"]
ITEM += ["action_taken", "success", "message", "duration_ms", "touched"]
ITEM += ["owes_undo", "undo_error", "undone_at", "waiting_on", "deadline", "approved_by", "decided_at"]
ITEM += [
    "started_by",
    "repeats",
    "parent",
    "batch",
    "group",
    "original_alert_name",
    "original_labels",
    "version",
    "also",
]


def run(number: int, **changes: Any) -> Run:
    made = Run(
        id=f"run-{number}",
        playbook="cool",
        version="v1",
        target=Target(TargetKind.GPU, node="node-1", gpu=str(number)),
        mode=Mode.ENFORCE,
        status=Status.SUCCEEDED,
        decision=Decision.STARTED,
        alert=Identity("f", START),
        alert_name="GPUHot",
        alert_labels={"alertname": "GPUHot", "node": "node-1"},
        created_at=START - timedelta(hours=number),
        ended_at=START - timedelta(hours=number) + timedelta(milliseconds=1500),
    )
    return replace(made, **changes)


def world_of(*runs: Run) -> World:
    world = World()
    for run in runs:
        world.history.records[run.id] = RunRecord(run, (), ())
    return world


@pytest.fixture
async def client() -> AsyncIterator[httpx.AsyncClient]:
    odd = run(3, target=None, status=Status.NOT_STARTED, decision=Decision.TARGET_UNKNOWN, message='=cmd|"/c calc"!A1')
    async with world_of(run(1), run(2, playbook="drain", ended_at=None, status=Status.WAITING), odd).client() as client:
        yield client


async def test_an_item_has_the_promised_members(client: httpx.AsyncClient) -> None:
    """All of them, always; what is not known is null."""
    items = (await client.get("/history")).json()["items"]
    assert [item["run_id"] for item in items] == ["run-3", "run-2", "run-1"]
    for item in items:
        assert set(item) == {*ITEM, "node", "gpu", "job"}
    assert items[2]["target"] == "gpu:node-1/1"
    assert (items[2]["node"], items[2]["gpu"], items[2]["job"]) == ("node-1", "1", None)
    assert (items[2]["timestamp"], items[2]["duration_ms"]) == ("2026-01-31T11:00:00Z", 1500)
    assert (items[0]["target"], items[0]["success"], items[1]["duration_ms"]) == (None, None, None)


@pytest.mark.parametrize(
    ("query", "expected"),
    [
        ("playbook=cool", [3, 1]),
        ("status=waiting", [2]),
        ("decision=target_unknown", [3]),
        ("alertname=GPUHot&gpu=1", [1]),
        ("node=node-1", [2, 1]),
        ("job=llm-1", []),
        ("since=90m", [1]),
        ("until=90m", [3, 2]),
        ("since=2026-01-31T10:00:00Z&until=2026-01-31T11:00:00Z", [2]),
        ("since=2026-01-31T12:00:00%2B01:00", [1]),
        ("since=2026-01-31T12:00:00+01:00", [1]),
        ("since=0", []),
        ("since=2026-01-31T10:00:00Z&until=2026-01-31T10:00:00Z", []),
    ],
)
async def test_filters_narrow_the_result(client: httpx.AsyncClient, query: str, expected: list[int]) -> None:
    """Times are RFC 3339, or a duration meaning that long ago."""
    items = (await client.get(f"/history?{query}")).json()["items"]
    assert [item["run_id"] for item in items] == [f"run-{number}" for number in expected]


async def test_pages_follow_the_cursor(client: httpx.AsyncClient) -> None:
    """`next` of one page gives the next; null ends it."""
    first = (await client.get("/history?limit=2")).json()
    second = (await client.get("/history", params={"limit": 2, "cursor": first["next"]})).json()
    assert [item["run_id"] for item in second["items"]] == ["run-1"]
    assert second["next"] is None


@pytest.mark.parametrize(
    ("query", "field"),
    [
        ("limit=0", "limit"),
        ("limit=1001", "limit"),
        ("limit=many", "limit"),
        ("status=odd", "status"),
        ("decision=odd", "decision"),
        ("since=yesterday", "since"),
        ("since=2026-01-31T12:00:00", "since"),
        ("until=999999999y", "until"),
        ("since=1h&until=2h", "until"),
        ("target=llm-1", "target"),
        ("target=job:", "target"),
        ("cursor=odd", "cursor"),
        ("node=a%00b", "node"),
        ("playbook=", "playbook"),
    ],
)
async def test_a_wrong_parameter_is_422_and_named(client: httpx.AsyncClient, query: str, field: str) -> None:
    """As a problem, without what was sent."""
    answer = await client.get(f"/history?{query}")
    assert answer.status_code == 422
    assert answer.headers["content-type"] == "application/problem+json"
    assert answer.json()["field"] == field


async def test_ndjson_streams_every_item(client: httpx.AsyncClient) -> None:
    """One JSON object a line, the same as in a page, and all of them."""
    answer = await client.get("/history?limit=1", headers={"accept": "application/x-ndjson"})
    assert answer.headers["content-type"] == "application/x-ndjson"
    lines = [json.loads(line) for line in answer.text.splitlines()]
    assert lines == (await client.get("/history")).json()["items"]


async def test_csv_streams_every_item(client: httpx.AsyncClient) -> None:
    """RFC 4180: a header, CRLF, quotes where needed; the labels as JSON in one cell."""
    answer = await client.get("/history", headers={"accept": "text/csv"})
    assert answer.headers["content-type"] == "text/csv; charset=utf-8"
    assert answer.text.count("\r\n") == 4
    rows = list(csv.DictReader(io.StringIO(answer.text, newline="")))
    assert [row["run_id"] for row in rows] == ["run-3", "run-2", "run-1"]
    assert json.loads(rows[2]["alert_labels"]) == {"alertname": "GPUHot", "node": "node-1"}
    assert (rows[2]["success"], rows[2]["duration_ms"], rows[2]["job"]) == ("true", "1500", "")


async def test_csv_cells_do_not_run_in_a_spreadsheet(client: httpx.AsyncClient) -> None:
    """What an alert says is text there, never a formula."""
    answer = await client.get("/history?decision=target_unknown", headers={"accept": "text/csv"})
    (row,) = csv.DictReader(io.StringIO(answer.text, newline=""))
    assert row["message"] == """'=cmd|"/c calc"!A1"""


@pytest.mark.parametrize(("accept", "body"), [("application/x-ndjson", ""), ("text/csv", ",".join(ITEM[:2]))])
async def test_an_empty_result_is_an_empty_stream(client: httpx.AsyncClient, accept: str, body: str) -> None:
    """For CSV with its header."""
    answer = await client.get("/history?job=none", headers={"accept": accept})
    assert answer.status_code == 200
    assert answer.text.startswith(body)
    assert answer.text.count("\n") == (1 if body else 0)


@pytest.mark.parametrize("accept", ["application/json", "application/x-ndjson", "text/csv"])
async def test_a_store_that_is_away_is_503_in_every_form(accept: str) -> None:
    """A stream too has not begun when that is noticed; the path of the store is not told."""
    world = World()
    world.history.away = True
    async with world.client() as client:
        answer = await client.get("/history", headers={"accept": accept})
    assert answer.status_code == 503
    assert "retry-after" in answer.headers
    assert "secret" not in answer.text


async def test_one_run_is_shown_in_full() -> None:
    """Alerts, steps with rendered parameters, attempts, outputs and undo, events in order, orders."""
    attempt = Attempt(1, "c-1", START, START + timedelta(seconds=30), "applied", START + timedelta(seconds=1))
    undo = Undo(UndoTrigger.ON_RESOLVE, "gpu.power_limit", {"watts": 700}, "c-1", because="resolved")
    step = StepState(
        "steps", 0, "cap", "action", "gpu.power_limit", StepStatus.SUCCEEDED, {"percent": 80}, (attempt,), undo=undo
    )
    made = run(1, steps=(step,))
    record = AlertRecord(delivery(payload(alert()), "d", START).alerts[0], START, START, 2)
    world = World()
    world.history.records[made.id] = RunRecord(made, (record,), ())
    world.history.append("run_started", made.id, by="alert")
    world.history.append("other", "run-9")
    world.history.append("step_succeeded", made.id, step="cap")
    async with world.client() as client:
        shown = (await client.get("/history/run-1")).json()
    assert {*ITEM, "waiting_on"} < set(shown)
    assert shown["action_taken"] == "gpu.power_limit"
    assert shown["owes_undo"] is True
    assert shown["alerts"][0]["labels"]["node"] == "node-1"
    assert shown["alerts"][0]["count"] == 2
    assert shown["steps"][0]["params"] == {"percent": 80}
    assert shown["steps"][0]["attempts"][0]["command_id"] == "c-1"
    assert shown["steps"][0]["undo"]["params"] == {"watts": 700}
    assert [event["kind"] for event in shown["events"]] == ["run_started", "step_succeeded"]
    assert [event["seq"] for event in shown["events"]] == [1, 3]


async def test_a_run_that_is_not_there_is_404(client: httpx.AsyncClient) -> None:
    """As a problem; an id that can be none is 422."""
    answer = await client.get("/history/run-9")
    assert (answer.status_code, answer.headers["content-type"]) == (404, "application/problem+json")
    assert (await client.get("/history/a%00b")).status_code == 422
