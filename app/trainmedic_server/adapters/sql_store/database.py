"""SQLite connections and ownership; kinds of database errors."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from functools import cache
from pathlib import Path
from typing import Any

import sqlalchemy as sa
from sqlalchemy import event, exc, pool

from trainmedic_core.machine_locks import FileLock, NameLock
from trainmedic_server import errors

READERS = 4  # Connections and threads that read the history.

_INPUT_ERRORS = (exc.IntegrityError, exc.DataError, exc.ProgrammingError, exc.InterfaceError, exc.NotSupportedError)
_INPUT_ERROR_STATES = ("22", "23", "54")  # First digits of PostgreSQL's SQLSTATEs for invalid input.


def is_outage(error: BaseException) -> bool:
    """Return whether the database failed or no connection was free in time, rather than the input being invalid."""
    if not isinstance(error, exc.DBAPIError):
        return isinstance(error, exc.TimeoutError)
    state = getattr(error.orig, "sqlstate", None)
    if state is not None:
        return not str(state).startswith(_INPUT_ERROR_STATES)
    return not isinstance(error, _INPUT_ERRORS)


@contextmanager
def translated(failure: str) -> Iterator[None]:
    """Raise database errors as StoreUnavailable, whose text begins with `failure`."""
    try:
        yield
    except exc.SQLAlchemyError as error:
        raise unavailable(failure, error) from error


_REASONS = {
    "SQLITE_FULL": "its disk is full",
    "SQLITE_READONLY_DBMOVED": "its file was moved or removed",
    "SQLITE_READONLY": "its file or filesystem is read-only",
    "SQLITE_IOERR": "its disk fails; it may be full or read-only",
    "SQLITE_CORRUPT": "its file is damaged",
    "SQLITE_NOTADB": "its file is damaged",
    "SQLITE_CANTOPEN": "its file cannot be opened",
    "25006": "it is read-only",
    "53100": "its disk is full",
}
"""By SQLite's result code, or its first two parts, and by PostgreSQL's SQLSTATE."""


def unavailable(failure: str, error: BaseException) -> errors.StoreUnavailable:
    cause = getattr(error, "orig", None) or error
    text = f"{failure}: {' '.join(str(cause).split())}"
    name = getattr(cause, "sqlite_errorname", None) or getattr(cause, "sqlstate", None) or ""
    reason = _REASONS.get(name) or _REASONS.get("_".join(name.split("_")[:2]))
    return errors.StoreExplained(text, reason) if reason else errors.StoreUnavailable(text)


_URL_EXAMPLES = "write sqlite:////path/to/file or postgresql://user:password@host/database"


def parse(url: str) -> sa.URL:
    """Return an SQLite file's URL with symlinks resolved. Raises ConfigurationError."""
    try:
        parsed = sa.make_url(url)
    except (exc.ArgumentError, ValueError) as error:
        raise errors.ConfigurationError(f"the database URL cannot be read; {_URL_EXAMPLES}") from error
    if parsed.drivername not in ("sqlite", "sqlite+pysqlite"):
        raise errors.ConfigurationError(
            f"the run store has no support for {parsed.drivername!r} databases; {_URL_EXAMPLES}"
        )
    database = parsed.database
    if not database or database == ":memory:" or database.startswith("file:") or {"mode", "uri"} & set(parsed.query):
        raise errors.ConfigurationError("the database URL names no file; write sqlite:////path/to/file")
    try:
        parsed.get_dialect()().create_connect_args(parsed)  # as each engine does
    except (exc.ArgumentError, ValueError) as error:  # a host, or a wrong value in the query
        raise errors.ConfigurationError(f"the database URL cannot be used; {_URL_EXAMPLES}") from error
    try:
        return parsed.set(database=str(Path(database).resolve()))
    except (OSError, RuntimeError, ValueError) as error:  # RuntimeError: a loop of symlinks; ValueError: a NUL
        raise errors.ConfigurationError(f"the database file {database} cannot be found: {error}") from error


def file_of(url: sa.URL) -> Path:
    return Path(str(url.database))


def make_directory(url: sa.URL) -> None:
    directory = file_of(url).parent
    try:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise errors.ConfigurationError(
            f"cannot create the directory {directory}: {error.strerror}; set --state-dir or --database so that user "
            f"{os.geteuid()} can write there"
        ) from error


