"""The port by which logs are opened, listed and looked at.

A path that a job names comes with `NamedBy`, the file in which it stands. An implementation takes the rights from that
file's owner, not from the caller, so a caller that parses hostile text cannot choose rights.

Paths are absolute and contain no ``.`` or ``..``. No implementation follows a symbolic link anywhere in a path.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Sequence
from enum import StrEnum
from typing import Protocol

from msgspec import Struct

from trainmedic_logs.domain import file_times


class UnreadReason(StrEnum):
    """Why something at a path is not read."""

    LINK = "link"
    """It is a symbolic link."""
    SPECIAL = "special"
    """It is neither a file nor a directory: a pipe, a socket, a device."""
    SECOND_NAME = "second_name"
    """The file has another name, by a hard link."""
    OUTSIDE = "outside"
    """A job named it, and the policy does not allow it."""
    FORBIDDEN = "forbidden"
    """The agent's user, or a user who placed or named it, may not read it."""
    TOO_MANY = "too_many"
    """More files are written than the policy lets be followed."""


class LogRefused(Exception):
    """What is at the path is not read; ``reason`` says why."""

    def __init__(self, reason: UnreadReason) -> None:
        super().__init__(reason.value)
        self.reason = reason


class NamedBy(Struct, frozen=True):
    """The file of a job that names a path, as it was when it was read."""

    path: str
    device: int
    inode: int


class FileFacts(Struct, frozen=True):
    """Facts about one entry of a directory. A symbolic link is described itself."""

    mode: int
    device: int
    inode: int
    links: int
    size: int
    written_ns: int
    """Time of the last write, in nanoseconds since 1970."""
    uid: int
    """Owner."""

    @classmethod
    def of(cls, facts: os.stat_result) -> FileFacts:
        return cls(
            facts.st_mode,
            facts.st_dev,
            facts.st_ino,
            facts.st_nlink,
            facts.st_size,
            file_times.written_ns(facts),
            facts.st_uid,
        )


class ListedName(Struct, frozen=True):
    """One entry of a directory, as the directory itself describes it."""

    name: str
    inode: int
    is_directory: bool


class Listing(Struct, frozen=True):
    """The entries of one directory."""

    device: int
    entries: Sequence[ListedName]
    is_cut: bool = False
    """True if the directory has more entries than were asked for."""
    may_be_renamed: bool = False
    """True if users can rename entries of others: see `others_may_rename`."""


class NodeFiles(Protocol):
    """The files of this node. Several threads use it. Every method raises OSError and LogRefused."""

    def open(self, path: str, named_by: NamedBy | None = None) -> int:
        """Return a descriptor of the regular file at `path`. It never blocks at a pipe and opens no device."""
        ...

    def listing(self, path: str, most: int, named_by: NamedBy | None = None) -> Listing:
        """List up to `most` entries of the directory at `path`."""
        ...

    def facts(self, path: str, names: Sequence[str], named_by: NamedBy | None = None) -> list[FileFacts | None]:
        """Return the facts of these entries of the directory at `path`, in order. None for a missing entry."""
        ...


def others_may_rename(mode: int) -> bool:
    """Return whether users can rename in a directory what belongs to others: they may write in it, and it has no sticky
    bit."""
    return bool(mode & (stat.S_IWGRP | stat.S_IWOTH)) and not mode & stat.S_ISVTX


def check_readable(mode: int, links: int) -> None:
    """Raise LogRefused if this is no regular file with one name."""
    if stat.S_ISLNK(mode):
        raise LogRefused(UnreadReason.LINK)
    if not stat.S_ISREG(mode):
        raise LogRefused(UnreadReason.SPECIAL)
    if links > 1:
        raise LogRefused(UnreadReason.SECOND_NAME)


def parts_of(path: str) -> list[str]:
    """Return the names in a path. Raises LogRefused if it is relative, or contains ``.`` or ``..``."""
    names = [name for name in path.split("/") if name]
    if not path.startswith("/") or "\0" in path or not {".", ".."}.isdisjoint(names):
        raise LogRefused(UnreadReason.OUTSIDE)
    return names
