"""Groups of alerts in which one member is malformed or too long, sent by a real Alertmanager.

A real agent on the stand-in for the GPU driver shows what becomes of the power cap.
"""

from __future__ import annotations

import json
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from tests.driver.driver import Driver, cards
from tests.support import programs
from tests.support.agent_node import KEY
from tests.support.gpu_node import GpuNode
from tests.support.live import Server
from tests.support.programs import eventually

PLAYBOOK = """
playbook: cool
mode: enforce
on: {alert: CardHot}
target: gpu
steps:
  - {id: cap, action: gpu.power_limit, with: {percent: 70}, undo: on_resolve}
"""


class Sender:
    """An Alertmanager that sends all alerts of a cluster as one group, and the server that it sends to."""

    def __init__(self, url: str, server: Server) -> None:
        self.url = url
        self.server = server

    def tell(self, *alerts: Mapping[str, Any]) -> None:
        """Post alerts as Prometheus does."""
        headers = {"Content-Type": "application/json"}
        request = urllib.request.Request(f"{self.url}/api/v2/alerts", json.dumps(alerts).encode(), headers)
        urllib.request.urlopen(request, timeout=60).close()

    def first_event(self, kind: str) -> dict[str, Any]:
        """The data of the first event of that kind."""
        url = f"http://127.0.0.1:{self.server.port}/events"
        with urllib.request.urlopen(urllib.request.Request(url, headers={"Last-Event-ID": "0"}), timeout=60) as stream:
            for line in stream:
                if line.startswith(b"data:") and (event := json.loads(line.removeprefix(b"data:")))["kind"] == kind:
                    data: dict[str, Any] = event["data"]
                    return data
        raise AssertionError(f"no event {kind}")


@pytest.fixture
def scene(tmp_path: Path, redis_url: str, make_driver: Callable[..., Driver]) -> Iterator[tuple[Sender, Driver]]:
    binary = programs.alertmanagers().get("installed")
    if binary is None:
        pytest.fail("no Alertmanager is installed")
    driver = make_driver(2)
    environment = {"TRAINMEDIC_SIGNING_KEY": KEY}
    server = Server(tmp_path / "server", PLAYBOOK, "--redis", redis_url, environment=environment)
    config = tmp_path / "alertmanager.yml"
    config.write_text(
        "route: {receiver: trainmedic, group_by: [cluster], group_wait: 0s, group_interval: 1s, repeat_interval: 1h}\n"
        "receivers:\n"
        f"  - {{name: trainmedic, webhook_configs: [{{url: 'http://127.0.0.1:{server.port}/webhook/'}}]}}\n"
    )
    program, url = programs.start_alertmanager(binary, config, tmp_path / "am")
    with program, server, GpuNode(tmp_path / "node", redis_url, driver):
        yield Sender(url, server), driver


def hot(**changes: Any) -> dict[str, Any]:
    labels = {"alertname": "CardHot", "cluster": "c", "node": "n1", "UUID": cards(2)[1].uuid}
    return {"labels": labels, "annotations": {"summary": "hot"}, **changes}


def test_an_alert_with_too_long_text_does_not_affect_its_group(scene: tuple[Sender, Driver]) -> None:
    """A cap is active; an alert with a long annotation and one with a long label join; then the first resolves."""
    sender, driver = scene
    beginning = "2026-01-02T03:04:05Z"
    sender.tell(hot(startsAt=_now()))
    eventually(lambda: driver.watts(1) == 490, 60, "the cap")
    sender.tell(
        {
            "labels": {"alertname": "Chatty", "cluster": "c"},
            "annotations": {"log": "x" * 70_000},
            "startsAt": beginning,
        },
        {"labels": {"alertname": "Odd", "cluster": "c", "argv": "y" * 66_000}, "startsAt": beginning},
    )
    listed = lambda: sender.server.ask("/alerts?alertname=Chatty").body["items"]  # noqa: E731
    (chatty,) = eventually(listed, 60, "the member with the long annotation")
    assert chatty["annotations"]["log"].endswith("x… [cut: 70,000 characters]")
    assert driver.watts(1) == 490
    sender.tell(hot(endsAt=_now()))
    eventually(lambda: driver.watts(1) == 700, 60, "the power of before")
    assert sender.server.ask("/alerts?alertname=Odd").body["items"] == []
    event = sender.first_event("alert_rejected")
    assert event["alert"] == "Odd"
    assert "argv: has 66000 characters" in event["why"]


def _now() -> str:
    return datetime.now(UTC).isoformat()
