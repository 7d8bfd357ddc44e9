"""The lock file of a run store on file systems that fail."""

from __future__ import annotations

import errno
import fcntl
import os
from pathlib import Path
from typing import Any

import pytest

from trainmedic_server import errors
from trainmedic_server.adapters.sql_store import database


def failing(code: int) -> Any:
    def call(*_: Any) -> None:
        raise OSError(code, os.strerror(code))

    return call


def test_a_file_system_without_locks_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is an error of the configuration, with advice."""
    monkeypatch.setattr(fcntl, "flock", failing(errno.ENOLCK))
    with pytest.raises(errors.ConfigurationError, match=r"cannot lock .*trainmedic\.db\.lock: .*local file system"):
        database.OwnerLock(database.parse(f"sqlite:///{tmp_path}/trainmedic.db"))


def test_a_full_disk_does_not_prevent_the_lock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only the process ID is missing in the message of another server."""
    url = database.parse(f"sqlite:///{tmp_path}/trainmedic.db")
    monkeypatch.setattr(os, "pwrite", failing(errno.ENOSPC))
    lock = database.OwnerLock(url)
    with pytest.raises(errors.ConfigurationError, match="in use by another server"):
        database.OwnerLock(url)
    lock.release()
