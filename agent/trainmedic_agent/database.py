"""SQLite file of the agent or of its log reader. Every failure of SQLite raises `JournalUnavailable`.

On a full disk `AgentDatabase.write` uses reserved space: the command that frees the disk must be journaled first.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import sqlite3
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import IO, Any, TypeVar

from trainmedic.errors import ConfigurationError
from trainmedic_agent.errors import JournalUnavailable
from trainmedic_agent.reserved_space import ReservedSpace
from trainmedic_core.machine_locks import FileLock, NameLock

T = TypeVar("T")

_LOG_PAGES = 64  # pages of 4 KiB between checkpoints of SQLite's write-ahead log

_IDENTITY = (
    "CREATE TABLE identity (id TEXT PRIMARY KEY)",
    "INSERT INTO identity VALUES (lower(hex(randomblob(16))))",
)

_NO_SPACE = (
    sqlite3.SQLITE_FULL,
    sqlite3.SQLITE_IOERR_WRITE,  # quota used up
    sqlite3.SQLITE_IOERR_SHMSIZE,
    sqlite3.SQLITE_CANTOPEN,  # no space for a directory entry
)  # SQLite's error codes for a full disk


class AgentDatabase:
    """Thread-safe."""

    def __init__(self, directory: Path) -> None:
        """Open or create the file. Raises ConfigurationError if another agent may use it, JournalUnavailable."""
        self._lock = threading.RLock()  # reentrant: a transaction may read what it changes
        self._identity_lock: NameLock | None = None
        try:
            directory.mkdir(parents=True, exist_ok=True, mode=0o700)
            self._path = (directory / "agent.db").resolve()
            self._lock_file = _locked_file(directory)
            try:
                self._file = _locked_database(self._path)
            except BaseException:
                self._lock_file.close()
                raise
        except OSError as error:
            raise JournalUnavailable(
                f"the state directory {directory} cannot be used: {error.strerror}; make it writable for the agent's "
                "user, or name another with --state-dir"
            ) from error
        self._reserved = ReservedSpace(directory / "agent.reserve")
        try:
            self._connection = self._with_reserved_space(self._connect)
        except BaseException:
            self._unlock()
            raise
        try:
            self._take_identity()
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        with self._lock:
            with contextlib.suppress(sqlite3.Error):
                self._connection.close()
            self._unlock()

    @contextlib.contextmanager
    def transaction(self) -> Iterator[sqlite3.Connection]:
        """Yield the connection within a synced transaction.

        Do not nest it, and keep it short: it blocks the agent. Use `write` for what must succeed on a full disk.
        """
        with self._lock, self._translated():
            if not self._file.is_in_place():  # SQLite would continue on the unlinked file, and the data be lost
                raise JournalUnavailable(
                    f"the agent's journal {self._path} was moved or removed while the agent runs: put it back, or "
                    "restart the agent"
                )
            self._connection.execute("BEGIN IMMEDIATE")
            try:
                yield self._connection
                self._connection.execute("COMMIT")
            except BaseException:
                with contextlib.suppress(sqlite3.Error):  # some errors make SQLite roll back by itself
                    self._connection.execute("ROLLBACK")
                raise

    def write(self, change: Callable[[sqlite3.Connection], T]) -> T:
        """Return `change`'s result in one transaction, which uses reserved space on a full disk."""

        def attempt() -> T:
            with self.transaction() as connection:
                return change(connection)

        with self._lock:
            result = self._with_reserved_space(attempt)
            self._reserved.refill()
        return result

    def rows(self, query: str, parameters: Sequence[Any] = ()) -> list[tuple[Any, ...]]:
        with self._lock, self._translated():
            return self._connection.execute(query, parameters).fetchall()

    def install(self, part: str, versions: Sequence[Sequence[str]]) -> None:
        """Migrate one part's tables: ``versions[n]`` leads from version n to n + 1. Raises ConfigurationError for a
        newer file.
        """
        if self._installed_version(part) == len(versions):
            return  # no write: the agent must start, and restore power, on a full disk too

        def bring_up_to_date(connection: sqlite3.Connection) -> None:
            connection.execute("CREATE TABLE IF NOT EXISTS parts (name TEXT PRIMARY KEY, version INTEGER NOT NULL)")
            version = self._installed_version(part)
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

    def _take_identity(self) -> None:
        """Lock the database's ID against agents on a copy. Raises ConfigurationError if one runs."""
        self.install("identity", [_IDENTITY])
        ((identity,),) = self.rows("SELECT id FROM identity")
        lock = NameLock.take(f"agent:{identity}")
        if isinstance(lock, NameLock):
            self._identity_lock = lock
        # Other users can take the name too, but hold no copy, because they cannot read the file.
        elif lock.user in {0, os.geteuid(), self._file.owner}:
            raise ConfigurationError(
                f"{self._path} is a copy: the agent with process id {lock.pid} works from the same journal, and both "
                "would answer for the same commands and caps. Stop that agent, or give this one an empty state "
                "directory"
            )

    def _unlock(self) -> None:
        if self._identity_lock is not None:
            self._identity_lock.release()
        self._file.release()
        self._lock_file.close()

    def _installed_version(self, part: str) -> int:
        if not self.rows("SELECT 1 FROM sqlite_master WHERE name = 'parts'"):
            return 0
        rows = self.rows("SELECT version FROM parts WHERE name = ?", (part,))
        return int(rows[0][0]) if rows else 0

    def _connect(self) -> sqlite3.Connection:
        with self._translated():
            connection = sqlite3.connect(self._path, timeout=5.0, isolation_level=None, check_same_thread=False)
            try:
                with contextlib.suppress(OSError):  # owned by another user
                    self._path.chmod(0o600)
                connection.execute("PRAGMA journal_mode = WAL")
                connection.execute("PRAGMA synchronous = FULL")  # WAL's default syncs only at checkpoints
                # Checkpoint early, so that the log is reused from its start. On a full disk it can grow only into the
                # reserved space.
                connection.execute(f"PRAGMA wal_autocheckpoint = {_LOG_PAGES}")
                connection.execute("PRAGMA cache_size = -256")  # KiB
            except BaseException:
                connection.close()
                raise
            return connection

    def _with_reserved_space(self, attempt: Callable[[], T]) -> T:
        while True:
            try:
                return attempt()
            except JournalUnavailable as error:
                cause = error.__cause__
                if not isinstance(cause, sqlite3.Error) or getattr(cause, "sqlite_errorcode", None) not in _NO_SPACE:
                    raise
                if not self._reserved.free_piece():
                    raise

    @contextlib.contextmanager
    def _translated(self) -> Iterator[None]:
        try:
            yield
        except sqlite3.Error as error:
            raise JournalUnavailable(
                f"the agent's journal {self._path} cannot be used: {error}. Is the disk full, or the directory "
                "read-only?"
            ) from error


def _locked_file(directory: Path) -> IO[bytes]:
    """Lock a file for the process's lifetime, with mode 0600: others could prevent the agent's start."""
    flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
    file = os.fdopen(os.open(directory / "agent.lock", flags, 0o600), "r+b")
    try:
        with contextlib.suppress(OSError):  # owned by another user; opening it is enough
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


def _locked_database(path: Path) -> FileLock:
    lock = FileLock.take(path)
    if lock is None:
        raise ConfigurationError(
            f"another agent is running with {path} under another name; stop it, or give this one a directory of its "
            "own with --state-dir"
        )
    if lock.names > 1:
        lock.release()
        raise ConfigurationError(
            f"{path} has {lock.names} names (hard links), and under each of them SQLite would keep a journal of its "
            f"own, which damages the database: find the others (find / -xdev -samefile {path}) and remove them"
        )
    return lock
