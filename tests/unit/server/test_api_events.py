"""``POST /events/{name}``, without a socket."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.support.api_world import World
from trainmedic_server.api.schemas import WebhookReply
from trainmedic_server.auth.auth import Authenticator
from trainmedic_server.auth.tokens import Token, TokenRole
from trainmedic_server.catalog import alert_map_roots
from trainmedic_server.catalog.alert_map_library import AlertMapLibrary

MAP = """
events:
  - event: rack
    when: body.state == "raised"
    labels: {rack: "{{ body.rack }}"}
    key: "{{ body.id }}"
"""
GRAFANA = {
    "receiver": "trainmedic",
    "status": "firing",
    "version": "1",
    "orgId": 1,
    "title": "[FIRING:1] GPU hot",
    "alerts": [
        {
            "status": "firing",
            "labels": {"alertname": "GPUTemperatureHigh", "grafana_folder": "gpu", "node": "n1"},
            "annotations": {"summary": "hot"},
            "startsAt": "2026-01-01T00:00:00Z",
            "endsAt": "0001-01-01T00:00:00Z",
            "generatorURL": "https://grafana.example/alerting/grafana/abc/view",
            "fingerprint": "57c6d9296de2ad39",
            "values": {"A": 91.5},
            "valueString": "[ var='A' value=91.5 ]",
        }
    ],
}


@pytest.fixture
def world(tmp_path: Path) -> World:
    (tmp_path / "map.yaml").write_text(MAP)
    shipped = alert_map_roots.shipped()
    assert shipped is not None
    library = AlertMapLibrary([tmp_path / "map.yaml", shipped / "grafana.yaml"])
    library.reload()
    assert library.problems == ()
    return World(alert_map=library)


async def send(world: World, name: str, body: Any, **headers: str) -> httpx.Response:
    async with world.client() as client:
        content = body if isinstance(body, bytes) else json.dumps(body).encode()
        return await client.post(f"/events/{name}", content=content, headers=headers)


async def test_an_event_is_admitted_as_a_stand_in_alert(world: World) -> None:
    """The reply is that of a delivery."""
    answer = await send(world, "rack", {"state": "raised", "rack": 7, "id": "x"})
    assert answer.status_code == 200, answer.text
    assert WebhookReply.model_validate(answer.json()).alerts == 1
    (alert,) = world.engine.deliveries[0].alerts
    assert alert.labels == {"alertname": "event:rack", "event": "rack", "rack": "7"}
    assert alert.is_stand_in


async def test_an_event_that_no_entry_takes_is_answered_and_means_nothing(world: World) -> None:
    """Its sender must not send it again."""
    answer = await send(world, "rack", {"state": "cleared"})
    assert (answer.status_code, answer.json()["alerts"]) == (200, 0)


async def test_grafana_sends_its_alerts_directly(world: World) -> None:
    """With its own payload. They start playbooks for alerts, and Alertmanager is not asked about them."""
    answer = await send(world, "grafana", GRAFANA)
    assert (answer.status_code, answer.json()["alerts"]) == (200, 1)
    (alert,) = world.engine.deliveries[0].alerts
    assert (alert.name, alert.fingerprint, alert.ends_at) == ("GPUTemperatureHigh", "57c6d9296de2ad39", None)
    assert not alert.is_stand_in
    assert not alert.is_in_alertmanager


@pytest.mark.parametrize(
    ("name", "body", "status", "field"),
    [
        ("rack", {"state": "raised", "id": "x"}, 422, "labels.rack"),
        ("rack", {"state": "raised", "rack": "a\0b", "id": "x"}, 422, "labels.rack"),
        ("rack", [], 422, "when"),
        ("rack", b"{", 400, None),
        ("grafana", {}, 422, "alerts"),
        ("grafana", {"alerts": [{"status": "firing"}]}, 422, "alerts.0.labels"),
        ("other", {}, 404, None),
    ],
)
async def test_a_bad_event_is_refused_with_its_field(
    world: World, name: str, body: Any, status: int, field: str | None
) -> None:
    """And admits nothing."""
    answer = await send(world, name, body)
    assert (answer.status_code, answer.json().get("field")) == (status, field), answer.text
    assert world.engine.deliveries == []


async def test_an_unknown_event_is_answered_with_the_known_ones(world: World) -> None:
    """Without an alert map there is none."""
    assert (await send(world, "rak", {})).json()["detail"] == "The alert map has no event rak. It has: grafana, rack."
    assert (await send(World(), "rack", {})).json()["detail"] == "The alert map has no event rack. It has: none."


async def test_a_token_needs_the_role_of_a_sender(world: World) -> None:
    """As for deliveries of alerts."""
    tokens = [
        Token(str(role), hashlib.sha256(role.encode()).digest(), frozenset({role}))
        for role in (TokenRole.WEBHOOK, TokenRole.VIEWER)
    ]
    world = World(alert_map=world.alert_map, auth=Authenticator(tokens))
    statuses = [
        (await send(world, "rack", {"state": "cleared"}, **headers)).status_code
        for headers in ({}, {"authorization": "Bearer viewer"}, {"authorization": "Bearer webhook"})
    ]
    assert statuses == [401, 403, 200]
