"""``GET /approvals``: each question with what would be done."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest
from msgspec.structs import replace

from tests.support.api_world import World, alert
from tests.support.clocks import START
from trainmedic_server.cli import approvals
from trainmedic_server.domain.approval import StepAhead, Terms
from trainmedic_server.domain.run import Status, StepState, StepStatus

AHEAD = StepAhead("cap", "gpu.power_limit", {"watts": 300}, ("node:node-1",), ("node-1",), 8)


async def waiting(world: World, terms: Terms, **changes: object) -> None:
    """A run of the world's that asks."""
    async with world.client() as client:
        await client.post("/webhook", json={"version": "4", "alerts": [alert()]})
    (run_id,) = world.history.records
    record = world.history.records[run_id]
    step = StepState(
        "steps", 0, "sure", "approve", status=StepStatus.WAITING, params=terms.as_data(), message="Cap it?"
    )
    members: dict[str, Any] = {"started_at": START, "deadline": START + timedelta(minutes=30), **changes}
    step = replace(step, **members)
    run = replace(record.run, status=Status.AWAITING_APPROVAL, waiting_on="approval", steps=(step,))
    world.history.records[run_id] = replace(record, run=run)


async def test_a_question_comes_with_what_would_be_done_and_until_when() -> None:
    """And who may answer, who has, and where to look."""
    world = World(external_url="https://medic.example")
    terms = Terms((AHEAD,), by=("hardware",), count=2)
    await waiting(world, terms, output={"by": "ann", "note": "", "approved_by": ["ann"]})
    async with world.client() as client:
        answer = await client.get("/approvals")
    assert answer.status_code == 200
    (item,) = answer.json()["items"]
    run_id = item["run_id"]
    assert item["link"] == f"https://medic.example/runs/{run_id}"
    assert (item["question"], item["target"], item["alert_name"]) == ("Cap it?", "node:node-1", "GPUHot")
    assert (item["until"], item["count"], item["by"], item["approved_by"]) == (
        (START + timedelta(minutes=30)).isoformat().replace("+00:00", "Z"),
        2,
        ["hardware"],
        ["ann"],
    )
    assert item["steps"] == [
        {
            "id": "cap",
            "action": "gpu.power_limit",
            "params": {"watts": 300},
            "targets": ["node:node-1"],
            "nodes": ["node-1"],
            "gpus": 8,
            "note": None,
        }
    ]
    text = "\n".join(approvals._lines(item))
    assert "to 300 W" in text
    assert "node-1; 8 GPUs" in text
    assert "hardware, 2 different people; approved so far by ann" in text


@pytest.mark.parametrize("terms", [None, Terms()])
async def test_a_question_of_an_earlier_release_is_shown_with_what_is_known(terms: Terms | None) -> None:
    """It has no terms on record."""
    world = World()
    await waiting(world, Terms(), params=terms.as_data() if terms else {})
    async with world.client() as client:
        (item,) = (await client.get("/approvals")).json()["items"]
    assert (item["steps"], item["gpus"], item["count"], item["link"]) == ([], None, 1, None)
    assert "no node that is known" in "\n".join(approvals._lines(item))


@pytest.mark.parametrize(
    ("on_timeout", "text"),
    [
        ("ask_again", "it is asked again later, while the alert fires"),
        ("reject", "the run is rejected"),
        ("continue", "the run continues"),
        ("escalate", "it is escalated"),
    ],
)
async def test_a_question_states_what_follows_its_deadline(on_timeout: str, text: str) -> None:
    """In the command and in the console."""
    world = World()
    await waiting(world, Terms((AHEAD,), on_timeout=on_timeout))
    async with world.client() as client:
        (item,) = (await client.get("/approvals")).json()["items"]
        page = (await client.get("/approvals", headers={"Accept": "text/html"})).text
    assert f", then {text}; asked" in "\n".join(approvals._lines(item))
    assert f"), {text}." in page


async def test_a_lapsed_question_states_when_it_is_asked_again() -> None:
    """It can still be answered."""
    world = World()
    again = START + timedelta(minutes=30)
    await waiting(world, Terms((AHEAD,), lapsed=True), deadline=None, retry_at=again)
    async with world.client() as client:
        (item,) = (await client.get("/approvals")).json()["items"]
        page = (await client.get("/approvals", headers={"Accept": "text/html"})).text
    assert "no answer in time; next question" in "\n".join(approvals._lines(item))
    assert "It is asked again at " in page
    assert "It waits until it is answered" not in page
