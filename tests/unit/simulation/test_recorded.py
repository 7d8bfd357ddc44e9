"""Files of recorded alerts and runs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from trainmedic_core.problems import FileProblem
from trainmedic_server.api import examples
from trainmedic_server.errors import ConfigurationError
from trainmedic_server.simulation import recorded
from trainmedic_server.simulation.recorded import RecordedAlert, RecordedRun

ALERT: dict[str, Any] = {
    "labels": {"alertname": "Hot"},
    "fingerprint": "f",
    "starts_at": "2026-01-31T12:00:00Z",
    "first_heard": "2026-01-31T12:00:30Z",
    "last_heard": "2026-01-31T12:00:30Z",
    "count": 1,
}


def read(path: Path, text: str) -> list[recorded.Recorded | FileProblem]:
    path.write_text(text)
    return list(recorded.read_file(path))


def test_both_exports_can_be_read(tmp_path: Path) -> None:
    """NDJSON of the API, and the array that the command line writes with one item on a line."""
    alert, run = json.dumps(ALERT), json.dumps(examples.ITEM)
    for text in (f"{alert}\n{run}\n", f"[\n{alert},\n{run}\n]\n", f"{alert}\n\n{run}"):
        first, second = read(tmp_path / "items", text)
        assert isinstance(first, RecordedAlert)
        assert isinstance(second, RecordedRun)
        assert (first.fingerprint, second.run_id, second.version) == ("f", examples.ITEM["run_id"], "9f2c1d7e0b34")


def test_a_label_may_be_named_like_a_member(tmp_path: Path) -> None:
    """A run whose alert has the label ``first_heard`` is a run."""
    (item,) = read(tmp_path / "items", json.dumps(examples.ITEM | {"alert_labels": {"first_heard": "x"}}))
    assert isinstance(item, RecordedRun)


@pytest.mark.parametrize(
    ("line", "told"),
    [
        ("nonsense", "is not one alert or run of the history"),
        (json.dumps({**ALERT, "count": "three"}), "count"),
        (json.dumps({**ALERT, "count": 10**30}), "count"),
        (json.dumps({**examples.ITEM, "duration_ms": 10**18}), "duration_ms"),
        (json.dumps({**ALERT, "first_heard": "2026-01-31T12:00:30"}), "first_heard"),
        (json.dumps({"playbook": "cap"}), "run_id"),
        ('{"items": [], "next": null}', "is a page of the API; export with"),
    ],
)
def test_a_bad_line_is_told_with_its_place_and_the_others_are_read(tmp_path: Path, line: str, told: str) -> None:
    """File, line, member; a time needs its zone."""
    path = tmp_path / "alerts.json"
    problem, item = read(path, f"{line}\n{json.dumps(ALERT)}\n")
    assert isinstance(problem, FileProblem)
    assert (problem.file, problem.line) == (str(path), 1)
    assert told in problem.message
    assert isinstance(item, RecordedAlert)


def test_a_line_without_an_end_is_not_read_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """So that the memory is bounded."""
    monkeypatch.setattr(recorded, "LONGEST_LINE", 100)
    (problem,) = read(tmp_path / "items", "x" * 1000)
    assert isinstance(problem, FileProblem)
    assert "stopped" in problem.message
    longest, _ = read(tmp_path / "items", "x" * 99 + "\nx")
    assert isinstance(longest, FileProblem)
    assert "stopped" not in longest.message


def test_a_file_that_is_not_there_is_a_wrong_flag(tmp_path: Path) -> None:
    """With its name."""
    with pytest.raises(ConfigurationError, match="none"):
        list(recorded.read_file(tmp_path / "none"))
