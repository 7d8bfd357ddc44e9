"""Journal of commands, which survives restarts of agent and Redis.

A command, unless its executor `OnlyReads`, is written before it is executed, and its outcome afterwards. On
`JournalUnavailable` the caller must not act: the agent could execute a command twice.
"""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Sequence
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

from trainmedic.wire import envelope
from trainmedic.wire.command_book import REVOKED, CommandRecord
from trainmedic_agent.database import AgentDatabase

KEPT_SECONDS = 30 * 24 * 3600.0  # seconds; an undo may arrive days later
KEPT_ENTRIES = 50_000  # about 20 MB

_TABLES = (
    """CREATE TABLE commands (
        id TEXT PRIMARY KEY,
        status TEXT NOT NULL,
        at REAL NOT NULL,
        output TEXT NOT NULL,
        envelope BLOB,
        is_sent INTEGER NOT NULL
    ) WITHOUT ROWID""",
    "CREATE INDEX commands_unsent ON commands (at) WHERE is_sent = 0",
    "CREATE INDEX commands_open ON commands (at) WHERE status = 'accepted'",
    "CREATE INDEX commands_at ON commands (at)",
)


# A separate part, so that an earlier release's agent can use the same file. A journal older than this part counts as
# complete since its oldest command.
_MEMORY_TABLES = (
    "CREATE TABLE memory (id INTEGER PRIMARY KEY CHECK (id = 1), whole_since REAL NOT NULL)",
    """INSERT INTO memory SELECT 1, COALESCE(
        (SELECT MIN(at) FROM commands), (julianday('now') - 2440587.5) * 86400.0
    )""",
)


class Journal(AgentDatabase):
    """Methods raise JournalUnavailable."""

    def __init__(self, directory: Path) -> None:
        super().__init__(directory)
        try:
            self.install("commands", [_TABLES])
            self.install("memory", [_MEMORY_TABLES])
        except BaseException:
            self.close()
            raise

    def whole_since(self) -> datetime:
        """Return since when the journal has all received commands."""
        ((since,),) = self.rows("SELECT whole_since FROM memory")
        return datetime.fromtimestamp(since, UTC)

    def look_up(self, command_id: str) -> CommandRecord | None:
        rows = self.rows("SELECT status, at, output FROM commands WHERE id = ?", (command_id,))
        return _record(*rows[0]) if rows else None

    def claim(self, command: envelope.Command, now: datetime) -> CommandRecord | None:
        """Add a command and return None, or return its record. An expired command is added again."""

        def enter(connection: sqlite3.Connection) -> CommandRecord | None:
            record = self.look_up(command.id)
            if record is not None and record.status != envelope.EXPIRED:
                return record
            # 1: there is no outcome to send yet.
            values = (command.id, envelope.ACCEPTED, now.timestamp(), "{}", command.encode(), 1)
            connection.execute("INSERT OR REPLACE INTO commands VALUES (?, ?, ?, ?, ?, ?)", values)
            return None

        return self.write(enter)

    def record_outcome(self, command_id: str, outcome: CommandRecord) -> None:
        self._put(command_id, outcome, is_sent=False)

    def revoke(self, command_id: str, now: datetime) -> None:
        """Reject a never-applied command, because its undo came first."""
        self._put(command_id, replace(REVOKED, at=now), is_sent=True)

    def open_commands(self) -> list[envelope.Command]:
        rows = self.rows("SELECT envelope FROM commands WHERE status = 'accepted' ORDER BY at, id")
        return [envelope.Command.decode(raw) for (raw,) in rows]

    def unsent(self, most: int) -> list[tuple[str, CommandRecord]]:
        rows = self.rows(
            "SELECT id, status, at, output FROM commands WHERE is_sent = 0 ORDER BY at, id LIMIT ?", (most,)
        )
        return [(command_id, _record(*record)) for command_id, *record in rows]

    def mark_sent(self, command_ids: Sequence[str]) -> None:
        """A lost mark only repeats the replies."""
        ids = [(command_id,) for command_id in command_ids]
        self.write(lambda connection: connection.executemany("UPDATE commands SET is_sent = 1 WHERE id = ?", ids))

    def newest_at(self) -> datetime | None:
        ((at,),) = self.rows("SELECT max(at) FROM commands")
        return datetime.fromtimestamp(at, UTC) if at is not None else None

    def prune(self, now: datetime) -> int:
        """Delete old commands, except open ones and unsent replies; return the number deleted."""
        beyond = "SELECT at FROM commands ORDER BY at DESC LIMIT 1 OFFSET ?"
        with self.transaction() as connection:
            ((latest,),) = connection.execute(
                f"SELECT MAX(?, COALESCE(({beyond}), 0))",
                (now.timestamp() - KEPT_SECONDS, KEPT_ENTRIES),
            )
            forgotten = connection.execute(
                "DELETE FROM commands WHERE at <= ? AND status != 'accepted' AND is_sent = 1", (latest,)
            ).rowcount
            if forgotten:
                connection.execute("UPDATE memory SET whole_since = MAX(whole_since, ?)", (latest,))
        return forgotten

    def _put(self, command_id: str, record: CommandRecord, is_sent: bool) -> None:
        values = (command_id, record.status, record.at.timestamp(), json.dumps(dict(record.output)), None, int(is_sent))
        self.write(
            lambda connection: connection.execute("INSERT OR REPLACE INTO commands VALUES (?, ?, ?, ?, ?, ?)", values)
        )


def _record(status: str, at: float, output: str) -> CommandRecord:
    return CommandRecord(status, json.loads(output), at=datetime.fromtimestamp(at, UTC))
