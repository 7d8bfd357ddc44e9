"""The node's record of values and results, in the agent's database."""

from __future__ import annotations

import contextlib
import sqlite3
from collections.abc import Mapping
from pathlib import Path
from urllib.parse import quote

import msgspec

from trainmedic_agent.errors import JournalUnavailable
from trainmedic_agent.health.baseline import Histories, ValueHistory
from trainmedic_agent.health.checks import HealthReport, Level
from trainmedic_agent.journal import Journal

MOST_VALUES = 2000  # About 2 MB. The oldest ones are deleted.
_BUSY_SECONDS = 5.0  # wait for the agent's locks

_TABLES = (
    "CREATE TABLE health_values (value TEXT PRIMARY KEY, history TEXT NOT NULL) WITHOUT ROWID",
    "CREATE TABLE health_results (level TEXT PRIMARY KEY, result TEXT NOT NULL) WITHOUT ROWID",
)
_VALUES = "SELECT value, history FROM health_values"


class HealthRecord:
    """`histories` and `results` (by level) are replaced, never changed, so other threads may read them."""

    def __init__(self, journal: Journal) -> None:
        """Raises JournalUnavailable, ConfigurationError if a newer agent has written the record."""
        journal.install("health", [_TABLES])
        self._journal = journal
        self.histories: Histories = _histories(journal.rows(_VALUES))
        rows = journal.rows("SELECT result FROM health_results")
        results = [msgspec.json.decode(result, type=HealthReport) for (result,) in rows]
        self.results: Mapping[Level, HealthReport] = {result.level: result for result in results}

    def add(self, report: HealthReport, changed: Histories) -> None:
        """Record a result. A quick one is stored only if values changed. Raises JournalUnavailable."""
        self.results = {**self.results, report.level: report}
        if not changed and report.level is Level.QUICK:
            return
        merged = {**self.histories, **changed}
        newest_first = sorted(merged, key=lambda key: merged[key].changed_at, reverse=True)
        removed = set(newest_first[MOST_VALUES:])

        def write(connection: sqlite3.Connection) -> None:
            texts = [(key, msgspec.json.encode(history).decode()) for key, history in changed.items()]
            connection.executemany("INSERT OR REPLACE INTO health_values VALUES (?, ?)", texts)
            connection.executemany("DELETE FROM health_values WHERE value = ?", [(key,) for key in removed])
            result = (str(report.level), msgspec.json.encode(report).decode())
            connection.execute("INSERT OR REPLACE INTO health_results VALUES (?, ?)", result)

        self._journal.write(write)
        self.histories = {key: history for key, history in merged.items() if key not in removed}

    def forget(self, part: str) -> bool:
        """Delete the values of a part. Return False if there are none. Raises JournalUnavailable."""
        keys = [key for key in self.histories if key.partition(" ")[2] == part]
        self._journal.write(
            lambda connection: connection.executemany(
                "DELETE FROM health_values WHERE value = ?", [(key,) for key in keys]
            )
        )
        self.histories = {key: history for key, history in self.histories.items() if key not in keys}
        return bool(keys)


def recorded_values(directory: Path) -> Histories:
    """Return the values of an agent that may be running, none without a record. Raises JournalUnavailable."""
    file = directory / "agent.db"
    if not file.exists():
        return {}
    try:
        with contextlib.closing(
            sqlite3.connect(f"file:{quote(str(file))}?mode=ro", uri=True, timeout=_BUSY_SECONDS)
        ) as database:
            if not database.execute("SELECT 1 FROM sqlite_master WHERE name = 'health_values'").fetchone():
                return {}
            return _histories(database.execute(_VALUES).fetchall())
    except sqlite3.Error as error:
        raise JournalUnavailable(f"the agent's record {file} cannot be read: {error}") from error


def _histories(rows: list[tuple[str, str]]) -> Histories:
    return {key: msgspec.json.decode(history, type=ValueHistory) for key, history in rows}
