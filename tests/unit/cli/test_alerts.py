"""``trainmedic alerts``: what was heard, and what came of it."""

from __future__ import annotations

import csv
import io
import json
from typing import Any

import pytest
from click.testing import CliRunner

from trainmedic_core.command import main
from trainmedic_server.api.alert_list import HeardAlertView
from trainmedic_server.cli.alerts import _COLUMNS
from trainmedic_server.cli.client import Client

ITEM = {
    "alert_name": "GPUTemperatureHigh",
    "labels": {"alertname": "GPUTemperatureHigh", "node": "node-1"},
    "annotations": {},
    "status": "firing",
    "fingerprint": "2a",
    "starts_at": "2026-01-31T12:00:00Z",
    "first_heard": "2026-01-31T12:00:30Z",
    "last_heard": "2026-01-31T16:00:30Z",
    "count": 2,
    "resolved_at": None,
}
MISSED = ITEM | {"reacted": False, "reason": "cool: 'severity' is ''", "reactions": []}
TAKEN = ITEM | {
    "reacted": True,
    "reason": "",
    "reactions": [{"playbook": "cool", "decision": "started", "reason": "", "run_id": "019c-abcdef12"}],
}


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """What a server that has 2 alerts, one a page, is asked."""
    requests: list[dict[str, Any]] = []

    def get(self: Client, path: str, params: dict[str, Any]) -> dict[str, Any]:
        assert path == "alerts"
        requests.append(params)
        return {"items": [TAKEN], "next": None} if "cursor" in params else {"items": [MISSED], "next": "c"}

    monkeypatch.setattr(Client, "get", get)
    return requests


def run(*words: str) -> str:
    done = CliRunner().invoke(main, ["alerts", *words], env={"COLUMNS": "200"})
    assert done.exit_code == 0, done.output
    return done.output


def test_a_row_shows_the_alert_and_its_outcome(asked: list[dict[str, Any]]) -> None:
    """It has the run's short id, or why none was started; filters are sent to the server."""
    header, missed, taken = run("--nobody", "--label", "node=node-1", "--since", "1d").splitlines()
    assert header.split() == ["RECEIVED", "ALERT", "STATUS", "TIMES", "LABELS", "REACTIONS"]
    assert missed.endswith("×2     node=node-1  cool: 'severity' is ''")
    assert taken.endswith("node=node-1  cool: started (run abcdef12)")
    assert asked[0] == {"label": ["node=node-1"], "reacted": "false", "since": "1d", "limit": 50}


def test_all_alerts_are_written_to_a_file_page_by_page(asked: list[dict[str, Any]]) -> None:
    """The format is JSON, or CSV with the server's own columns."""
    assert json.loads(run("--all", "--output", "json")) == [MISSED, TAKEN]
    assert [request["limit"] for request in asked] == [1000, 1000]
    rows = list(csv.DictReader(io.StringIO(run("--all", "--output", "csv"))))
    assert [json.loads(row["reactions"]) for row in rows] == [[], TAKEN["reactions"]]
    assert tuple(HeardAlertView.model_fields) == _COLUMNS


def test_a_label_without_a_value_is_rejected(asked: list[dict[str, Any]]) -> None:
    """The message shows the syntax."""
    done = CliRunner().invoke(main, ["alerts", "--label", "node"])
    assert (done.exit_code, asked) == (2, [])
    assert "'node' must be NAME=VALUE, such as job_name=llm-1" in done.output
