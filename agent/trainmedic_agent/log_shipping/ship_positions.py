from __future__ import annotations

import json
import logging
from collections.abc import Iterable, Mapping
from datetime import datetime
from typing import Any, Protocol

from trainmedic_agent.database import AgentDatabase
from trainmedic_agent.errors import JournalUnavailable

log = logging.getLogger(__name__)

_TABLES = (
    "CREATE TABLE ship_positions (stream TEXT PRIMARY KEY, at REAL NOT NULL, position TEXT NOT NULL) WITHOUT ROWID",
)


class ShippedSource(Protocol):
    @property
    def key(self) -> str: ...

    def place_json(self) -> Mapping[str, Any]:
        """Return the place to resume reading after a restart. Raises OSError."""
        ...

    def state(self) -> Mapping[str, Any]: ...


class ShipPositions:
    """Positions stored by `settle`. Not thread-safe."""

    can_take = True

    def __init__(self, journal: AgentDatabase) -> None:
        """Raises JournalUnavailable."""
        journal.install("log_shipping", [_TABLES])
        self._journal = journal
        self._written = self._rows()
        self._forgotten: set[str] = set()
        self.is_first = not self._written
        self.has_begun = False

    def kept(self) -> Mapping[str, Any]:
        return {key: json.loads(text) for key, text in self._written.items()}

    def begin(self) -> None:
        self.has_begun = True

    def forget(self, key: str) -> None:
        self._forgotten.add(key)

    def hurry(self) -> None:
        """Do nothing between two files."""

    def settle(self, sources: Iterable[ShippedSource], now: datetime) -> None:
        """Store changes in one transaction. After a failure, a restart ships more lines again."""
        texts: dict[str, str] = {}
        for source in sources:
            try:
                place = source.place_json()
            except OSError:
                continue  # file system gone; the old position stays
            texts[source.key] = json.dumps({"place": place, "stream": source.state()})
        self.has_begun = False
        changed = {key: text for key, text in texts.items() if self._written.get(key) != text}
        gone = self._forgotten - texts.keys()
        if not changed and not gone & self._written.keys():
            return
        try:
            with self._journal.transaction() as connection:
                rows = [(key, now.timestamp(), text) for key, text in changed.items()]
                connection.executemany("INSERT OR REPLACE INTO ship_positions VALUES (?, ?, ?)", rows)
                connection.executemany("DELETE FROM ship_positions WHERE stream = ?", [(key,) for key in gone])
        except JournalUnavailable as error:
            log.warning("cannot store shipping positions", extra={"reason": str(error)})
            return
        self._written = {key: text for key, text in {**self._written, **changed}.items() if key not in gone}
        self._forgotten.clear()

    def _rows(self) -> dict[str, str]:
        return dict(self._journal.rows("SELECT stream, position FROM ship_positions"))
