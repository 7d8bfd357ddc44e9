from __future__ import annotations

import json
import logging
from collections.abc import Iterable, Mapping
from datetime import datetime
from typing import Any

from trainmedic_agent.database import AgentDatabase
from trainmedic_agent.errors import JournalUnavailable
from trainmedic_agent.log_shipping.entries import ShippedLines

log = logging.getLogger(__name__)

_TABLES = (
    "CREATE TABLE ship_positions (stream TEXT PRIMARY KEY, at REAL NOT NULL, position TEXT NOT NULL) WITHOUT ROWID",
)
_BEGUN = ""  # key of a row without position, which remains when all positions are forgotten


class ShipPositions:
    """Not thread-safe."""

    can_take = True  # shipping needs no log rules

    def __init__(self, journal: AgentDatabase) -> None:
        """Raises JournalUnavailable."""
        journal.install("log_shipping", [_TABLES])
        self._journal = journal
        self._stored: dict[str, str] = dict(journal.rows("SELECT stream, position FROM ship_positions"))
        self._forgotten: set[str] = set()  # keys that the next `store` deletes
        self.is_first = not self._stored  # nothing was ever stored
        self.has_new_file = False  # True if `store` should be called soon

    def stored(self) -> Mapping[str, Any]:
        return {key: json.loads(text) for key, text in self._stored.items()}

    def forget(self, key: str) -> None:
        self._forgotten.add(key)

    def store_if_overdue(self) -> None:
        """Do nothing: nothing is urgent."""

    def store(self, sources: Iterable[ShippedLines], now: datetime) -> None:
        """Store changes in one transaction. After a failure, a restart ships more lines again."""
        texts: dict[str, str] = {}
        for source in sources:
            try:
                place = source.place_json()
            except OSError:
                continue  # file system gone; the old position stays
            texts[source.key] = json.dumps({"place": place, "stream": source.state()})
        self.has_new_file = False
        changed = {key: text for key, text in texts.items() if self._stored.get(key) != text}
        gone = self._forgotten - texts.keys()
        if not changed and not gone & self._stored.keys():
            return
        changed.setdefault(_BEGUN, "{}")
        try:
            with self._journal.transaction() as connection:
                rows = [(key, now.timestamp(), text) for key, text in changed.items()]
                connection.executemany("INSERT OR REPLACE INTO ship_positions VALUES (?, ?, ?)", rows)
                connection.executemany("DELETE FROM ship_positions WHERE stream = ?", [(key,) for key in gone])
        except JournalUnavailable as error:
            log.warning("cannot store shipping positions", extra={"reason": str(error)})
            return
        self._stored = {key: text for key, text in {**self._stored, **changed}.items() if key not in gone}
        self._forgotten.clear()
