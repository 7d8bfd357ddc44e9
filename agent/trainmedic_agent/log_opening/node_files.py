"""Port for opening, listing and inspecting log files, without following symbolic links.

Rights for a path named by a job derive from the owner of the file that names it (`NamedBy`), so hostile text cannot
choose rights.
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
    LINK = "link"
    SPECIAL = "special"  # A pipe, socket or device
    SECOND_NAME = "second_name"  # It has a further hard link
    OUTSIDE = "outside"  # Not below the policy's paths
    FORBIDDEN = "forbidden"
    """Not readable by the agent's user, or by one who placed or named it."""
    TOO_MANY = "too_many"  # More files than the policy, or the limit of open files, lets the agent follow


class LogRefused(Exception):
    """The path is not read, for this ``reason``."""

    def __init__(self, reason: UnreadReason) -> None:
        super().__init__(reason.value)
        self.reason = reason


class NamedBy(Struct, frozen=True):
    """A job's sources file (`JobSources`), which names others."""

    path: str
    device: int
    inode: int


class FileFacts(Struct, frozen=True):
    """Metadata of a directory entry; links are not followed."""

    mode: int
    device: int
    inode: int
    links: int
    size: int
    written_ns: int
    """Nanoseconds since 1970."""
    uid: int

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
    name: str
    inode: int
    is_directory: bool


class Listing(Struct, frozen=True):
    device: int
    entries: Sequence[ListedName]
    is_cut: bool = False  # True if there are more entries
    may_be_renamed: bool = False  # True if not only their owners may rename entries


class NodeFiles(Protocol):
    """Thread-safe. Methods raise OSError and LogRefused."""

    def open(self, path: str, named_by: NamedBy | None = None) -> int:
        """Return the regular file's descriptor. Never blocks on a pipe or opens a device."""
        ...

    def listing(self, path: str, most: int, named_by: NamedBy | None = None) -> Listing:
        """Return up to `most` entries of a directory."""
        ...

    def facts(self, path: str, names: Sequence[str], named_by: NamedBy | None = None) -> list[FileFacts | None]:
        """Return metadata of a directory's entries `names`, in order, None for missing ones."""
        ...


def others_may_rename(mode: int) -> bool:
    """Return whether a directory is writable for other users and not sticky."""
    return bool(mode & (stat.S_IWGRP | stat.S_IWOTH)) and not mode & stat.S_ISVTX


def check_readable(mode: int, links: int) -> None:
    """Raise LogRefused unless this is a regular file with one link."""
    if stat.S_ISLNK(mode):
        raise LogRefused(UnreadReason.LINK)
    if not stat.S_ISREG(mode):
        raise LogRefused(UnreadReason.SPECIAL)
    if links > 1:
        raise LogRefused(UnreadReason.SECOND_NAME)


def parts_of(path: str) -> list[str]:
    """Return an absolute path's names. Raises LogRefused, also for ``.`` and ``..``."""
    names = [name for name in path.split("/") if name]
    if not path.startswith("/") or "\0" in path or not {".", ".."}.isdisjoint(names):
        raise LogRefused(UnreadReason.OUTSIDE)
    return names
