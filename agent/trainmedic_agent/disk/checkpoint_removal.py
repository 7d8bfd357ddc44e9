"""Deletion of a whole checkpoint, which must never look complete when partly deleted:

1. Check that nothing is young, open, pinned or moved.
2. Rename the directory with the prefix `walk.DELETING`, so that no process opens it any more.
3. Check again; on an obstacle, such as a process that opened it before, restore the name.
4. Delete files, first those that mark it complete.

Later runs delete an interruption's remains. A trial run makes the first check and checks permissions.
"""

from __future__ import annotations

import contextlib
import os
import stat
from contextlib import closing

from msgspec import Struct

from trainmedic_agent.disk import checkpoints, search
from trainmedic_agent.disk.filesystems import Root, freed_bytes, inode_of, open_directory
from trainmedic_agent.disk.metadata_reader import MetadataUnread
from trainmedic_agent.disk.open_files import FileUsage
from trainmedic_agent.disk.place import is_in_place
from trainmedic_agent.disk.removal import may_hide_reads, open_for_reading, refusal
from trainmedic_agent.disk.report import Reason
from trainmedic_agent.disk.rules import AgeBy
from trainmedic_agent.disk.search import MatchedCheckpoint
from trainmedic_agent.disk.throttle import Throttle
from trainmedic_agent.disk.walk import DELETING, WalkedDirectory


class CheckpointRemoval(Struct, frozen=True):
    """Deleted files, freed bytes, and why the rest was left, if so."""

    files: int = 0
    bytes: int = 0
    reason: Reason | None = None


class CheckpointRemover(Struct, frozen=True):
    usage: FileUsage
    throttle: Throttle
    age_by: AgeBy
    cutoff_ns: int
    dry_run: bool

    def delete(self, checkpoint: MatchedCheckpoint) -> CheckpointRemoval:
        directory = checkpoint.directory
        assert directory.parent is not None, "a root is no checkpoint"
        parent = fd = -1
        try:
            parent = directory.parent.reopen()
            fd = open_directory(parent, directory.name)
            status = os.fstat(fd)
            if inode_of(status) != checkpoint.inode:
                return CheckpointRemoval(reason=Reason.CHANGED)
            reason = self._obstacle(directory, fd)
            if reason is None and not is_in_place(fd, directory.path()):
                reason = Reason.MOVED
            if reason is not None:
                return CheckpointRemoval(reason=reason)
            if self.dry_run:
                reason = refusal(parent, status, fd) or refusal(fd, status, None)
                if reason is not None:
                    return CheckpointRemoval(reason=reason)
                return CheckpointRemoval(checkpoint.contents.files, checkpoint.contents.bytes)
            return self._delete(directory, parent, fd)
        except OSError as error:
            return CheckpointRemoval(reason=Reason.of(error))
        finally:
            for descriptor in (parent, fd):
                if descriptor >= 0:
                    os.close(descriptor)

    def _delete(self, directory: WalkedDirectory, parent: int, fd: int) -> CheckpointRemoval:
        assert directory.parent is not None, "a root is no checkpoint"
        name = hidden_name = directory.name
        is_begun = name.startswith(DELETING)
        if not is_begun:
            hidden_name = f"{DELETING}{name}"
            os.rename(name, hidden_name, src_dir_fd=parent, dst_dir_fd=parent)
            try:
                # Another directory may have taken the name before the rename.
                is_same = os.path.samestat(os.stat(hidden_name, dir_fd=parent, follow_symlinks=False), os.fstat(fd))
                reason = self._obstacle(directory, fd) if is_same else Reason.CHANGED
            except OSError as error:
                reason = Reason.of(error)
            if reason is not None:
                os.rename(hidden_name, name, src_dir_fd=parent, dst_dir_fd=parent)
                return CheckpointRemoval(reason=reason)
        contents = _ContentsRemoval(self.throttle, directory.root, self.cutoff_ns)
        reason = contents.run(fd, directory.parent.path(hidden_name))
        if reason is None:
            try:
                os.rmdir(hidden_name, dir_fd=parent)
            except OSError as error:
                reason = Reason.of(error)
        elif not contents.files and not is_begun:
            with contextlib.suppress(OSError):
                os.rename(hidden_name, name, src_dir_fd=parent, dst_dir_fd=parent)
        return CheckpointRemoval(contents.files, contents.bytes, reason)

    def _obstacle(self, directory: WalkedDirectory, fd: int) -> Reason | None:
        opened = WalkedDirectory(directory.root, directory.parent, directory.name, directory.depth, fd)
        contents = search.survey(opened, self.age_by, self.throttle)
        if contents.obstacle is not None:
            return contents.obstacle
        try:
            if checkpoints.is_pinned(fd):
                return Reason.PINNED
        except MetadataUnread:
            return Reason.METADATA_UNREAD
        # Last, because looking for users of each file is the most expensive.
        return Reason.YOUNG if contents.last_used_ns > self.cutoff_ns else self._use_of_files(opened)

    def _use_of_files(self, directory: WalkedDirectory) -> Reason | None:
        with closing(directory.walk_all(self.throttle, lambda *_: None, lambda *_: True)) as entries:
            for inner, entry in entries:
                if entry is not None and entry.is_file(follow_symlinks=False):
                    reason = self._use_of_file(inner, entry.name)
                    if reason is not None:
                        return reason
        return self.throttle.stop_reason

    def _use_of_file(self, parent: WalkedDirectory, name: str) -> Reason | None:
        fd = open_for_reading(parent.fd, name)
        try:
            if may_hide_reads(fd, self.age_by, parent.root.access_times):
                return Reason.OPEN_UNKNOWN
            status = os.stat(name, dir_fd=parent.fd, follow_symlinks=False) if fd is None else os.fstat(fd)
            return self.usage.obstacle(fd, inode_of(status))
        finally:
            if fd is not None:
                os.close(fd)


