"""Persistent state of log reading: positions, rule state and unsent findings.

All change in one transaction. So after a kill no line is lost, and none gives a second finding. On a full disk reading
waits: the reserved space is for commands.
"""

from __future__ import annotations

import contextlib
import json
import logging
import sqlite3
import threading
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from typing import Any

from msgspec import Struct
from msgspec.structs import replace

from trainmedic.wire import envelope
from trainmedic.wire.envelope import EnvelopeError
from trainmedic.wire.log_limit import LogLimit
from trainmedic_agent.database import AgentDatabase
from trainmedic_agent.log_reading import finding_queue
from trainmedic_agent.log_reading.budgets import NODE_ITSELF, BudgetOwner
from trainmedic_agent.log_reading.finding_queue import FindingQueue
from trainmedic_agent.log_reading.log_counters import LogCounters
from trainmedic_logs.domain import finding_codec
from trainmedic_logs.domain.finding import Excerpt, Finding
from trainmedic_logs.domain.finding_codec import FindingUpdate
from trainmedic_logs.lines.tracker import TrackerChanges

log = logging.getLogger(__name__)

MOST_WAITING_BYTES = 64 * 1024 * 1024

_TABLES = (
    "CREATE TABLE log_positions (stream TEXT PRIMARY KEY, at REAL NOT NULL, position TEXT NOT NULL) WITHOUT ROWID",
    """CREATE TABLE log_findings (
        number INTEGER PRIMARY KEY AUTOINCREMENT, finding TEXT NOT NULL, size INTEGER NOT NULL, body BLOB NOT NULL
    )""",
    "CREATE INDEX log_findings_finding ON log_findings (finding)",
    "CREATE TABLE log_memory (name TEXT PRIMARY KEY, value TEXT NOT NULL) WITHOUT ROWID",
)
_TRACKER_TABLE = "CREATE TABLE log_followed (number INTEGER PRIMARY KEY, value TEXT NOT NULL)"
# Value of `_TRACKER` if the tracker's entries are in ``log_followed``, and not in the value as in earlier versions.
_IN_TABLE = "{}"
_COUNTS = "SELECT (SELECT COUNT(*) FROM log_findings), (SELECT COUNT(*) FROM log_waiting)"
_INSTANCE, _LOST, _TRACKER, _RULES = "instance", "lost", "tracker", "rules"  # names in ``log_memory``


class NodeBoot(Struct, frozen=True):
    node: str
    boot: str  # the kernel's boot ID
    booted_at: datetime | None  # None if unknown


class OutgoingFinding(Struct, frozen=True):
    finding: Finding
    excerpt: Excerpt | None = None  # None: an earlier unsent update's stays
    owner: BudgetOwner = NODE_ITSELF


