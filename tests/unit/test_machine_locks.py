"""Locks between processes under errors of the system. Real processes: ``tests/integration/test_one_agent.py``."""

from __future__ import annotations

import errno
import os
import socket
from pathlib import Path
from typing import Any, cast

import pytest

from trainmedic_core import machine_locks
from trainmedic_core.machine_locks import FileLock


class ScarceSocket:
    """Listening socket that fails once for lack of descriptors, then accepts once, then is released."""

    def __init__(self) -> None:
        self.first, self.second = socket.socketpair()
        self._answers: list[int | None] = [errno.EMFILE, None, errno.EINVAL]

    def accept(self) -> tuple[socket.socket, None]:
        answer = self._answers.pop(0)
        if answer is not None:
            raise OSError(answer, os.strerror(answer))
        return self.first, None


def test_a_lack_of_descriptors_does_not_hide_the_holder_of_a_name() -> None:
    """Connections that nobody accepts fill the backlog."""
    held = ScarceSocket()
    machine_locks._close_connections(cast(Any, held))
    assert held.first.fileno() == -1
    held.first.close()
    held.second.close()


def test_a_file_that_cannot_be_locked_is_closed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    opened: list[int] = []

    def fail(descriptor: int) -> bool:
        opened.append(descriptor)
        raise OSError(errno.EIO, "input/output error")

    monkeypatch.setattr(machine_locks, "_lock_byte", fail)
    with pytest.raises(OSError, match="input/output"):
        FileLock.take(tmp_path / "lock")
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(opened[0])