class _ContentsRemoval(Struct):
    """Files written after `cutoff_ns` end the removal."""

    throttle: Throttle
    root: Root
    cutoff_ns: int
    files: int = 0
    bytes: int = 0

    def run(self, fd: int, path: str) -> Reason | None:
        """Return why something was left, if so."""
        levels = [(fd, path)]
        try:
            reason = self._unlink_marks(fd, path)
            while reason is None:
                fd, path = levels[-1]
                child = self._unlink_files(fd, path)
                if isinstance(child, Reason):
                    reason = child
                elif child is not None:
                    levels.append((open_directory(fd, child), f"{path}/{child}"))
                    if not self.root.contains(levels[-1][0]):
                        reason = Reason.MOUNT_POINT
                elif len(levels) == 1:
                    return None
                else:
                    reason = self._remove_emptied(levels)
            return reason
        except OSError as error:
            return Reason.of(error)
        finally:
            for descriptor, _ in levels[1:]:
                os.close(descriptor)

    def _remove_emptied(self, levels: list[tuple[int, str]]) -> Reason | None:
        emptied, path = levels.pop()
        os.close(emptied)
        parent, parents_path = levels[-1]
        if not is_in_place(parent, parents_path):
            return Reason.MOVED
        os.rmdir(path.rpartition("/")[2], dir_fd=parent)
        return None

    def _unlink_marks(self, fd: int, path: str) -> Reason | None:
        for name in checkpoints.MARKS_OF_COMPLETENESS:
            with contextlib.suppress(FileNotFoundError):
                reason = self._unlink(fd, path, name)
                if isinstance(reason, Reason):
                    return reason
        return None

    def _unlink_files(self, fd: int, path: str) -> str | Reason | None:
        """Return the first subdirectory's name, or a reason to stop."""
        with os.scandir(fd) as entries:
            for entry in entries:
                if entry.is_dir(follow_symlinks=False):
                    return entry.name
                ended_by = self._unlink(fd, path, entry.name)
                if ended_by is not None:
                    return ended_by
        return None

    def _unlink(self, fd: int, path: str, name: str) -> str | Reason | None:
        """Return the name if it is a directory, or a reason to stop."""
        status = os.stat(name, dir_fd=fd, follow_symlinks=False)
        if stat.S_ISDIR(status.st_mode):
            return name
        if stat.S_ISREG(status.st_mode) and status.st_mtime_ns > self.cutoff_ns:
            return Reason.YOUNG
        if not is_in_place(fd, path):
            return Reason.MOVED
        os.unlink(name, dir_fd=fd)
        self.files += 1
        self.bytes += freed_bytes(status)
        return None if self.throttle.may_continue() else self.throttle.stop_reason
