"""The agent's journal: what it remembers, and what it refuses."""

from __future__ import annotations

import sqlite3
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from tests.support.messages import make_command
from trainmedic.wire import envelope
from trainmedic.wire.command_book import CommandRecord
from trainmedic_agent import journal as journals
from trainmedic_agent.errors import JournalUnavailable
from trainmedic_agent.journal import Journal
from trainmedic_agent.reserved_space import PIECE, PIECES
from trainmedic_server.errors import ConfigurationError

NOW = datetime(2026, 1, 31, 12, 0, tzinfo=UTC)


def cap_command(command_id: str) -> envelope.Command:
    """A command of which the journal keeps every field."""
    return make_command(
        "gpu.power_limit",
        id=command_id,
        target={"kind": "gpu", "node": "n1", "gpu": "GPU-1"},
        params={"percent": 80},
        issued_at=NOW,
        expires_at=NOW + timedelta(seconds=30),
        undo_of="earlier",
    )


def reopened(journal: Journal, directory: Path) -> Journal:
    journal.close()
    return Journal(directory)


def test_a_command_is_accepted_once(journal: Journal) -> None:
    """The second acceptance of an id returns the outcome of the first."""
    assert journal.claim(cap_command("c1"), NOW) is None
    assert journal.claim(cap_command("c1"), NOW) == CommandRecord(envelope.ACCEPTED)
    ended_at = NOW + timedelta(seconds=1)
    journal.record_outcome("c1", CommandRecord(envelope.APPLIED, {"watts": 320}, at=ended_at))
    known = journal.claim(cap_command("c1"), NOW)
    assert known == CommandRecord(envelope.APPLIED, {"watts": 320})
    assert known.at == ended_at


def test_accepted_commands_are_found_again_after_a_restart(journal: Journal, tmp_path: Path) -> None:
    """Unfinished commands are returned complete, oldest first."""
    journal.claim(cap_command("c2"), NOW + timedelta(seconds=1))
    journal.claim(cap_command("c1"), NOW + timedelta(seconds=2))
    journal.claim(cap_command("c0"), NOW)
    journal.record_outcome("c0", CommandRecord(envelope.APPLIED, at=NOW))
    again = reopened(journal, tmp_path)
    assert again.open_commands() == [cap_command("c2"), cap_command("c1")]
    again.close()


def test_a_reply_waits_until_it_was_sent(journal: Journal, tmp_path: Path) -> None:
    """Outcomes are unsent, over a restart too, until they are marked as sent."""
    journal.claim(cap_command("c1"), NOW)
    assert journal.unsent(10) == []
    journal.record_outcome("c1", CommandRecord(envelope.FAILED, {"reason": "lost"}, at=NOW))
    again = reopened(journal, tmp_path)
    assert again.unsent(10) == [("c1", CommandRecord(envelope.FAILED, {"reason": "lost"}))]
    again.mark_sent(["c1"])
    assert again.unsent(10) == []
    again.close()


def test_a_revoked_command_is_never_accepted(journal: Journal) -> None:
    """An early undo blocks its command, and no unrequested reply is sent about it."""
    journal.revoke("c1", NOW)
    known = journal.claim(cap_command("c1"), NOW)
    assert known is not None
    assert known.status == envelope.REJECTED
    assert journal.unsent(10) == []


def test_an_expired_command_can_be_sent_again(journal: Journal) -> None:
    """It was never applied, and the server may send it once more with more time; the old answer is void then."""
    journal.claim(cap_command("c1"), NOW)
    journal.record_outcome("c1", CommandRecord(envelope.EXPIRED, at=NOW))
    assert journal.claim(cap_command("c1"), NOW) is None
    assert journal.unsent(10) == []


def test_old_outcomes_are_pruned_and_nothing_else(journal: Journal, monkeypatch: pytest.MonkeyPatch) -> None:
    """Open commands and unsent outcomes are never forgotten."""
    journal.claim(cap_command("open"), NOW)
    for name in ("unsent", "old", "new"):
        journal.claim(cap_command(name), NOW)
        at = NOW + timedelta(days=20 if name == "new" else 0)
        journal.record_outcome(name, CommandRecord(envelope.APPLIED, at=at))
    journal.mark_sent(["old", "new"])
    assert journal.prune(NOW + timedelta(days=31)) == 1
    assert journal.look_up("old") is None
    monkeypatch.setattr(journals, "KEPT_ENTRIES", 0)
    assert journal.prune(NOW + timedelta(days=31)) == 1
    assert journal.look_up("open")
    assert journal.look_up("unsent")


def test_a_transaction_that_raises_changes_nothing(journal: Journal) -> None:
    """Tables of other parts are changed wholly or not at all."""
    journal.install("power", [["CREATE TABLE caps (gpu TEXT)"]])

    def fail_within() -> None:
        with journal.transaction() as connection:
            connection.execute("INSERT INTO caps VALUES ('GPU-1')")
            raise FileNotFoundError("of somebody else")

    with pytest.raises(FileNotFoundError, match="of somebody else"):
        fail_within()
    with journal.transaction() as connection:
        assert connection.execute("SELECT * FROM caps").fetchall() == []


def test_a_schema_part_is_migrated_once(journal: Journal, tmp_path: Path) -> None:
    """Each version's statements run once, over restarts too."""
    first = ["CREATE TABLE caps (gpu TEXT)"]
    journal.install("power", [first])
    again = reopened(journal, tmp_path)
    again.install("power", [first, ["ALTER TABLE caps ADD COLUMN watts REAL"]])
    with again.transaction() as connection:
        connection.execute("INSERT INTO caps VALUES ('GPU-1', 300.0)")
    with pytest.raises(ConfigurationError, match="newer agent"):
        again.install("power", [first])
    again.close()


