"""Backup of an SQLite run store while a server writes to it."""

from __future__ import annotations

import os
import sqlite3
import tempfile
from contextlib import closing
from pathlib import Path
from urllib.parse import quote

from trainmedic_server import errors
from trainmedic_server.adapters.sql_store import database, postgresql

_BUSY_SECONDS = 30.0  # longest wait for another process's lock


def copy(url: str, target: Path) -> int:
    """Copy the store as of one moment, verify the copy, and return its size in bytes. No writer waits.

    Raises ConfigurationError if the store is not an existing SQLite file or `target` exists, otherwise
    StoreUnavailable.
    """
    if postgresql.is_postgresql(url):
        raise errors.ConfigurationError(
            "use PostgreSQL's own tools, also while the server runs: pg_dump --format=custom"
        )
    source = database.file_of(database.parse(url))
    try:
        if not source.exists():
            raise errors.ConfigurationError(f"there is no run store at {source}")
        if target.exists():
            raise _exists_error(target)
        # A unique name, so that two copies to one file do not write to each other's.
        descriptor, name = tempfile.mkstemp(".partial", f"{target.name}.", target.parent)
        os.close(descriptor)
        partial = Path(name)
        try:
            _copy_pages(source, partial)
            _verify(partial)
            _publish(partial, target)
            return target.stat().st_size
        finally:
            partial.unlink(missing_ok=True)
    except (sqlite3.Error, OSError) as error:
        raise errors.StoreUnavailable(f"the run store {source} could not be copied to {target}: {error}") from error


def _exists_error(target: Path) -> errors.ConfigurationError:
    return errors.ConfigurationError(f"{target} exists already; name a new file")


def _copy_pages(source: Path, target: Path) -> None:
    with (
        closing(sqlite3.connect(_uri(source, "mode=ro"), uri=True, timeout=_BUSY_SECONDS)) as reading,
        closing(sqlite3.connect(target)) as writing,
    ):
        writing.execute("PRAGMA synchronous = OFF")  # It is synced as a whole later.
        reading.backup(writing)  # In one step: otherwise each write of another process would restart it.


def _verify(copied: Path) -> None:
    with closing(sqlite3.connect(_uri(copied, "immutable=1"), uri=True)) as reading:
        [found] = reading.execute("PRAGMA quick_check(1)").fetchone()
    if found != "ok":
        raise sqlite3.DatabaseError(f"the copy is damaged, as the store may be: {found}")


def _publish(partial: Path, target: Path) -> None:
    _sync(partial)
    try:
        # Reserve the name: `rename` would replace a file that has appeared.
        os.close(os.open(target, os.O_CREAT | os.O_EXCL, 0o600))
    except FileExistsError:
        raise _exists_error(target) from None
    partial.rename(target)
    _sync(target.absolute().parent)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _uri(path: Path, how: str) -> str:
    return f"file:{quote(str(path.absolute()))}?{how}"
