"""Going through what is below a root, without following anything out of it, in bounded memory.

Directories are listed as a stream, so that one with a million files costs no more than one with ten. Each is
opened by its name in its open parent and must be on the root's filesystem and mount. `DEEPEST` levels are
entered; what is deeper is left, with that reason.

Not here: what is done with the entries (``files``, ``checkpoints``).
"""

from __future__ import annotations

import os
from collections.abc import Callable, Generator
from dataclasses import dataclass

from trainmedic_server.agent.disk import reasons, roots
from trainmedic_server.agent.disk.globs import State
from trainmedic_server.agent.disk.pace import Pace
from trainmedic_server.agent.disk.reasons import Reason
from trainmedic_server.agent.disk.roots import Root

DEEPEST = 128
"""Levels below a root. Each costs two file descriptors while it is walked."""
_CHUNK = 128
"""Entries between two looks at the clock."""
DELETING = ".trainmedic-deleting-"
"""Put before the name of a checkpoint while it is being deleted; patterns are matched without it."""


@dataclass(slots=True, eq=False)
class Directory:
    """A directory below a root, or the root itself, known by the names that lead to it.

    ``fd`` is open while it is being walked; `reopened` is for later.
    """

    root: Root
    above: Directory | None
    name: str
    depth: int
    fd: int

    @classmethod
    def at(cls, root: Root) -> Directory:
        return cls(root, None, "", 0, root.fd)

    def names(self) -> list[str]:
        """The parts of its path from the root."""
        parts: list[str] = []
        here: Directory | None = self
        while here is not None and here.above is not None:
            parts.append(here.name)
            here = here.above
        return parts[::-1]

    def path(self, name: str = "") -> str:
        """The whole path, of the entry `name` in it if one is given."""
        return "/".join([self.root.path, *self.names(), *([name] if name else [])])

    def reopened(self) -> int:
        """A new descriptor of the directory that has this path now; the caller closes it. Raises OSError.

        Every part is opened in the one before it and no link is followed, so it is below the root. It may be
        another directory than the one that was walked: what is found in it is compared before it is touched.
        """
        fd = os.dup(self.root.fd)
        for name in self.names():
            try:
                below = roots.enter(fd, name)
            finally:
                os.close(fd)
            fd = below
        return fd


Left = Callable[[Reason, Directory, str], None]
"""Told of an entry, by its directory and name, that is left for a reason."""
Found = tuple[Directory, os.DirEntry[str] | None]


@dataclass(slots=True)
class _Level:
    directory: Directory
    entries: Generator[os.DirEntry[str], None, None]
    state: State
    exclude: State | None


@dataclass(frozen=True, slots=True)
class Walk:
    """How to go through a root; calling it does.

    ``visit`` is asked about each directory, open, with whether its path is matched: whether to go into it.
    """

    globs: State
    exclude: State
    pace: Pace
    left: Left
    visit: Callable[[Directory, bool], bool]

    def __call__(self, root: Root) -> Generator[Found, None, None]:
        """Each matched entry that is not a directory, with its directory; and each directory with None at its end.

        Ends early when the pace says so: then the caller must not judge by what it has seen.
        """
        levels: list[_Level] = []
        count = 0
        top = Directory.at(root)
        try:
            if self.visit(top, False):
                levels.append(_Level(top, self._listed(top), self.globs, self.exclude))
            while levels:
                level = levels[-1]
                for entry in level.entries:
                    count += 1
                    if count % _CHUNK == 0 and not self.pace.goes_on():
                        return
                    if level.exclude is not None and level.exclude.accepts(entry.name.removeprefix(DELETING)):
                        continue
                    if entry.is_dir(follow_symlinks=False):
                        if self._descend(levels, level, entry):
                            break
                    elif level.state.accepts(entry.name):
                        yield level.directory, entry
                else:
                    yield level.directory, None
                    _leave(levels.pop())
        finally:
            while levels:
                _leave(levels.pop())

    def _listed(self, directory: Directory) -> Generator[os.DirEntry[str], None, None]:
        try:
            with os.scandir(directory.fd) as entries:
                yield from entries
        except OSError as error:
            self.left(reasons.of(error), directory, "")

    def _descend(self, levels: list[_Level], level: _Level, entry: os.DirEntry[str]) -> bool:
        """Go into a directory if it has to do with the rule; whether it was entered."""
        name = entry.name.removeprefix(DELETING)
        matched, state = level.state.accepts(name), level.state.below(name)
        if not matched and state is None:
            return False
        directory = self._opened(level.directory, entry)
        if directory is None:
            return False
        if not self.visit(directory, matched) or state is None:
            os.close(directory.fd)
            directory.fd = -1
            return False
        exclude = level.exclude.below(name) if level.exclude is not None else None
        levels.append(_Level(directory, self._listed(directory), state, exclude))
        return True

    def _opened(self, parent: Directory, entry: os.DirEntry[str]) -> Directory | None:
        if parent.depth >= DEEPEST:
            self.left(Reason.TOO_DEEP, parent, entry.name)
            return None
        root = parent.root
        try:
            # An automounter mounts what is opened, so what is elsewhere is not opened at all.
            facts = entry.stat(follow_symlinks=False)
            if facts.st_dev != root.device:
                self.left(Reason.MOUNT_POINT, parent, entry.name)
                return None
            if root.spared == (facts.st_dev, facts.st_ino):
                self.left(Reason.AGENTS_OWN, parent, entry.name)
                return None
            fd = roots.enter(parent.fd, entry.name)
        except OSError as error:
            self.left(reasons.of(error), parent, entry.name)
            return None
        if not root.holds(fd):
            os.close(fd)
            self.left(Reason.MOUNT_POINT, parent, entry.name)
            return None
        return Directory(root, parent, entry.name, parent.depth + 1, fd)


def _leave(level: _Level) -> None:
    level.entries.close()
    if level.directory.above is not None:
        os.close(level.directory.fd)
        level.directory.fd = -1