def test_the_log_stays_within_a_part_of_the_reserve(journal: Journal, tmp_path: Path) -> None:
    """On a full disk, it may grow only by the reserve, so it is reused from its start."""
    for number in range(200):
        journal.claim(cap_command(f"c{number}"), NOW)
        journal.record_outcome(f"c{number}", CommandRecord(envelope.APPLIED, at=NOW))
    assert (tmp_path / "agent.db-wal").stat().st_size < PIECES * PIECE / 2


def test_opening_a_journal_again_writes_nothing(journal: Journal, tmp_path: Path) -> None:
    """An agent with a full disk and a used-up reserve still starts, and ends expired effects."""
    again = reopened(journal, tmp_path)
    with again.transaction() as connection:
        assert connection.total_changes == 0
    again.close()


def test_two_agents_never_share_a_state_directory(journal: Journal, tmp_path: Path) -> None:
    """The error of the second one names the directory and the remedy."""
    with pytest.raises(ConfigurationError, match=r"another agent.*--state-dir"):
        Journal(tmp_path)


def test_a_file_that_is_not_a_journal_is_named(tmp_path: Path) -> None:
    """The error says which file it is about."""
    (tmp_path / "agent.db").write_text("not a database, " * 100)
    with pytest.raises(JournalUnavailable, match=r"agent\.db"):
        Journal(tmp_path)


def test_an_unwritable_journal_is_reported(journal: Journal) -> None:
    """Every SQLite error becomes one error of the agent."""
    journal._connection.execute("PRAGMA query_only = ON")
    with pytest.raises(JournalUnavailable, match="read-only") as caught:
        journal.claim(cap_command("c1"), NOW)
    assert isinstance(caught.value.__cause__, sqlite3.Error)


@pytest.mark.parametrize("is_replaced", [False, True])
def test_a_deleted_journal_accepts_nothing(journal: Journal, tmp_path: Path, is_replaced: bool) -> None:
    """SQLite goes on with a file that has no name any more, and all that is written there is lost. Put back, it is used
    again."""
    directory = tmp_path.rename(tmp_path.with_name("gone"))
    if is_replaced:
        tmp_path.mkdir()
        (tmp_path / "agent.db").touch()
    with pytest.raises(JournalUnavailable, match=r"agent\.db was moved or removed.*put it back"):
        journal.claim(cap_command("c1"), NOW)
    if is_replaced:
        (tmp_path / "agent.db").unlink()
        tmp_path.rmdir()
    directory.rename(tmp_path)
    assert journal.claim(cap_command("c1"), NOW) is None


def test_an_unusable_directory_is_named(tmp_path: Path) -> None:
    """The error names the directory, and the setting for another one."""
    (tmp_path / "file").touch()
    with pytest.raises(JournalUnavailable, match=r"file.*--state-dir"):
        Journal(tmp_path / "file")


def test_only_its_owner_can_read_the_journal(journal: Journal, tmp_path: Path) -> None:
    """Outputs name files and processes of the node."""
    assert (tmp_path / "agent.db").stat().st_mode & 0o077 == 0


def test_no_other_user_can_hold_the_lock(tmp_path: Path) -> None:
    """A lock file that an earlier agent left open to all counts too: any opener could lock the agent out."""
    (tmp_path / "agent.lock").touch(0o644)
    Journal(tmp_path).close()
    assert (tmp_path / "agent.lock").stat().st_mode & 0o777 == 0o600


def test_a_journal_is_complete_since_its_creation_or_the_newest_entry_it_forgot(
    journal: Journal, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """This holds over restarts too. It decides whether an undo of an unknown command is certain."""
    made_at = journal.whole_since()
    assert abs(made_at - datetime.now(UTC)) < timedelta(minutes=1)
    journal.claim(cap_command("c1"), made_at + timedelta(days=1))
    journal.record_outcome("c1", CommandRecord(envelope.APPLIED, at=made_at + timedelta(days=1)))
    journal.mark_sent(["c1"])
    assert journal.prune(made_at + timedelta(days=2)) == 0
    again = reopened(journal, tmp_path)
    assert again.whole_since() == made_at
    assert again.prune(made_at + timedelta(days=40)) == 1
    assert abs(again.whole_since() - (made_at + timedelta(days=10))) < timedelta(seconds=1)
    again.claim(cap_command("c2"), made_at + timedelta(days=41))
    again.record_outcome("c2", CommandRecord(envelope.APPLIED, at=made_at + timedelta(days=41)))
    again.mark_sent(["c2"])
    monkeypatch.setattr(journals, "KEPT_ENTRIES", 0)
    assert again.prune(made_at + timedelta(days=42)) == 1
    assert abs(again.whole_since() - (made_at + timedelta(days=41))) < timedelta(seconds=1)
    again.close()


def test_an_earlier_releases_journal_is_complete_since_its_oldest_command(tmp_path: Path) -> None:
    """It may have been recreated right before that."""
    before = Journal(tmp_path)
    before.claim(cap_command("c1"), NOW)
    before.claim(cap_command("c2"), NOW + timedelta(days=1))
    with before.transaction() as connection:
        connection.execute("DROP TABLE memory")
        connection.execute("DELETE FROM parts WHERE name = 'memory'")
    again = reopened(before, tmp_path)
    assert again.whole_since() == NOW
    again.close()
