"""What reading logs remembers in the reader's database: how far it is, what rules know, what is still to be sent.

All of it changes in one transaction, so that after a kill at any moment what was read and what was found are of the
same moment: no line is lost between them, and none makes another finding. What waits to be sent is bounded; where
nobody takes it for long the oldest goes, and is counted.

On a disk that is full nothing of this may use up the space that is kept back for commands; reading waits then.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from typing import Any

from msgspec import Struct
from msgspec.structs import replace

from trainmedic.wire import envelope
from trainmedic_server.agent.database import AgentDatabase
from trainmedic_server.agent.log_reading.log_counters import LogCounters
from trainmedic_server.domain import finding_codec
from trainmedic_server.domain.finding import Excerpt, Finding
from trainmedic_server.domain.finding_codec import FindingUpdate

MOST_WAITING_BYTES = 64 * 1024 * 1024

_TABLES = (
    "CREATE TABLE log_positions (stream TEXT PRIMARY KEY, at REAL NOT NULL, position TEXT NOT NULL) WITHOUT ROWID",
    """CREATE TABLE log_findings (
        number INTEGER PRIMARY KEY AUTOINCREMENT, finding TEXT NOT NULL, size INTEGER NOT NULL, body BLOB NOT NULL
    )""",
    "CREATE INDEX log_findings_finding ON log_findings (finding)",
    "CREATE TABLE log_memory (name TEXT PRIMARY KEY, value TEXT NOT NULL) WITHOUT ROWID",
)
_INSTANCE, _LOST, _TRACKER, _RULES = "instance", "lost", "tracker", "rules"


class NodeBoot(Struct, frozen=True):
    """The node, and its present boot."""

    node: str
    boot: str
    """The id that the kernel has given it; empty where it gives none."""
    booted_at: datetime | None


class OutgoingFinding(Struct, frozen=True):
    """What is said of a finding, with the lines around it where they are known by now."""

    finding: Finding
    excerpt: Excerpt | None = None


class LogStore:
    """The tables. Any thread may call it; every method raises JournalUnavailable."""

    def __init__(self, journal: AgentDatabase, boot: NodeBoot, counters: LogCounters) -> None:
        journal.install("log_reading", [_TABLES])
        self._journal = journal
        self._boot = boot
        self._counters = counters
        self._lock = threading.Lock()
        # Numbers up to this one may be on their way, or were sent by an earlier process: they are not changed any more.
        ((self._taken,),) = journal.rows("SELECT COALESCE(MAX(number), 0) FROM log_findings")
        if self._value(_INSTANCE) is None:
            self._put(_INSTANCE, envelope.new_id())
        self._instance = self._value(_INSTANCE) or ""
        self.is_new = self._value(_TRACKER) is None
        """Nothing was ever committed: no log was read here before."""
        counters.findings_lost = int(self._value(_LOST) or 0)
        self._measure()

    # --- reading ----------------------------------------------------------------------------------------

    def positions(self) -> dict[str, Any]:
        """What `commit` has written of each stream that is not forgotten."""
        return {
            stream: json.loads(text)
            for stream, text in self._journal.rows("SELECT stream, position FROM log_positions")
        }

    def tracker(self) -> dict[str, Any]:
        """The state of what rules know; empty at first."""
        return dict(json.loads(self._value(_TRACKER) or "{}"))

    def commit(
        self,
        positions: Mapping[str, Mapping[str, Any] | None],
        tracker: Mapping[str, Any],
        outgoing: Sequence[OutgoingFinding],
        now: datetime,
    ) -> None:
        """Write all of it down, or none. A stream whose position is None is forgotten."""
        with self._lock, self._journal.transaction() as connection:
            for stream, position in positions.items():
                if position is None:
                    connection.execute("DELETE FROM log_positions WHERE stream = ?", (stream,))
                else:
                    row = (stream, now.timestamp(), json.dumps(position))
                    connection.execute("INSERT OR REPLACE INTO log_positions VALUES (?, ?, ?)", row)
            state = (_TRACKER, json.dumps(tracker))
            connection.execute("INSERT OR REPLACE INTO log_memory VALUES (?, ?)", state)
            for each in outgoing:
                self._add(connection, each)
            lost = self._make_room(connection)
        self.is_new = False
        if outgoing or lost:
            self._counters.findings_lost += lost
            self._measure()

    def first_word(self, finding: Finding) -> str:
        """The finding as text, from which `finding_of` makes it again."""
        return self._encoded(0, OutgoingFinding(finding)).decode()

    @staticmethod
    def finding_of(text: str) -> Finding:
        """Raises EnvelopeError."""
        return finding_codec.decode(text.encode()).finding

    # --- the rules --------------------------------------------------------------------------------------

    def rules(self) -> tuple[datetime, bytes] | None:
        """The last rules that were good, and since when they are the rules."""
        text = self._value(_RULES)
        if text is None:
            return None
        at, _, raw = text.partition("\n")
        return envelope.read_time(at), raw.encode()

    def keep_rules(self, at: datetime, raw: bytes) -> None:
        self._put(_RULES, f"{envelope.write_time(at)}\n{raw.decode()}")

    # --- sending ----------------------------------------------------------------------------------------

    def waiting(self, most: int) -> list[tuple[int, bytes]]:
        """The oldest updates that were not sent, with their numbers. They are not changed from now on."""
        with self._lock:
            rows = self._journal.rows("SELECT number, body FROM log_findings ORDER BY number LIMIT ?", (most,))
            self._taken = max([self._taken, *(number for number, _ in rows)])
        return rows

    def sent(self, numbers: Iterable[int]) -> None:
        """Forget updates that Redis has. Where that is lost they are sent again, with the same number."""
        with self._lock, self._journal.transaction() as connection:
            connection.executemany("DELETE FROM log_findings WHERE number = ?", [(number,) for number in numbers])
        self._measure()

    # ----------------------------------------------------------------------------------------------------

    def _add(self, connection: Any, outgoing: OutgoingFinding) -> None:
        """Add an update, or put it in the place of an earlier one of the same finding that nobody has taken yet."""
        finding = outgoing.finding.id
        earlier = connection.execute(
            "SELECT number, body FROM log_findings WHERE finding = ? AND number > ?", (finding, self._taken)
        ).fetchone()
        if earlier is None:
            cursor = connection.execute("INSERT INTO log_findings (finding, size, body) VALUES (?, 0, x'')", (finding,))
            number = cursor.lastrowid
        else:
            number = earlier[0]
            if outgoing.excerpt is None:
                outgoing = replace(outgoing, excerpt=finding_codec.decode(earlier[1]).excerpt)
        body = self._encoded(number, outgoing)
        connection.execute("UPDATE log_findings SET size = ?, body = ? WHERE number = ?", (len(body), body, number))

    def _encoded(self, number: int, outgoing: OutgoingFinding) -> bytes:
        update = FindingUpdate(
            node=self._boot.node,
            instance=self._instance,
            number=max(number, 1),
            finding=outgoing.finding,
            excerpt=outgoing.excerpt,
            boot=self._boot.boot,
            booted_at=self._boot.booted_at,
        )
        return finding_codec.encode(update)

    def _make_room(self, connection: Any) -> int:
        """Let the oldest updates go while there are too many bytes; return how many."""
        lost = 0
        ((size,),) = connection.execute("SELECT COALESCE(SUM(size), 0) FROM log_findings")
        while size > MOST_WAITING_BYTES:
            rows = connection.execute("SELECT number, size FROM log_findings ORDER BY number LIMIT 100").fetchall()
            for number, each in rows:
                if size <= MOST_WAITING_BYTES:
                    break
                connection.execute("DELETE FROM log_findings WHERE number = ?", (number,))
                size -= each
                lost += 1
        if lost:
            row = (_LOST, str(self._counters.findings_lost + lost))
            connection.execute("INSERT OR REPLACE INTO log_memory VALUES (?, ?)", row)
        return lost

    def _measure(self) -> None:
        ((waiting,),) = self._journal.rows("SELECT COUNT(*) FROM log_findings")
        self._counters.findings_waiting = waiting

    def _value(self, name: str) -> str | None:
        rows = self._journal.rows("SELECT value FROM log_memory WHERE name = ?", (name,))
        return str(rows[0][0]) if rows else None

    def _put(self, name: str, value: str) -> None:
        with self._journal.transaction() as connection:
            connection.execute("INSERT OR REPLACE INTO log_memory VALUES (?, ?)", (name, value))