class OwnerLock:
    """Lock of the one server that may use an SQLite file; it ends with the process. It excludes others by

    - ``<file>.lock``, even if the file itself was replaced;
    - the file's inode, under any name;
    - the store's identity (`take_identity`), which copies share.
    """

    def __init__(self, url: sa.URL) -> None:
        self._path = file_of(url)
        self._name: NameLock | None = None
        self._lock_file = self._open_lock_file()
        try:
            self._file = self._lock_database()
        except BaseException:
            os.close(self._lock_file)
            raise
        with suppress(OSError):  # a full disk; only messages of other servers need the process ID
            os.ftruncate(self._lock_file, 0)
            os.pwrite(self._lock_file, f"{os.getpid()}\n".encode(), 0)

    def take_identity(self, identity: str) -> None:
        """Exclude servers with copies of the file. Raises ConfigurationError."""
        lock = NameLock.take(f"server:{identity}")
        if isinstance(lock, NameLock):
            self._name = lock
        elif lock.user in {0, os.geteuid(), self._file.owner}:  # Others could not read the file.
            raise errors.ConfigurationError(
                f"{self._path} is a copy: the server with process id {lock.pid} works from the same run store, and "
                "both would perform its open runs. Stop that server, or give this one an empty state directory"
            )

    def require(self) -> None:
        """Raise StoreUnavailable if the file was moved: writes to an unlinked file are lost."""
        if not self._file.is_in_place():
            raise errors.StoreUnavailable(
                f"{self._path} was moved or replaced while the server runs: put it back, or restart the server"
            )

    def release(self) -> None:
        """The lock file stays: once removed, two servers could lock different files."""
        if self._name is not None:
            self._name.release()
        self._file.release()
        os.close(self._lock_file)

    def _open_lock_file(self) -> int:
        path = self._path.with_name(self._path.name + ".lock")
        try:
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise errors.ConfigurationError(f"cannot write {path}: {error.strerror}") from error
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            holder = os.pread(descriptor, 20, 0).decode(errors="replace").strip()
            os.close(descriptor)
            owner = f"the server with process id {holder}" if holder else "another server"
            raise errors.ConfigurationError(
                f"{self._path} is in use by {owner}; stop it, or give this one a state directory of its own"
            ) from error
        except OSError as error:
            os.close(descriptor)
            raise errors.ConfigurationError(
                f"cannot lock {path}: {error.strerror}; put the state directory on a local file system"
            ) from error
        return descriptor

    def _lock_database(self) -> FileLock:
        try:
            lock = FileLock.take(self._path, 0o644)
        except OSError as error:
            raise errors.ConfigurationError(f"cannot write {self._path}: {error.strerror}") from error
        if lock is None:
            raise errors.ConfigurationError(
                f"{self._path} is in use by another server, which has it under another name; stop it, or give this "
                "one a state directory of its own"
            )
        if lock.names > 1:
            lock.release()
            raise errors.ConfigurationError(
                f"{self._path} has {lock.names} names (hard links), and under each of them SQLite would keep a "
                f"journal of its own, which damages the database: find the others (find / -xdev -samefile "
                f"{self._path}) and remove them. To copy the database, see Back up and restore"
            )
        return lock


def writer_engine(url: sa.URL, busy_timeout: timedelta) -> sa.Engine:
    engine = sa.create_engine(url, poolclass=pool.NullPool, connect_args=_connect_args(busy_timeout))
    # Checkpoint the write-ahead log every 8,000 pages of 4 KiB, not 1,000: pages that change often are written less
    # often. A negative cache size is in KiB.
    pragmas = ("cache_size = -32768", "journal_size_limit = 67108864", "wal_autocheckpoint = 8000")
    _prepare(engine, begin="BEGIN IMMEDIATE", pragmas=pragmas)
    return engine


def reader_engine(url: sa.URL, busy_timeout: timedelta) -> sa.Engine:
    """Return an engine whose transactions see one moment's state and neither block nor await writers."""
    engine = sa.create_engine(
        url, poolclass=pool.QueuePool, pool_size=READERS, max_overflow=0, connect_args=_connect_args(busy_timeout)
    )
    _prepare(engine, begin="BEGIN", pragmas=("query_only = ON",))
    return engine


def memory_engine() -> sa.Engine:
    """Return an engine of its own database; all of them share compiled statements."""
    engine = _memory_engine()
    engine.dialect = _memory_dialect()
    return engine


def _memory_engine() -> sa.Engine:
    options = {"compiled_cache": _compiled_in_memory}
    engine = sa.create_engine(
        "sqlite://", poolclass=pool.StaticPool, connect_args=_connect_args(timedelta(0)), execution_options=options
    )
    _prepare(engine, begin="BEGIN", pragmas=())
    return engine


_compiled_in_memory: dict[Any, Any] = {}


@cache
def _memory_dialect() -> sa.Dialect:
    engine = _memory_engine()
    engine.connect().close()  # which initializes the dialect
    engine.dispose()
    return engine.dialect


def _connect_args(busy_timeout: timedelta) -> dict[str, Any]:
    return {
        "timeout": busy_timeout.total_seconds(),
        "check_same_thread": False,  # pools pass connections between threads
        "cached_statements": 512,
        "isolation_level": None,  # the driver begins no transactions: `on_begin` does
    }


def _prepare(engine: sa.Engine, begin: str, pragmas: tuple[str, ...]) -> None:
    def on_connect(connection: Any, record: object) -> None:
        cursor = connection.cursor()
        # WAL permits reads during a write. FULL syncs each commit, so that acknowledged data survives a power failure.
        for pragma in ("journal_mode = WAL", "synchronous = FULL", "foreign_keys = ON", "temp_store = MEMORY"):
            cursor.execute(f"PRAGMA {pragma}")
        for pragma in pragmas:
            cursor.execute(f"PRAGMA {pragma}")
        cursor.close()

    def on_begin(connection: sa.Connection) -> None:
        connection.exec_driver_sql(begin)

    event.listen(engine, "connect", on_connect)
    event.listen(engine, "begin", on_begin)
