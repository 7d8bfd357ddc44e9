"""What the agent remembers over its own restarts and those of Redis: one SQLite file, ``<state-dir>/agent.db``.

Intent is written before the act, the outcome after it, each synced to the disk before the call returns. A
command that stands here is never begun twice under one id; one that was interrupted is found here again; a
reply that could not be sent waits here.

Other parts of the agent keep tables of their own in the same file, through `Journal.install` and
`Journal.write`, so that what belongs together is committed together.

On a full disk it writes into the space that is kept back for it (``reserved_space``), so that the command that is to
free the disk can be accepted.

Not here: what a command means. Every failure of the file is `JournalUnavailable`: a caller that gets it does not
act, because an agent without its journal could carry out a command twice.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import sqlite3
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import IO, Any, TypeVar

from trainmedic.wire import envelope
from trainmedic_server.agent.reserved_space import ReservedSpace
from trainmedic_server.errors import ConfigurationError, JournalUnavailable

T = TypeVar("T")

KEPT_SECONDS = 30 * 24 * 3600.0
"""How long an outcome is remembered. An undo comes as late as its alert resolves, which can take days."""
KEPT_ENTRIES = 50_000
"""How many outcomes are remembered at most: some 20 MB."""

_LOG_PAGES = 64
"""Pages of 4 KiB at which the write-ahead log is written back: a quarter of the reserved space."""

_NO_SPACE = (
    sqlite3.SQLITE_FULL,
    sqlite3.SQLITE_IOERR_WRITE,  # a quota that is used up
    sqlite3.SQLITE_IOERR_SHMSIZE,
    sqlite3.SQLITE_CANTOPEN,  # no space for a new file's name
)
"""Error codes by which SQLite says, among other things, that there is no space; a second try costs little."""
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


@dataclass(frozen=True, slots=True)
class JournalEntry:
    """What the journal knows of one command.

    ``status``: ``accepted`` while its outcome is open, else how it ended.
    ``at``: when it was accepted, or ended.
    ``output``: that of its final reply.
    """

    id: str
    status: str
    at: datetime
    output: Mapping[str, Any] = field(default_factory=dict)

    @property
    def is_open(self) -> bool:
        return self.status == envelope.ACCEPTED


class Journal:
    """The open file. Every method may be called from any thread."""

    def __init__(
        self, connection: sqlite3.Connection, lock_file: IO[bytes], path: Path, reserved: ReservedSpace
    ) -> None:
        self._connection = connection
        self._lock_file = lock_file
        self._path = path
        self._reserved = reserved
        self._lock = threading.RLock()  # a transaction may look up what it is about to change

    @classmethod
    def open(cls, directory: Path) -> Journal:
        """Open the journal in `directory`, which is made where it is missing.

        Raises ConfigurationError where another agent uses it, JournalUnavailable where it cannot be written.
        """
        path = directory / "agent.db"
        try:
            directory.mkdir(parents=True, exist_ok=True, mode=0o700)
            lock_file = _lock(directory)
        except OSError as error:
            raise JournalUnavailable(
                f"the state directory {directory} cannot be used: {error.strerror}; make it writable for the agent's "
                "user, or name another with --state-dir"
            ) from error
        reserved = ReservedSpace(directory / "agent.reserve")
        try:
            connection = _with_reserved(reserved, lambda: _connect(path))
        except BaseException:
            lock_file.close()
            raise
        journal = cls(connection, lock_file, path, reserved)
        try:
            journal.install("commands", [_TABLES])
        except BaseException:
            journal.close()
            raise
        return journal

    def close(self) -> None:
        with self._lock:
            with contextlib.suppress(sqlite3.Error):
                self._connection.close()
            self._lock_file.close()

    @contextlib.contextmanager
    def transaction(self) -> Iterator[sqlite3.Connection]:
        """The connection, within one transaction: committed and synced when the block ends, rolled back when it raises.

        Not to be nested, and nothing slow belongs in the block: the whole agent waits for it. Raises
        JournalUnavailable for every error of SQLite. What must be written on a full disk too goes through `write`.
        """
        with self._lock, _translated(self._path):
            self._connection.execute("BEGIN IMMEDIATE")
            try:
                yield self._connection
                self._connection.execute("COMMIT")
            except BaseException:
                with contextlib.suppress(sqlite3.Error):  # SQLite has rolled back by itself after some errors
                    self._connection.execute("ROLLBACK")
                raise

    def write(self, change: Callable[[sqlite3.Connection], T]) -> T:
        """Make `change` in one transaction, and on a full disk again in the reserved space; return what it returns.

        Raises JournalUnavailable; then nothing of the change is written.
        """

        def attempt() -> T:
            with self.transaction() as connection:
                return change(connection)

        with self._lock:
            result = _with_reserved(self._reserved, attempt)
            self._reserved.fill_up()
        return result

    def install(self, part: str, versions: Sequence[Sequence[str]]) -> None:
        """Bring the tables of a part of the agent up to date: ``versions[n]`` leads from version n to n + 1.

        Raises ConfigurationError where a newer agent has written the file.
        """

        if self._is_installed(part, len(versions)):
            return  # nothing is written, so that an agent starts, and gives power back, also on a disk that is full

        def bring_up_to_date(connection: sqlite3.Connection) -> None:
            connection.execute("CREATE TABLE IF NOT EXISTS parts (name TEXT PRIMARY KEY, version INTEGER NOT NULL)")
            row = connection.execute("SELECT version FROM parts WHERE name = ?", (part,)).fetchone()
            version = row[0] if row else 0
            if version > len(versions):
                raise ConfigurationError(
                    f"{self._path} was written by a newer agent ({part}: version {version}, this one knows "
                    f"{len(versions)}); install that one again, or move the file away"
                )
            for statements in versions[version:]:
                for statement in statements:
                    connection.execute(statement)
            connection.execute("INSERT OR REPLACE INTO parts VALUES (?, ?)", (part, len(versions)))

        self.write(bring_up_to_date)

    def _is_installed(self, part: str, version: int) -> bool:
        with self._lock, _translated(self._path):
            if not self._connection.execute("SELECT 1 FROM sqlite_master WHERE name = 'parts'").fetchone():
                return False
            row = self._connection.execute("SELECT version FROM parts WHERE name = ?", (part,)).fetchone()
        return row is not None and row[0] == version

    # --- commands -------------------------------------------------------------------------------------

    def look_up(self, command_id: str) -> JournalEntry | None:
        with self._lock, _translated(self._path):
            row = self._connection.execute(
                "SELECT id, status, at, output FROM commands WHERE id = ?", (command_id,)
            ).fetchone()
        return _entry(row) if row else None

    def take(self, command: envelope.Command, now: datetime) -> JournalEntry | None:
        """Enter a command that is going to be carried out; return None, or the entry that it already has.

        A command that expired was never applied, so it is entered again when it is sent with more time.
        """

        def enter(connection: sqlite3.Connection) -> JournalEntry | None:
            entry = self.look_up(command.id)
            if entry is not None and entry.status != envelope.EXPIRED:
                return entry
            values = (command.id, envelope.ACCEPTED, now.timestamp(), "{}", command.encode(), 1)
            connection.execute("INSERT OR REPLACE INTO commands VALUES (?, ?, ?, ?, ?, ?)", values)
            return None

        return self.write(enter)

    def conclude(self, entry: JournalEntry) -> None:
        """Enter how a command ended, with its reply still to be sent."""
        self._put(entry, is_sent=False)

    def revoke(self, command_id: str, now: datetime) -> None:
        """Enter a command that was never applied as rejected, so that it never will be: its undo came first."""
        self._put(
            JournalEntry(command_id, envelope.REJECTED, now, {"reason": "it was taken back before it was applied"}),
            True,
        )

    def open_commands(self) -> list[envelope.Command]:
        """Return what an earlier process accepted and did not finish, in the order in which it accepted them."""
        with self._lock, _translated(self._path):
            rows = self._connection.execute(
                "SELECT envelope FROM commands WHERE status = 'accepted' ORDER BY at, id"
            ).fetchall()
        return [envelope.Command.decode(raw) for (raw,) in rows]

    def unsent(self, most: int) -> list[JournalEntry]:
        """Return the oldest outcomes whose reply has not been sent, `most` of them at most."""
        with self._lock, _translated(self._path):
            rows = self._connection.execute(
                "SELECT id, status, at, output FROM commands WHERE is_sent = 0 ORDER BY at, id LIMIT ?", (most,)
            ).fetchall()
        return [_entry(row) for row in rows]

    def sent(self, command_ids: Sequence[str]) -> None:
        """Note that these replies are in Redis. Where the note is lost they are sent again, which does no harm."""
        ids = [(command_id,) for command_id in command_ids]
        self.write(lambda connection: connection.executemany("UPDATE commands SET is_sent = 1 WHERE id = ?", ids))

    def prune(self, now: datetime) -> int:
        """Forget commands that are older than any repeat or undo of them; return how many.

        Open commands and unsent replies stay.
        """
        is_done = "status != 'accepted' AND is_sent = 1"
        with self.transaction() as connection:
            old = connection.execute(
                f"DELETE FROM commands WHERE at < ? AND {is_done}",  # noqa: S608 - a constant of this function
                (now.timestamp() - KEPT_SECONDS,),
            ).rowcount
            beyond = connection.execute(
                f"DELETE FROM commands WHERE {is_done} AND id IN "  # noqa: S608
                "(SELECT id FROM commands ORDER BY at DESC LIMIT -1 OFFSET ?)",
                (KEPT_ENTRIES,),
            ).rowcount
        return old + beyond

    def _put(self, entry: JournalEntry, is_sent: bool) -> None:
        values = (entry.id, entry.status, entry.at.timestamp(), json.dumps(dict(entry.output)), None, int(is_sent))
        self.write(
            lambda connection: connection.execute("INSERT OR REPLACE INTO commands VALUES (?, ?, ?, ?, ?, ?)", values)
        )


def _entry(row: Sequence[Any]) -> JournalEntry:
    command_id, status, at, output = row
    return JournalEntry(command_id, status, datetime.fromtimestamp(at, UTC), json.loads(output))


def _lock(directory: Path) -> IO[bytes]:
    """Lock a file for as long as the process lives, so that two agents never work from one journal.

    No other user may open the file: whoever can open it can lock it too, and so keep the agent from starting.
    """
    flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
    file = os.fdopen(os.open(directory / "agent.lock", flags, 0o600), "r+b")
    try:
        with contextlib.suppress(OSError):  # somebody else's file: that it can be opened is enough
            os.fchmod(file.fileno(), 0o600)
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        file.close()
        raise ConfigurationError(
            f"another agent is running with the state directory {directory}; stop it, or give this one a directory "
            "of its own with --state-dir"
        ) from error
    except BaseException:
        file.close()
        raise
    return file


def _connect(path: Path) -> sqlite3.Connection:
    """Open SQLite in autocommit mode, so that transactions begin where the code says so. Raises JournalUnavailable."""
    with _translated(path):
        return _opened(path)


def _opened(path: Path) -> sqlite3.Connection:
    connection = sqlite3.connect(path, timeout=5.0, isolation_level=None, check_same_thread=False)
    try:
        with contextlib.suppress(OSError):  # somebody else's file: whether it can be written is seen below
            path.chmod(0o600)
        connection.execute("PRAGMA journal_mode = WAL")
        connection.execute("PRAGMA synchronous = FULL")  # WAL alone would sync at checkpoints only
        # The log is written back early, so that it is used again from its beginning instead of growing: on a full disk
        # all that it may grow by is the reserved space.
        connection.execute(f"PRAGMA wal_autocheckpoint = {_LOG_PAGES}")
        connection.execute("PRAGMA cache_size = -256")
    except BaseException:
        connection.close()
        raise
    return connection


def _with_reserved(reserved: ReservedSpace, attempt: Callable[[], T]) -> T:
    """Return what `attempt` does. Where it finds no space it is made again with a piece of the reserved space, and
    another."""
    while True:
        try:
            return attempt()
        except JournalUnavailable as error:
            cause = error.__cause__
            if not isinstance(cause, sqlite3.Error) or getattr(cause, "sqlite_errorcode", None) not in _NO_SPACE:
                raise
            if not reserved.give_up():
                raise


@contextlib.contextmanager
def _translated(path: Path) -> Iterator[None]:
    try:
        yield
    except sqlite3.Error as error:
        raise JournalUnavailable(
            f"the agent's journal {path} cannot be used: {error}. Is the disk full, or the directory read-only?"
        ) from error
