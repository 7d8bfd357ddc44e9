"""Which node is meant, by what a real server learns from a real agent over Redis: spellings, strangers, restarts."""

from __future__ import annotations

import contextlib
import sqlite3
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.driver.driver import Driver, cards
from tests.support.agent_node import KEY
from tests.support.gpu_node import GpuNode
from tests.support.live import Server
from tests.support.messages import delivery
from tests.support.programs import eventually

(CARD,) = (card.uuid for card in cards(1))
PLAYBOOKS = """
playbook: cap
on: {alert: TooHot}
target: gpu
steps:
  - {id: cap, action: gpu.power_limit, with: {percent: 80}, undo: on_resolve}
---
playbook: look
on: {alert: Silent}
target: node
steps:
  - {id: look, action: node.facts, timeout: 2s, on_error: continue}
"""


def fired(alert: str, number: int, **labels: str) -> dict[str, Any]:
    body = delivery(alert, str(number))
    body["alerts"][0]["labels"] = {"alertname": alert, **labels}
    return body


def decided(server: Server, alert: str, number: int, **labels: str) -> tuple[str, str | None]:
    answer = server.ask("/webhook", fired(alert, number, **labels))
    assert answer.status == 200, answer
    (run,) = answer.body["runs"]
    return run["decision"], run["target"]


def connected(server: Server) -> list[str]:
    return [agent["name"] for agent in server.ask("/agents").body["items"]]


def on_record(server: Server) -> list[str]:
    """The agents that a server which starts now would remember."""
    with contextlib.closing(sqlite3.connect(next(server.state.glob("*.db")))) as database:
        return [name for (name,) in database.execute("SELECT name FROM agent_lives")]


def test_an_agent_makes_its_node_known_in_every_spelling_and_beyond_its_end(
    tmp_path: Path, redis_url: str, make_driver: Callable[..., Driver]
) -> None:
    """The card is capped whatever its exporter calls the host; strangers are refused; a node whose agent is gone
    is known to a server that starts then."""
    driver = make_driver(1)
    server = Server(tmp_path / "server", PLAYBOOKS, "--redis", redis_url)
    try:
        with GpuNode(tmp_path / "node", redis_url, driver, name="box-4"):
            server.start(TRAINMEDIC_SIGNING_KEY=KEY)
            pod = {"Hostname": "dcgm-exporter-p9q8r", "instance": "10.20.30.40:9400"}
            assert decided(server, "TooHot", 1, UUID=CARD.removeprefix("GPU-"), **pod) == (
                "started",
                f"gpu:box-4/{CARD}",
            )
            assert server.closed_run()["status"] == "succeeded"
            assert driver.watts(0) == 560
            assert decided(server, "Silent", 2, instance="box-4.lab.example.org:9100")[1] == "node:box-4"
            assert decided(server, "Silent", 3, instance="box-5:9100")[0] == "target_unknown"
            assert decided(server, "Silent", 4, exported_instance="box-5", instance="box-4:9091")[0] == "target_unknown"
            explained = server.ask("/explain", {"labels": {"alertname": "TooHot", "UUID": CARD, **pod}}).body
            (book,) = explained["items"][0]["playbooks"]
            assert book["target_from"][0] == f'UUID="{CARD}" is a GPU of box-4 (reported by its agent)'
            eventually(lambda: on_record(server) == ["box-4"], 60, "the agent is on record")
        server.kill()
        server.start(TRAINMEDIC_SIGNING_KEY=KEY)
        assert server.ask("/agents").body["items"] == []
        assert decided(server, "Silent", 5, instance="box-4:9100")[1] == "node:box-4"
        assert decided(server, "Silent", 6, instance="box-5:9100")[0] == "target_unknown"
    finally:
        server.__exit__()


def test_an_alert_on_a_node_whose_agent_has_just_connected_is_accepted(
    tmp_path: Path, redis_url: str, make_driver: Callable[..., Driver]
) -> None:
    """Presences are read every five seconds; an alert that comes in between is accepted."""
    first, second = make_driver(1), make_driver(1)
    with Server(tmp_path / "server", PLAYBOOKS, "--redis", redis_url) as server:
        server.kill()
        with GpuNode(tmp_path / "one", redis_url, first, name="box-1"):
            server.start(TRAINMEDIC_SIGNING_KEY=KEY)
            assert decided(server, "Silent", 1, instance="box-2:9100")[0] == "target_unknown"
            with GpuNode(tmp_path / "two", redis_url, second, name="box-2"):
                eventually(lambda: "box-2" in connected(server), 60, "the agent is listed", 0.02)
                assert decided(server, "Silent", 2, instance="box-2:9100")[1] == "node:box-2"
