"""Searches that use the reader's scans."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.unit.agent.log_reading.reading import NODE, policy_of
from trainmedic.wire.log_layout import AttemptLogs
from trainmedic_agent.log_opening.node_files import FileFacts, NamedBy
from trainmedic_agent.log_opening.own_files import OwnFiles
from trainmedic_agent.log_reading import scan_units
from trainmedic_agent.log_reading.discovery import Discovery, Scan, SharedScan


def log_of(root: Path, job: str) -> Path:
    path = AttemptLogs.of(root, job, 1).launcher(NODE)
    path.parent.mkdir(parents=True)
    path.write_text("x\n")
    return path


def test_a_search_gets_a_scan_started_after_its_request() -> None:
    """A running scan may have passed a new file already."""
    shared, old, new, taken = SharedScan(), Scan((), {}, late=1), Scan((), {}, late=2), []
    assert not shared.begin()
    searching = threading.Thread(target=lambda: taken.append(shared.scan(lambda: False, 60.0)))
    searching.start()
    shared.pause(60.0)  # until the search waits
    shared.end(old)
    assert shared.begin()
    shared.end(new)
    searching.join(60)
    assert taken == [new]


def test_a_search_that_waits_too_long_reports_that_its_files_are_old() -> None:
    """An unresponsive file system delays the scan, but not the search."""
    shared = SharedScan()
    shared.begin()
    shared.end(Scan((), {}, late=3))
    assert shared.scan(lambda: False, 0.0) == Scan((), {}, late=3, is_stale=True)
    assert shared.scan(lambda: True, 60.0).is_stale


def test_a_scan_for_a_search_runs_before_it_is_due(tmp_path: Path) -> None:
    """A file created a moment ago is found."""
    reader = Discovery(policy_of(roots=[str(tmp_path)]), NODE)
    log_of(tmp_path, "llm-1")
    assert len(reader.scan((), lambda: False, 60.0).files) == 1
    (unit,) = reader._units[0].by_name.values()
    unit.due, unit.costs = time.monotonic() + 3600, (0.0, 0.0, 0.0)
    log_of(tmp_path / "llm-1", "attempt-2").rename(tmp_path / "llm-1" / "attempt-1" / f"ranks-{NODE}.log")
    (tmp_path / "llm-1" / "attempt-1" / f"launcher-{NODE}.log").rename(tmp_path / "moved")
    assert len(reader.scan((), lambda: False, 60.0).files) == 1
    assert reader.scan((), lambda: False, 60.0, is_asked=True).files == ()


class CountedFiles(OwnFiles):
    """The files of this process, with the number of names whose facts were asked for."""

    asked = 0

    def facts(self, path: str, names: Sequence[str], named_by: NamedBy | None = None) -> list[FileFacts | None]:
        self.asked += len(names)
        return super().facts(path, names, named_by)


def test_many_jobs_of_one_user_are_scanned_in_several_scans(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Work before another user's turn is limited by a count, and the longest-waiting jobs come first."""
    monkeypatch.setattr(scan_units, "MOST_DUE", 5)
    for number in range(12):
        log_of(tmp_path, f"many-{number}")
    files = CountedFiles()
    reader = Discovery(policy_of(roots=[str(tmp_path)]), NODE, files=files)
    found = [reader.scan((), lambda: False, 60.0) for _ in range(2)]
    assert [(len(scan.files), scan.late) for scan in found] == [(5, 7), (10, 2)]
    # Each scan asks for the facts of new directories, of the 5 that are looked at, and of the log in each.
    assert files.asked == 12 + 2 * (5 + 5)


def test_jobs_that_wait_for_their_users_budget_take_no_slots(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A user has used their time on slow directories. Another job of that user has its turn."""
    monkeypatch.setattr(scan_units, "MOST_DUE", 3)
    for number in range(5):
        log_of(tmp_path, f"slow-{number}")
    log_of(tmp_path, "quick")
    reader = Discovery(policy_of(roots=[str(tmp_path)]), NODE)
    for _ in range(2):
        reader.scan((), lambda: False, 60.0)
    units = reader._units[0].by_name
    for name, unit in units.items():
        unit.is_large, unit.due = name != "quick", 0.0 if name == "quick" else -1.0
    AttemptLogs.of(tmp_path, "quick", 1).launcher(NODE).unlink()
    reader.large._turns._users[units["quick"].owner.uid] = 2 * scan_units.USER_SECONDS
    assert len(reader.scan((), lambda: False, 60.0).files) == 5
    assert {name for name, unit in units.items() if unit.due > 0.0} == {"quick"}
