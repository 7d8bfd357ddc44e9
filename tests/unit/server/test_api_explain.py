"""``POST /explain``: the API around what the engine says."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest

from tests.support.api_world import World
from tests.support.clocks import START
from trainmedic_server.auth.auth import Authenticator
from trainmedic_server.auth.tokens import parse

WEBHOOK_ONLY = parse("- {name: am, sha256: '" + "0" * 64 + "', roles: [webhook]}", "tokens")


async def explained(body: Any, query: str = "", world: World | None = None) -> Any:
    async with (world or World()).client() as client:
        answer = await client.post(f"/explain{query}", json=body)
    assert answer.status_code == 200, answer.text
    return answer.json()


async def test_the_alert_is_judged_by_the_engine() -> None:
    """As of now, or as of then."""
    world = World()
    answer = await explained({"labels": {"alertname": "GPUHit"}}, world=world)
    assert (answer["items"][0]["alert_name"], answer["items"][0]["acting"]) == ("GPUHit", [])
    assert answer["items"][0]["reason"] == "no playbook reacts to 'GPUHit'; did you mean 'GPUHot'?"
    assert answer["server"]["mode"] == "enforce"
    assert answer["test"] is None
    await explained({"labels": {"alertname": "GPUHot"}}, "?at=1h", world)
    assert [at for _, at in world.engine.explained] == [None, START - timedelta(hours=1)]


async def test_an_alert_of_alertmanagers_api_is_judged_as_of_then() -> None:
    """It fired when it was copied, though its end is over since."""
    alert = {"labels": {"alertname": "GPUHot"}, "status": {"state": "active"}}
    alert |= {"startsAt": (START - timedelta(hours=3)).isoformat(), "endsAt": (START - timedelta(hours=1)).isoformat()}
    world = World()
    for query in ("", "?at=2h"):
        await explained([alert], query, world)
    assert [alert.status for alert, _ in world.engine.explained] == ["resolved", "firing"]


async def test_a_test_is_written_where_it_is_asked_for() -> None:
    """As text of a file."""
    answer = await explained({"labels": {"alertname": "GPUHot"}}, "?test=true")
    assert 'labels: {"alertname": "GPUHot"}' in answer["test"]


@pytest.mark.parametrize(
    ("body", "query", "status"),
    [("{", "", 400), ("[]", "", 422), ('{"labels": 1}', "", 422), ('{"labels": {}}', "?at=soon", 422)],
)
async def test_what_is_no_alert_is_refused(body: str, query: str, status: int) -> None:
    """As a problem document."""
    async with World().client() as client:
        headers = {"Content-Type": "application/json"}
        answer = await client.post(f"/explain{query}", content=body, headers=headers)
    assert answer.status_code == status, answer.text
    assert answer.headers["Content-Type"] == "application/problem+json"


async def test_it_needs_a_viewer() -> None:
    """Labels and parameters are shown."""
    async with World(auth=Authenticator(WEBHOOK_ONLY)).client() as client:
        assert (await client.post("/explain", json={"labels": {}})).status_code == 401
