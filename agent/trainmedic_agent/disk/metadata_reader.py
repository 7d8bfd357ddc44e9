"""Checkpoint metadata, parsed by an unprivileged process."""

from __future__ import annotations

import os
import stat
from typing import Annotated

import msgspec
from msgspec import Meta, Struct

from trainmedic_agent.disk import metadata_child
from trainmedic_agent.log_opening.own_files import ENTRY, READ, reopened
from trainmedic_core.confined_process import START_SECONDS, ConfinedProcess

_LATEST_BYTES, _STATE_BYTES = 256, 4096  # read of a file; the wanted value is near its beginning
_LONGEST_ANSWER = 8192  # bytes


class MetadataUnread(Exception):
    """An existing file is unreadable or invalid."""


class MetadataAnswer(Struct, frozen=True):
    step: Annotated[int, Meta(ge=0, lt=10**18)] | None = None
    best: Annotated[str, Meta(max_length=255)] | None = None


_DECODER = msgspec.json.Decoder(MetadataAnswer)


class MetadataReader:
    """Not thread-safe. Methods raise MetadataUnread."""

    def __init__(self) -> None:
        self._process = ConfinedProcess(metadata_child.__name__, (), _LONGEST_ANSWER)

    def latest_step(self, directory: int, name: str) -> int | None:
        """Return None without such a file, or a number in it."""
        return self._parsed(metadata_child.LATEST, _beginning(directory, name, _LATEST_BYTES)).step

    def best(self, directory: int, name: str) -> str | None:
        return self._parsed(metadata_child.TRAINER_STATE, _beginning(directory, name, _STATE_BYTES)).best

    def close(self) -> None:
        self._process.end()

    def _parsed(self, kind: str, raw: bytes) -> MetadataAnswer:
        if not raw:
            return MetadataAnswer()
        request = b"%s %d\n%s" % (kind.encode(), len(raw), raw)
        try:
            return _DECODER.decode(self._process.ask(request, metadata_child.SECONDS + START_SECONDS))
        except (msgspec.MsgspecError, OSError) as error:
            self._process.end()
            raise MetadataUnread("the process that parses metadata of checkpoints gave no answer") from error


def _beginning(directory: int, name: str, size: int) -> bytes:
    """Return a regular file's first bytes, none of others. Raises MetadataUnread.

    Opening a pipe or device can have an effect, so the type is checked first.
    """
    try:
        entry = os.open(name, ENTRY, dir_fd=directory)
        try:
            if not stat.S_ISREG(os.fstat(entry).st_mode):
                return b""
            try:
                # Reading must not make the file young. Only owner and root may use O_NOATIME.
                fd = reopened(entry, READ | os.O_NOATIME)
            except PermissionError:
                fd = reopened(entry, READ)
        finally:
            os.close(entry)
        try:
            return os.read(fd, size)
        finally:
            os.close(fd)
    except FileNotFoundError:
        return b""
    except OSError as error:
        raise MetadataUnread(f"{name} cannot be read: {error.strerror}") from error
