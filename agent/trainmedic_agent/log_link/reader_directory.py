"""Creation of the reader's directory.

The agent writes in it only until it belongs to the reader's user.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import sqlite3
import stat
from pathlib import Path

from trainmedic_agent.errors import JournalUnavailable
from trainmedic_agent.journal import Journal
from trainmedic_agent.log_link.reader_process import ReaderUser

NAME = "reader"
# Parts of the schema that an older agent had in its journal.
_PARTS = ("log_reading", "log_queue", "log_arrivals", "log_shipping")
_OWN_TABLES = "SELECT name, type, sql FROM {}sqlite_master WHERE tbl_name GLOB 'log_*' OR tbl_name GLOB 'ship_*'"


def prepare(state: Path, journal: Journal, user: ReaderUser) -> None:
    """Create the directory, with rows that an older agent kept in the journal, or give the present one to `user`.

    Raises JournalUnavailable.
    """
    directory = state / NAME
    try:
        if user.uid != os.geteuid():
            # The reader must be able to pass through. Files in it are readable by their owner only.
            state.chmod(stat.S_IMODE(state.stat().st_mode) | 0o011)
        if not directory.is_dir():
            _make(state, user)
        else:
            _hand_over(directory, user)
    except (OSError, sqlite3.Error) as error:
        raise JournalUnavailable(f"the directory {directory} for reading logs cannot be made: {error}") from error
    _drop_old(journal)


def _make(state: Path, user: ReaderUser) -> None:
    """Create the directory under another name first: a killed attempt starts again."""
    unready = state / f"{NAME}.new"
    if unready.exists():
        shutil.rmtree(unready)
    unready.mkdir(mode=0o700)
    _copy(state / "agent.db", unready / "agent.db")
    for path in (unready, *unready.iterdir()):
        _give(path, user)
    unready.rename(state / NAME)
    handle = os.open(state, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _hand_over(directory: Path, user: ReaderUser) -> None:
    """Give the directory to this user, unless they can write in it. Raises OSError.

    The previous user may have placed links, so only regular files with one link are changed.
    """
    flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    handle = os.open(directory, flags | os.O_DIRECTORY)
    try:
        facts = os.fstat(handle)
        if facts.st_uid == user.uid or (facts.st_gid == user.gid and facts.st_mode & stat.S_IWGRP):
            return
        for name in os.listdir(handle):  # noqa: PTH208 - by its descriptor
            try:
                file = os.open(name, flags, dir_fd=handle)
            except OSError:  # a link or a socket
                continue
            try:
                inner = os.fstat(file)
                if stat.S_ISREG(inner.st_mode) and inner.st_nlink == 1:
                    _give(file, user)
            finally:
                os.close(file)
        _give(handle, user)
    finally:
        os.close(handle)


def _copy(old: Path, new: Path) -> None:
    with contextlib.closing(sqlite3.connect(new, isolation_level=None)) as connection:
        connection.execute("PRAGMA synchronous = FULL")
        connection.execute("ATTACH ? AS old", (str(old),))
        connection.execute("BEGIN")
        rows = connection.execute(_OWN_TABLES.format("old.")).fetchall()
        tables = [name for name, kind, _ in rows if kind == "table"]
        for _, _, sql in sorted((row for row in rows if row[2]), key=lambda row: row[1] != "table"):
            connection.execute(sql)
        for table in tables:
            connection.execute(f'INSERT INTO main."{table}" SELECT * FROM old."{table}"')  # noqa: S608
        if tables:
            _copy_versions(connection)
        connection.execute("COMMIT")


def _copy_versions(connection: sqlite3.Connection) -> None:
    marks = ", ".join("?" * len(_PARTS))
    connection.execute("CREATE TABLE parts (name TEXT PRIMARY KEY, version INTEGER NOT NULL)")
    connection.execute(f"INSERT INTO main.parts SELECT * FROM old.parts WHERE name IN ({marks})", _PARTS)  # noqa: S608
    connection.execute("DELETE FROM main.sqlite_sequence")
    connection.execute(
        "INSERT INTO main.sqlite_sequence SELECT name, seq FROM old.sqlite_sequence WHERE name = 'log_findings'"
    )


def _drop_old(journal: Journal) -> None:
    tables = [name for name, kind, _ in journal.rows(_OWN_TABLES.format("")) if kind == "table"]
    if not tables:
        return

    def drop(connection: sqlite3.Connection) -> None:
        for table in tables:
            connection.execute(f'DROP TABLE "{table}"')
        connection.executemany("DELETE FROM parts WHERE name = ?", [(part,) for part in _PARTS])

    journal.write(drop)


def _give(path: Path | int, user: ReaderUser) -> None:
    """Change the owner, or if not permitted the group."""
    facts = os.stat(path)  # noqa: PTH116
    if facts.st_uid == user.uid:
        return
    try:
        os.chown(path, user.uid, user.gid)
    except PermissionError:
        os.chown(path, -1, user.gid)
        os.chmod(path, 0o770 if stat.S_ISDIR(facts.st_mode) else 0o660)  # noqa: PTH101
