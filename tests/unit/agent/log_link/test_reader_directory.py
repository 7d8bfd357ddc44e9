"""The reader's directory, and the rows of an agent that read logs itself."""

from __future__ import annotations

import json
import os
from contextlib import closing
from datetime import UTC, datetime
from pathlib import Path

import pytest

from tests.support.findings import of_training
from trainmedic_agent.database import AgentDatabase
from trainmedic_agent.journal import Journal
from trainmedic_agent.log_link import reader_directory
from trainmedic_agent.log_link.reader_process import ReaderUser
from trainmedic_agent.log_reading.arrivals import ArrivalIndex
from trainmedic_agent.log_reading.log_counters import LogCounters
from trainmedic_agent.log_reading.log_store import LogStore, NodeBoot, OutgoingFinding
from trainmedic_agent.log_shipping.ship_positions import ShipPositions
from trainmedic_logs.lines.tracker import TrackerChanges

OWN = ReaderUser(os.geteuid(), os.getegid())
NOW = datetime(2026, 1, 1, tzinfo=UTC)
BOOT = NodeBoot("n1", "boot-1", NOW)


def commit(store: LogStore, mark: int) -> None:
    """Write one finding down, and how far its file is read."""
    finding = of_training("cuda-oom", "n1", "llm-1", mark, NOW)
    changes = TrackerChanges({1: json.dumps({"mark": mark})})
    store.commit({"file": {"offset": mark}}, changes, [OutgoingFinding(finding)], NOW)


def old_state(directory: Path) -> LogStore:
    """What an agent that read logs itself has left in its journal; it is closed again."""
    with closing(Journal(directory)) as journal:
        store = LogStore(journal, BOOT, LogCounters())
        ArrivalIndex(journal)
        ShipPositions(journal)
        for mark in (1, 2, 3):
            commit(store, mark)
        store.number_next(3)
        store.delete_sent([1])
        store.keep_rules(NOW, b"rules")
    return store


def prepared(directory: Path) -> None:
    """What an agent of this release does at its start."""
    with closing(Journal(directory)) as journal:
        reader_directory.prepare(directory, journal, OWN)


def test_the_rows_of_an_older_agent_are_moved(tmp_path: Path) -> None:
    """Positions, waiting findings, the instance and the numbers continue, so nothing is lost or repeated."""
    old_state(tmp_path)
    prepared(tmp_path)
    with closing(AgentDatabase(tmp_path / reader_directory.NAME)) as database:
        store = LogStore(database, BOOT, LogCounters())
        assert store.positions() == {"file": {"offset": 3}}
        assert store.tracker() == {1: {"mark": 3}}
        assert store.rules() == (NOW, b"rules")
        assert [number for number, _ in store.number_next(10)] == [2, 3]
        commit(store, 4)
        assert [number for number, _ in store.number_next(10)] == [2, 3, 4]
        assert not store.is_new
        ArrivalIndex(database)
        ShipPositions(database)


def test_finding_numbers_continue_after_all_were_sent(tmp_path: Path) -> None:
    """The server treats a known number as a repetition."""
    with closing(Journal(tmp_path)) as journal:
        store = LogStore(journal, BOOT, LogCounters())
        commit(store, 1)
        commit(store, 2)
        store.number_next(2)
        store.delete_sent([1, 2])
    prepared(tmp_path)
    with closing(AgentDatabase(tmp_path / reader_directory.NAME)) as database:
        store = LogStore(database, BOOT, LogCounters())
        commit(store, 3)
        assert [number for number, _ in store.number_next(10)] == [3]


def test_the_rows_are_moved_once(tmp_path: Path) -> None:
    """The journal no longer has them, and the reader's later data stays."""
    old_state(tmp_path)
    prepared(tmp_path)
    with closing(Journal(tmp_path)) as journal:
        names = {name for (name,) in journal.rows("SELECT name FROM sqlite_master")}
        assert not {name for name in names if name.startswith(("log_", "ship_"))}
        assert journal.rows("SELECT name FROM parts WHERE name GLOB 'log_*'") == []
    with closing(AgentDatabase(tmp_path / reader_directory.NAME)) as database:
        commit(LogStore(database, BOOT, LogCounters()), 4)
    prepared(tmp_path)
    with closing(AgentDatabase(tmp_path / reader_directory.NAME)) as database:
        assert LogStore(database, BOOT, LogCounters()).positions() == {"file": {"offset": 4}}


def test_an_interrupted_move_starts_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The journal keeps the rows until the directory has its final name."""
    old_state(tmp_path)

    def killed(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(reader_directory, "_give", killed)
        with pytest.raises(KeyboardInterrupt):
            prepared(tmp_path)
    prepared(tmp_path)
    with closing(AgentDatabase(tmp_path / reader_directory.NAME)) as database:
        assert LogStore(database, BOOT, LogCounters()).positions() == {"file": {"offset": 3}}


def test_a_first_start_creates_an_empty_directory(tmp_path: Path) -> None:
    """Without rows to move, the reader starts as on a new node."""
    prepared(tmp_path)
    with closing(AgentDatabase(tmp_path / reader_directory.NAME)) as database:
        assert LogStore(database, BOOT, LogCounters()).is_new


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a directory to somebody else")
def test_the_directory_changes_owner_with_the_configured_user(tmp_path: Path) -> None:
    """A link put there by the previous user is not handed over."""
    prepared(tmp_path)
    directory = tmp_path / reader_directory.NAME
    (tmp_path / "of-root").write_text("x")
    (directory / "link").symlink_to(tmp_path / "of-root")
    (directory / "second").hardlink_to(tmp_path / "of-root")
    with closing(Journal(tmp_path)) as journal:
        reader_directory.prepare(tmp_path, journal, ReaderUser(20_005, 20_005))
    owners = {path.name: path.stat().st_uid for path in (directory, directory / "agent.db", tmp_path / "of-root")}
    assert owners == {"reader": 20_005, "agent.db": 20_005, "of-root": 0}