class LogStore:
    """Thread-safe; methods that use the database raise JournalUnavailable."""

    def __init__(self, journal: AgentDatabase, boot: NodeBoot, counters: LogCounters) -> None:
        journal.install("log_reading", [_TABLES])
        journal.install("log_queue", [(*finding_queue.TABLES, _TRACKER_TABLE)])
        self._journal = journal
        self._boot = boot
        self._counters = counters
        self._lock = threading.Lock()
        self._queue = FindingQueue()
        self._log_limit = LogLimit()
        if self._value(_INSTANCE) is None:
            self._put(_INSTANCE, envelope.new_id())
        self._instance = self._value(_INSTANCE) or ""  # identifies this database's numbers to the server
        self.is_new = self._value(_TRACKER) is None  # true until the first commit ever
        self._move_tracker()
        counters.findings_lost = int(self._value(_LOST) or 0)
        self._count_waiting()

    # --- reading ---

    def positions(self) -> dict[str, Any]:
        return {
            stream: json.loads(text)
            for stream, text in self._journal.rows("SELECT stream, position FROM log_positions")
        }

    def tracker(self) -> dict[int, Any]:
        return {
            number: json.loads(text)
            for number, text in self._journal.rows("SELECT number, value FROM log_followed ORDER BY number")
        }

    def commit(
        self,
        positions: Mapping[str, Mapping[str, Any] | None],
        tracker: TrackerChanges,
        outgoing: Sequence[OutgoingFinding],
        now: datetime,
    ) -> None:
        """Store everything in one transaction; drop findings beyond `MOST_WAITING_BYTES`.

        A stream with the position None is forgotten.
        """
        with self._lock:
            with self._journal.transaction() as connection:
                for stream, position in positions.items():
                    if position is None:
                        connection.execute("DELETE FROM log_positions WHERE stream = ?", (stream,))
                    else:
                        row = (stream, now.timestamp(), json.dumps(position))
                        connection.execute("INSERT OR REPLACE INTO log_positions VALUES (?, ?, ?)", row)
                if self.is_new:
                    connection.execute("INSERT OR REPLACE INTO log_memory VALUES (?, ?)", (_TRACKER, _IN_TABLE))
                _write_tracker(connection, tracker)
                for each in outgoing:
                    self._add(connection, each)
                lost = self._queue.make_room(connection, MOST_WAITING_BYTES) if outgoing else 0
                self._write_lost(connection, lost)
            self.is_new = False
            self._counters.findings_lost += lost  # under the lock: the next loss is stored with this one
            if outgoing:
                self._count_waiting()

    def text_of(self, finding: Finding) -> str:
        return self._encoded(OutgoingFinding(finding)).decode()

    @staticmethod
    def finding_of(text: str) -> Finding:
        """Raises EnvelopeError."""
        return finding_codec.decode(text.encode()).finding

    # --- rules ---

    def rules(self) -> tuple[datetime, bytes] | None:
        """Return the last valid rules and their time. Raises ValueError if unreadable."""
        text = self._value(_RULES)
        if text is None:
            return None
        at, _, raw = text.partition("\n")
        return envelope.read_time(at), raw.encode()

    def keep_rules(self, at: datetime, raw: bytes) -> None:
        self._put(_RULES, f"{envelope.write_time(at)}\n{raw.decode()}")

    # --- sending ---

    def number_next(self, most: int) -> list[tuple[int, bytes]]:
        """Number the next updates, which are then final, and return them with earlier unsent ones."""
        with self._lock:
            ((numbered, queued),) = self._journal.rows(_COUNTS)
            if queued and numbered < most:
                with self._journal.transaction() as connection:
                    lost = self._queue.take(connection, most - numbered, _numbered)
                    self._write_lost(connection, lost)
                self._counters.findings_lost += lost
                if lost and self._log_limit.lets_through():
                    log.error("dropping unreadable findings", extra={"count": lost})
            return self._journal.rows("SELECT number, body FROM log_findings ORDER BY number LIMIT ?", (most,))

    def delete_sent(self, numbers: Iterable[int]) -> None:
        """Delete updates that Redis has. Otherwise they are sent again with the same number."""
        with self._lock:
            with self._journal.transaction() as connection:
                connection.executemany("DELETE FROM log_findings WHERE number = ?", [(number,) for number in numbers])
            self._count_waiting()

    def _add(self, connection: Any, outgoing: OutgoingFinding) -> None:
        finding = outgoing.finding.id
        earlier = self._queue.body(connection, finding) if outgoing.excerpt is None else None
        if earlier is not None:
            with contextlib.suppress(EnvelopeError):  # `number_next` drops and counts it
                outgoing = replace(outgoing, excerpt=finding_codec.decode(earlier).excerpt)
        self._queue.put(connection, finding, outgoing.owner, self._encoded(outgoing))

    def _encoded(self, outgoing: OutgoingFinding) -> bytes:
        update = FindingUpdate(
            node=self._boot.node,
            instance=self._instance,
            number=1,  # until `number_next`
            finding=outgoing.finding,
            excerpt=outgoing.excerpt,
            boot=self._boot.boot,
            booted_at=self._boot.booted_at,
        )
        return finding_codec.encode(update)

    def _move_tracker(self) -> None:
        text = self._value(_TRACKER)
        if text is None or text == _IN_TABLE:
            return
        entries = json.loads(text).get("followed")
        rows = list(enumerate(map(json.dumps, entries if isinstance(entries, list) else ()), start=1))

        def move(connection: sqlite3.Connection) -> None:
            connection.execute("DELETE FROM log_followed")
            connection.executemany("INSERT INTO log_followed VALUES (?, ?)", rows)
            connection.execute("INSERT OR REPLACE INTO log_memory VALUES (?, ?)", (_TRACKER, _IN_TABLE))

        self._journal.write(move)

    def _write_lost(self, connection: sqlite3.Connection, lost: int) -> None:
        if lost:
            row = (_LOST, str(self._counters.findings_lost + lost))
            connection.execute("INSERT OR REPLACE INTO log_memory VALUES (?, ?)", row)

    def _count_waiting(self) -> None:
        ((numbered, queued),) = self._journal.rows(_COUNTS)
        self._counters.findings_waiting = numbered + queued

    def _value(self, name: str) -> str | None:
        rows = self._journal.rows("SELECT value FROM log_memory WHERE name = ?", (name,))
        return str(rows[0][0]) if rows else None

    def _put(self, name: str, value: str) -> None:
        with self._journal.transaction() as connection:
            connection.execute("INSERT OR REPLACE INTO log_memory VALUES (?, ?)", (name, value))


def _numbered(body: bytes, number: int) -> bytes | None:
    """Return None if unreadable."""
    try:
        return finding_codec.encode(replace(finding_codec.decode(body), number=number))
    except EnvelopeError:
        return None


def _write_tracker(connection: sqlite3.Connection, changes: TrackerChanges) -> None:
    gone = [(number,) for number in changes.gone]
    connection.executemany("DELETE FROM log_followed WHERE number = ?", gone)
    connection.executemany("INSERT OR REPLACE INTO log_followed VALUES (?, ?)", list(changes.written.items()))
