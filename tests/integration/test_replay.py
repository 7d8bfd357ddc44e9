"""``trainmedic playbook replay`` of the history of a real server."""

from __future__ import annotations

import json
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from tests.support.live import OPEN, Server
from tests.support.programs import eventually
from trainmedic_core.command import main

PLAYBOOK = """
playbook: watch
on: {alert: NodeSick}
target: node
guards: {cooldown: 1h}
steps:
  - {wait_for: resolved, timeout: 1h}
"""
OTHER = """
playbook: page
on: {alert: NodeSick, matchers: ['number="3"']}
target: node
steps:
  - {action: notify, with: {message: sick}}
"""


class History:
    """A server that has decided on five alerts."""

    def __init__(self, server: Server) -> None:
        self.server = server
        self._began = datetime.now(UTC).isoformat()

    def tell(self, number: int, status: str = "firing", **labels: str) -> None:
        alert = {
            "status": status,
            "labels": {"alertname": "NodeSick", "number": str(number), **labels},
            "startsAt": self._began,
            "endsAt": datetime.now(UTC).isoformat() if status == "resolved" else "0001-01-01T00:00:00Z",
        }
        answer = self.server.ask("/webhook", {"version": "4", "status": status, "alerts": [alert]})
        assert answer.status in (200, 202), answer

    def make(self) -> None:
        self.tell(1, node="n1")
        self.tell(2, node="n1")
        self.tell(1, "resolved", node="n1")
        self.tell(2, "resolved", node="n1")
        self.wait_for_runs()
        self.tell(3, node="n1")
        self.tell(4)
        started = self.server.ask("/runs", {"playbook": "watch", "target": "node:n2"})
        assert started.status in (200, 201, 202), started
        self.wait_for_runs()
        self.tell(5, node="n2")

    def wait_for_runs(self) -> None:
        eventually(lambda: all(run["status"] not in OPEN for run in self.server.runs()), 60, "all runs closed")

    def replayed(self, playbooks: Path, *words: str) -> dict[str, Any]:
        argv = ["playbook", "replay", "--playbooks", str(playbooks), *words, "--output", "json"]
        done = CliRunner().invoke(main, [*argv, "--server", f"http://127.0.0.1:{self.server.port}"])
        assert done.exit_code == 0, done.output
        document: dict[str, Any] = json.loads(done.stdout)
        return document


@pytest.fixture
def history(tmp_path: Path) -> Iterator[History]:
    with Server(tmp_path / "server", PLAYBOOK) as server:
        made = History(server)
        made.make()
        yield made


def test_the_servers_own_playbooks_repeat_its_decisions(history: History, tmp_path: Path) -> None:
    """Its exports give the same, and other playbooks differ. The history stays unchanged."""
    before = history.server.ask("/history?limit=1000").body
    own = history.server.directory / "playbooks"
    document = history.replayed(own, "--from", "history")
    (compared,) = document["playbooks"]
    decisions = {"started": 1, "joined": 1, "cooldown": 2, "target_unknown": 1}
    assert (compared["then"], compared["now"]) == (decisions, decisions)
    assert (compared["same"], document["differences"], document["given_runs"]) == (5, [], 1)

    exported = []
    for path in ("alerts", "history"):
        items = history.server.ask(f"/{path}?limit=1000").body["items"]
        file = tmp_path / f"{path}.json"
        file.write_text("".join(f"{json.dumps(item)}\n" for item in items))
        exported += ["--from", str(file)]
    assert history.replayed(own, *exported) == document

    other = tmp_path / "page.yaml"
    other.write_text(OTHER)
    by_name = {each["playbook"]: each for each in history.replayed(other, "--from", "history")["playbooks"]}
    assert by_name["page"]["now"] == {"started": 1}
    assert by_name["watch"]["now"] == {"not_matched": 5}
    assert history.server.ask("/history?limit=1000").body == before
