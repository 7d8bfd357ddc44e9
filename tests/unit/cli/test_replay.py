"""``trainmedic playbook replay``, without a server."""

from __future__ import annotations

import json
from collections.abc import Mapping
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from trainmedic_core.command import main
from trainmedic_server.cli.client import Client

PLAYBOOK = """
playbook: watch
on: {alert: NodeSick}
target: node
guards: {max_runs: {count: 1, per: 7d}}
steps:
  - {wait_for: resolved, timeout: 1h}
"""
ALERT: dict[str, Any] = {
    "labels": {"alertname": "NodeSick", "node": "n1"},
    "fingerprint": "f1",
    "starts_at": "2026-01-31T12:00:00Z",
    "first_heard": "2026-01-31T12:00:30Z",
    "last_heard": "2026-01-31T12:00:30Z",
    "count": 1,
    "reactions": [{"playbook": "watch", "decision": "cooldown", "run_id": "r1"}],
}


@pytest.fixture
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working directory with a playbook and two alerts."""
    monkeypatch.chdir(tmp_path)
    Path("playbooks").mkdir()
    Path("playbooks/watch.yaml").write_text(PLAYBOOK)
    later = ALERT | {"fingerprint": "f2", "first_heard": "2026-01-31T13:00:30Z", "starts_at": "2026-01-31T13:00:00Z"}
    Path("alerts.json").write_text(f"{json.dumps(ALERT)}\n{json.dumps(later)}\n")
    return tmp_path


def run(*words: str, code: int = 0) -> Result:
    done = CliRunner().invoke(main, ["playbook", "replay", *words], env={"COLUMNS": "240"})
    assert done.exit_code == code, done.output
    return done


def test_text_and_json_output_agree(files: Path) -> None:
    """Both list decisions then and now by playbook, and the differences."""
    document = json.loads(run("--from", "alerts.json", "--output", "json").stdout)
    (compared,) = document["playbooks"]
    assert (compared["then"], compared["now"]) == ({"cooldown": 2}, {"joined or rate_limited": 1, "started": 1})
    assert (compared["same"], compared["different"], compared["not_known"]) == (0, 2, 0)
    text = run("--from", "alerts.json").stdout
    assert "2 alerts from 2026-01-31T12:00:30" in text
    assert "cooldown 2" in text
    assert "joined or too many lately 1, started 1" in text
    assert "it depends on whether an earlier run started, or when it ended" in text
    assert "1 more kinds of differences" in run("--from", "alerts.json", "--limit", "1").stdout


def test_bad_lines_are_reported_and_exit_with_1(files: Path) -> None:
    """The other lines are replayed."""
    Path("bad.json").write_text('{"count": 1}\n' * 30)
    done = run("--from", "bad.json", "--from", "alerts.json", code=1)
    assert "2 alerts from" in done.stdout
    assert "bad.json:1:1: is not one alert or run" in done.stderr
    assert "bad.json:21:" not in done.stderr
    assert "30 lines could not be read" in done.stderr


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (("--from", "none.json"), "none.json: cannot be read"),
        (("--from", "alerts.json", "--playbooks", "none"), "No playbook was loaded"),
        (("--from", "alerts.json", "--breaker-closes-after", "soon"), "'soon' is not a duration"),
        (("--from", "alerts.json", "--max-age", "1001y"), "365365d is too long; write at most 365000d"),
        (("--from", "alerts.json", "--since", "9999y"), "--since: '9999y' must be an RFC 3339 time"),
        (("--from", "alerts.json", "--inventory", "none"), "--inventory: cannot read none: No such file"),
        ((), "--from"),
    ],
)
def test_wrong_flags_exit_with_2(files: Path, words: tuple[str, ...], told: str) -> None:
    """The error states what is wrong."""
    assert told in run(*words, code=2).stderr


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, Mapping[str, Any]]]:
    """What a server with one alert on two pages of lists is asked."""
    requests: list[tuple[str, Mapping[str, Any]]] = []

    def get(self: Client, path: str, params: Mapping[str, Any]) -> dict[str, Any]:
        requests.append((path, params))
        heard = datetime.now().astimezone() - timedelta(days=1)
        alert = ALERT | {name: heard.isoformat() for name in ("starts_at", "first_heard", "last_heard")}
        return {"items": [alert] if path == "alerts" else [], "next": None}

    monkeypatch.setattr(Client, "get", get)
    return requests


def test_the_history_is_read_from_one_guard_period_before(
    files: Path, asked: list[tuple[str, Mapping[str, Any]]]
) -> None:
    """Runs of the week before count in its limit. Without --since thirty days are read."""
    document = json.loads(run("--from", "history", "--output", "json").stdout)
    assert document["playbooks"][0]["now"] == {"started": 1}
    (runs, earlier), (alerts, since) = asked
    assert (runs, alerts) == ("history", "alerts")
    begins = datetime.fromisoformat(since["since"])
    assert begins - datetime.fromisoformat(earlier["since"]) == timedelta(days=7)
    assert timedelta(days=29) < datetime.now().astimezone() - begins < timedelta(days=31)
    assert run("--from", "history", "--since", "1h").stdout == "No alert was recorded in this time.\n"


def test_a_guard_period_of_thousands_of_years_begins_in_1970(
    files: Path, asked: list[tuple[str, Mapping[str, Any]]]
) -> None:
    (files / "playbooks/watch.yaml").write_text(PLAYBOOK.replace("7d", "3000y"))
    run("--from", "history")
    assert asked[0][1]["since"].startswith("1970-01-01")


def test_an_item_of_another_release_is_an_error(files: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The error names the member that does not fit."""
    monkeypatch.setattr(Client, "get", lambda *_: {"items": [{"first_heard": 1}], "next": None})
    assert "cannot be read" in run("--from", "history", code=1).stderr
