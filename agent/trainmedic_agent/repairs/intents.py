"""Readings taken and persisted before an act. A resumed command compares them with the present, so that it does not
act twice.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime

from trainmedic_agent.errors import CommandFailed, CommandRejected, CommandUnsupported
from trainmedic_agent.journal import KEPT_SECONDS, Journal

_TABLES = ("CREATE TABLE intents (command TEXT PRIMARY KEY, at REAL NOT NULL, reading TEXT NOT NULL) WITHOUT ROWID",)


@contextlib.contextmanager
def failing_if_begun(is_begun: bool) -> Iterator[None]:
    """Mark failures of a begun command with ``may_be_done``."""
    try:
        yield
    except (CommandRejected, CommandUnsupported, CommandFailed) as error:
        if not is_begun:
            raise
        raise CommandFailed(f"{error}; it may have been done before", {**error.output, "may_be_done": True}) from error


class IntentBook:
    """Every method raises JournalUnavailable; then nothing may be begun."""

    def __init__(self, journal: Journal) -> None:
        journal.install("intents", [_TABLES])
        self._journal = journal

    def find(self, command_id: str) -> Mapping[str, str] | None:
        """Return the reading of an interrupted attempt. None if it has not begun, or long ago."""
        rows = self._journal.rows("SELECT reading FROM intents WHERE command = ?", (command_id,))
        if not rows:
            return None
        reading: Mapping[str, str] = json.loads(rows[0][0])
        return reading

    def kept_at(self, command_id: str) -> datetime | None:
        rows = self._journal.rows("SELECT at FROM intents WHERE command = ?", (command_id,))
        return datetime.fromtimestamp(rows[0][0], UTC) if rows else None

    def keep(self, command_id: str, reading: Mapping[str, str], now: datetime) -> None:
        """Persist a reading, and delete those older than `KEPT_SECONDS`."""
        with self._journal.transaction() as connection:
            connection.execute("DELETE FROM intents WHERE at < ?", (now.timestamp() - KEPT_SECONDS,))
            values = (command_id, now.timestamp(), json.dumps(dict(reading)))
            connection.execute("INSERT OR REPLACE INTO intents VALUES (?, ?, ?)", values)
