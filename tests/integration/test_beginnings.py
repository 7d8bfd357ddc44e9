"""Runs that begin with an event, the end of a run and a schedule, on a server that is killed."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.live import Server
from tests.support.programs import eventually, free_port

PLAYBOOKS = """
playbook: pulled
on: {{event: rack}}
target: {{job: "{{{{ labels.job }}}}"}}
steps:
  - {{action: http.request, with: {{method: GET, url: "http://127.0.0.1:{port}/"}}}}
---
playbook: after
on: {{run: {{playbook: pulled, status: failed}}}}
target: job
steps:
  - {{wait: 1s}}
---
playbook: each-minute
on: {{schedule: "* * * * *"}}
target: cluster
steps:
  - {{wait: 1s}}
"""
MAP = 'events: [{event: rack, labels: {job: "{{ body.job }}"}, key: "{{ body.id }}"}]'


@pytest.fixture
def server(tmp_path: Path) -> Server:
    (tmp_path / "map.yaml").write_text(MAP)
    return Server(tmp_path / "server", PLAYBOOKS.format(port=free_port()), "--alert-map", str(tmp_path / "map.yaml"))


def ended(server: Server, playbook: str) -> list[str]:
    open_ones = ("running", "waiting", "awaiting_approval")
    return [run["status"] for run in server.runs() if run["playbook"] == playbook and run["status"] not in open_ones]


def test_each_trigger_starts_one_run_despite_kills(server: Server) -> None:
    """The triggers are an event sent again, the end of a run and the minutes of a schedule."""
    with server:
        body = {"job": "llm-1", "id": "e1"}
        first = server.ask("/events/rack", body)
        assert (first.status, first.body["runs"][0]["decision"]) == (200, "started")
        server.kill()
        server.start()
        again = server.ask("/events/rack", body)
        assert (again.body["duplicates"], again.body["runs"][0]["run_id"]) == (1, first.body["runs"][0]["run_id"])
        eventually(lambda: ended(server, "after"), 60, "the run after it")
        eventually(lambda: ended(server, "each-minute"), 90, "a minute of the schedule")
        server.kill()
        server.start()
        (listed,) = [item for item in server.ask("/playbooks").body["items"] if item["name"] == "each-minute"]
        assert (listed["begins"], len(listed["next_times"])) == ("schedule * * * * * (UTC)", 3)
        assert (ended(server, "pulled"), ended(server, "after")) == (["failed"], ["succeeded"])
        starts = [run["timestamp"][:16] for run in server.runs() if run["playbook"] == "each-minute"]
        assert len(starts) == len(set(starts))
        assert server.ask("/events/other", {}).status == 404
        wrong = server.ask("/events/rack", {"id": "e2"})
        assert (wrong.status, wrong.body["field"]) == (422, "labels.job")
