"""`NodeFiles` with this process's own rights, whoever named a file."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from trainmedic_agent.log_opening.node_files import (
    FileFacts,
    ListedName,
    Listing,
    LogRefused,
    NamedBy,
    UnreadReason,
    check_readable,
    others_may_rename,
    parts_of,
)

DIRECTORY = os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
ENTRY = os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC
READ = os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC


class OwnFiles:
    def open(self, path: str, named_by: NamedBy | None = None) -> int:
        *directories, name = _parts_of_file(path)
        with _directory(directories) as parent:
            entry = os.open(name, ENTRY, dir_fd=parent)
        try:
            facts = os.fstat(entry)
            check_readable(facts.st_mode, facts.st_nlink)
            return reopened(entry, READ)
        finally:
            os.close(entry)

    def listing(self, path: str, most: int, named_by: NamedBy | None = None) -> Listing:
        with _directory(parts_of(path)) as directory:
            fd = reopened(directory, READ | os.O_DIRECTORY)
        try:
            return listed(fd, most)
        finally:
            os.close(fd)

    def facts(self, path: str, names: Sequence[str], named_by: NamedBy | None = None) -> list[FileFacts | None]:
        with _directory(parts_of(path)) as directory:
            return [facts_at(directory, name) for name in names]


def reopened(entry: int, flags: int) -> int:
    """Open the file of an ``O_PATH`` descriptor. Raises OSError."""
    return os.open(f"/proc/self/fd/{entry}", flags)


def listed(fd: int, most: int) -> Listing:
    """Raises OSError."""
    entries: list[ListedName] = []
    is_cut = False
    with os.scandir(fd) as found:
        for entry in found:
            if len(entries) == most:
                is_cut = True
                break
            entries.append(ListedName(entry.name, entry.inode(), entry.is_dir(follow_symlinks=False)))
    facts = os.fstat(fd)
    return Listing(facts.st_dev, entries, is_cut, others_may_rename(facts.st_mode))


def facts_at(directory: int, name: str) -> FileFacts | None:
    if not {"/", "\0"}.isdisjoint(name) or name in {"", ".", ".."}:
        return None
    try:
        return FileFacts.of(os.stat(name, dir_fd=directory, follow_symlinks=False))
    except OSError:
        return None


def _parts_of_file(path: str) -> list[str]:
    names = parts_of(path)
    if not names:
        raise LogRefused(UnreadReason.SPECIAL)
    return names


@contextmanager
def _directory(names: Sequence[str]) -> Iterator[int]:
    fd = os.open("/", DIRECTORY)
    try:
        for name in names:
            child = os.open(name, DIRECTORY, dir_fd=fd)
            os.close(fd)
            fd = child
        yield fd
    finally:
        os.close(fd)
