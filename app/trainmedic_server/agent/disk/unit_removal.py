"""Deleting a checkpoint whole, so that nobody ever takes what is left of it for one.

It is looked through once more (nothing young, nothing open, not pinned), then its directory gets a name
that no framework reads (`walk.DELETING` before its own), and is looked through again: from here on nobody
comes in by the old name, and who came in before is seen now and gets the old name back. Only then its files
go. Where that is interrupted, a later cleaning by a rule that means the old name deletes the rest.
"""

from __future__ import annotations

import os
import stat
from contextlib import closing
from dataclasses import dataclass, replace

from trainmedic_server.agent.disk import checkpoints, reasons, roots, units
from trainmedic_server.agent.disk.globs import Glob, State
from trainmedic_server.agent.disk.holders import Holders
from trainmedic_server.agent.disk.pace import Pace
from trainmedic_server.agent.disk.reasons import Reason
from trainmedic_server.agent.disk.removal import STORED, refusal
from trainmedic_server.agent.disk.roots import Root
from trainmedic_server.agent.disk.rules import AgeBy
from trainmedic_server.agent.disk.units import Unit
from trainmedic_server.agent.disk.walk import DELETING, Directory, Walk

_READ = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOCTTY
_EVERYTHING = State.of([Glob.read("**")])


@dataclass(frozen=True, slots=True)
class Removed:
    """What became of a checkpoint: files and bytes deleted, and why not all of it, if so."""

    files: int = 0
    bytes: int = 0
    reason: Reason | None = None


@dataclass(frozen=True, slots=True)
class UnitRemover:
    """Deletes checkpoints, or, in a trial run, says what would happen. ``youngest`` as for `units.Search`."""

    holders: Holders
    pace: Pace
    age_by: AgeBy
    youngest: int
    dry_run: bool

    def delete(self, unit: Unit) -> Removed:
        above = unit.directory.above
        assert above is not None, "a root is no checkpoint"
        parent = fd = -1
        try:
            parent = above.reopened()
            fd = roots.enter(parent, unit.directory.name)
            facts = os.fstat(fd)
            if (facts.st_dev, facts.st_ino) != unit.inode:
                return Removed(reason=Reason.CHANGED)
            if (reason := self._obstacle(unit.directory, fd)) is not None:
                return Removed(reason=reason)
            if self.dry_run:
                reason = refusal(parent, facts, fd) or refusal(fd, facts, None)
                return Removed(reason=reason) if reason else Removed(unit.survey.files, unit.survey.bytes)
            return self._deleted(unit.directory, parent, fd)
        except OSError as error:
            return Removed(reason=reasons.of(error))
        finally:
            for descriptor in (parent, fd):
                if descriptor >= 0:
                    os.close(descriptor)

    def _deleted(self, directory: Directory, parent: int, fd: int) -> Removed:
        name, hidden = directory.name, directory.name
        if not name.startswith(DELETING):
            hidden = f"{DELETING}{name}"
            os.rename(name, hidden, src_dir_fd=parent, dst_dir_fd=parent)
            reason = self._obstacle(directory, fd) if _is(parent, hidden, fd) else Reason.CHANGED
            if reason is not None:
                os.rename(hidden, name, src_dir_fd=parent, dst_dir_fd=parent)
                return Removed(reason=reason)
        emptying = _Emptying(self.pace, directory.root, self.youngest)
        reason = emptying.empty(fd)
        if reason is None:
            try:
                os.rmdir(hidden, dir_fd=parent)
            except OSError as error:
                reason = reasons.of(error)
        return Removed(emptying.files, emptying.bytes, reason)

    def _obstacle(self, directory: Directory, fd: int) -> Reason | None:
        """Why the open checkpoint must not be deleted now."""
        here = Directory(directory.root, directory.above, directory.name, directory.depth, fd)
        found = units.survey(here, self.age_by, self.pace)
        if found.obstacle is not None:
            return found.obstacle
        if checkpoints.is_pinned(fd):
            return Reason.PINNED
        return Reason.YOUNG if found.stamp > self.youngest else self._used(here)

    def _used(self, directory: Directory) -> Reason | None:
        """Whether any file in it is open."""
        reason: Reason | None = None
        top = replace(directory.root, path=directory.path(), fd=directory.fd)
        walk = Walk(_EVERYTHING, State.of([]), self.pace, lambda *_: None, lambda *_: True)
        with closing(walk(top)) as found:
            for inner, entry in found:
                if entry is not None and entry.is_file(follow_symlinks=False):
                    reason = self._user(inner.fd, entry.name)
                    if reason is not None:
                        break
        return reason or self.pace.halt

    def _user(self, parent: int, name: str) -> Reason | None:
        try:
            fd = os.open(name, _READ, dir_fd=parent)
        except PermissionError:
            facts = os.stat(name, dir_fd=parent, follow_symlinks=False)
            return self.holders.user_of(None, (facts.st_dev, facts.st_ino))
        try:
            facts = os.fstat(fd)
            return self.holders.user_of(fd, (facts.st_dev, facts.st_ino))
        finally:
            os.close(fd)


@dataclass(slots=True)
class _Emptying:
    """Deletes what is in a directory, from the leaves up; the first thing that cannot be deleted ends it.

    So does something that was written, or mounted, after the checkpoint was looked through.
    """

    pace: Pace
    root: Root
    youngest: int
    files: int = 0
    bytes: int = 0

    def empty(self, fd: int) -> Reason | None:
        inner: list[tuple[int, str]] = []
        try:
            while True:
                here = inner[-1][0] if inner else fd
                child = self._unlink_files(here)
                if isinstance(child, Reason):
                    return child
                if child is not None:
                    inner.append((roots.enter(here, child), child))
                    if not self.root.holds(inner[-1][0]):
                        return Reason.MOUNT_POINT
                elif inner:
                    done, name = inner.pop()
                    os.close(done)
                    os.rmdir(name, dir_fd=inner[-1][0] if inner else fd)
                else:
                    return None
        except OSError as error:
            return reasons.of(error)
        finally:
            for left, _ in inner:
                os.close(left)

    def _unlink_files(self, fd: int) -> str | Reason | None:
        """Delete the files of a directory; stops at a directory in it, whose name it returns, or for a reason."""
        with os.scandir(fd) as entries:
            for entry in entries:
                if entry.is_dir(follow_symlinks=False):
                    return entry.name
                facts = os.stat(entry.name, dir_fd=fd, follow_symlinks=False)
                if stat.S_ISDIR(facts.st_mode):
                    return entry.name
                if stat.S_ISREG(facts.st_mode) and facts.st_mtime_ns > self.youngest:
                    return Reason.YOUNG
                os.unlink(entry.name, dir_fd=fd)
                self.files += 1
                self.bytes += facts.st_blocks * STORED if facts.st_nlink == 1 else 0
                if not self.pace.goes_on():
                    return self.pace.halt
        return None


def _is(parent: int, name: str, fd: int) -> bool:
    """Whether `name` is the directory that is open."""
    return os.path.samestat(os.stat(name, dir_fd=parent, follow_symlinks=False), os.fstat(fd))
