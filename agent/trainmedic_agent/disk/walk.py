"""Streaming walk that never leaves its root's mount."""

from __future__ import annotations

import os
from collections.abc import Callable, Generator

from msgspec import Struct
from msgspec.structs import replace

from trainmedic_agent.disk.filesystems import Root, inode_of, open_directory
from trainmedic_agent.disk.globs import Glob, GlobState
from trainmedic_agent.disk.report import Reason
from trainmedic_agent.disk.throttle import Throttle

MAX_DEPTH = 128  # levels below a root, two descriptors each
_ENTRIES_PER_CHECK = 128
DELETING = ".trainmedic-deleting-"  # prefix during deletion; patterns ignore it
_EVERYTHING = (Glob.read("**"),)


class WalkedDirectory(Struct, eq=False):
    root: Root
    parent: WalkedDirectory | None
    name: str
    depth: int
    fd: int  # open during the walk, else -1

    def names(self) -> list[str]:
        parts: list[str] = []
        directory = self
        while directory.parent is not None:
            parts.append(directory.name)
            directory = directory.parent
        return parts[::-1]

    def path(self, name: str = "") -> str:
        return "/".join([self.root.path, *self.names(), *([name] if name else [])])

    def reopen(self) -> int:
        """Open the directory now at this path. It may be another, so callers compare each entry. Raises OSError."""
        fd = os.dup(self.root.fd)
        for name in self.names():
            try:
                child = open_directory(fd, name)
            finally:
                os.close(fd)
            fd = child
        return fd

    def walk_all(
        self, throttle: Throttle, skip: SkipEntry, visit: VisitDirectory
    ) -> Generator[WalkedEntry, None, None]:
        top = replace(self.root, path=self.path(), fd=self.fd)
        return Walk(_EVERYTHING, (), throttle, skip, visit)(top)


SkipEntry = Callable[[Reason, WalkedDirectory, str], None]
# Returns whether to enter a directory. The second argument is whether its path matches.
VisitDirectory = Callable[[WalkedDirectory, bool], bool]
WalkedEntry = tuple[WalkedDirectory, os.DirEntry[str] | None]  # None at the directory's end


class _Level(Struct):
    directory: WalkedDirectory
    entries: Generator[os.DirEntry[str], None, None]
    globs: GlobState
    exclude: GlobState | None


class Walk(Struct, frozen=True):
    """`visit` is called for directories that match or can contain matches, `skip` for those that cannot be entered."""

    globs: tuple[Glob, ...]
    exclude: tuple[Glob, ...]
    throttle: Throttle
    skip: SkipEntry
    visit: VisitDirectory

    def __call__(self, root: Root) -> Generator[WalkedEntry, None, None]:
        """Yield each matching non-directory with its directory, and each directory with None at its end.

        It is incomplete if the throttle stops it. The caller closes the generator, which holds descriptors.
        """
        levels: list[_Level] = []
        count = 0
        top = WalkedDirectory(root, None, "", 0, root.fd)
        try:
            if self.visit(top, False):
                levels.append(_Level(top, self._entries(top), GlobState.of(self.globs), GlobState.of(self.exclude)))
            while levels:
                level = levels[-1]
                for entry in level.entries:
                    count += 1
                    if count % _ENTRIES_PER_CHECK == 0 and not self.throttle.may_continue():
                        return
                    if level.exclude is not None and level.exclude.accepts(entry.name.removeprefix(DELETING)):
                        continue
                    if entry.is_dir(follow_symlinks=False):
                        if self._descend(levels, level, entry):
                            break
                    elif level.globs.accepts(entry.name):
                        yield level.directory, entry
                else:
                    yield level.directory, None
                    _close(levels.pop())
        finally:
            while levels:
                _close(levels.pop())

    def _entries(self, directory: WalkedDirectory) -> Generator[os.DirEntry[str], None, None]:
        try:
            with os.scandir(directory.fd) as entries:
                yield from entries
        except OSError as error:
            self.skip(Reason.of(error), directory, "")

    def _descend(self, levels: list[_Level], level: _Level, entry: os.DirEntry[str]) -> bool:
        name = entry.name.removeprefix(DELETING)
        is_matched, globs = level.globs.accepts(name), level.globs.below(name)
        if not is_matched and globs is None:
            return False
        directory = self._open(level.directory, entry)
        if isinstance(directory, Reason):
            self.skip(directory, level.directory, entry.name)
            return False
        if not self.visit(directory, is_matched) or globs is None:
            os.close(directory.fd)
            directory.fd = -1
            return False
        exclude = level.exclude.below(name) if level.exclude is not None else None
        levels.append(_Level(directory, self._entries(directory), globs, exclude))
        return True

    def _open(self, parent: WalkedDirectory, entry: os.DirEntry[str]) -> WalkedDirectory | Reason:
        root = parent.root
        if parent.depth >= MAX_DEPTH:
            return Reason.TOO_DEEP
        try:
            # Opening would trigger an automount, so compare the device first.
            facts = entry.stat(follow_symlinks=False)
            if facts.st_dev != root.device:
                return Reason.MOUNT_POINT
            if root.protected == inode_of(facts):
                return Reason.AGENTS_OWN
            fd = open_directory(parent.fd, entry.name)
        except OSError as error:
            return Reason.of(error)
        # Compare the descriptor too: another directory may have taken the name since the stat.
        if not root.contains(fd):
            os.close(fd)
            return Reason.MOUNT_POINT
        return WalkedDirectory(root, parent, entry.name, parent.depth + 1, fd)


def _close(level: _Level) -> None:
    level.entries.close()
    if level.directory.parent is not None:
        os.close(level.directory.fd)
        level.directory.fd = -1
