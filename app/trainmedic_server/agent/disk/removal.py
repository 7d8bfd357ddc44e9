"""Deleting or emptying one file, and deleting one checkpoint, after a last check that it is still allowed.

**A file** is opened by its name in its open directory, following no link, and compared: device and inode, a regular
file, one name, as old as it was, and not in use (`open_files`). Then the name is removed from that same
directory. Linux cannot delete "what this descriptor has open", so between the check and the deletion some
microseconds remain in which a process that may write in that directory can put another file under the name. It can
never be a file outside the directory that was opened.

**Truncating** a log that no process has open, or whose writers all append, sets its length to 0. A writer that does not
append would go on at its old place and leave zeros before it, and so would one that cannot be seen; in such a file a
hole is punched instead: it keeps its length, the space of its whole blocks is given back, what is written meanwhile
is kept, and the writer notices nothing. What the log held is lost either way.

**A checkpoint** is deleted so that a partly deleted one is never taken for a whole one. It is checked once more
(nothing young, nothing open, not pinned), then its directory is renamed to a name that no framework reads
(`walk.DELETING` before its own), and is checked again: from here on no process opens it by the old name, and if one
had opened it before, the second check finds that, and the old name is put back. Only then its files are deleted. If
that is interrupted, a later cleaning by a rule that matches the old name deletes the rest.

A trial run makes the same checks, and those of the permissions besides.
"""

from __future__ import annotations

import array
import ctypes
import fcntl
import os
import stat
from contextlib import closing
from dataclasses import dataclass

from trainmedic_server.agent.disk import checkpoints, search
from trainmedic_server.agent.disk.filesystems import Root, freed_bytes, inode_of, open_directory, stored_bytes
from trainmedic_server.agent.disk.open_files import FileUsage
from trainmedic_server.agent.disk.report import Reason
from trainmedic_server.agent.disk.rules import AgeBy
from trainmedic_server.agent.disk.search import MatchedCheckpoint, MatchedFile
from trainmedic_server.agent.disk.throttle import Throttle
from trainmedic_server.agent.disk.walk import DELETING, WalkedDirectory

_OPEN_FILE = os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOCTTY

# ioctl_iflags(2): _IOR('f', 1, long) and two of its flags.
_FS_IOC_GETFLAGS, _IMMUTABLE, _APPEND_ONLY = 0x80086601, 0x10, 0x20
# fallocate(2), which Python has without its flags only.
_KEEP_SIZE, _PUNCH_HOLE = 0x01, 0x02
_libc = ctypes.CDLL(None, use_errno=True)
_libc.fallocate.argtypes = (ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64)


@dataclass(frozen=True, slots=True)
class FileRemover:
    """Deletes and empties files, or, in a trial run, says what would happen."""

    usage: FileUsage
    age_by: AgeBy
    cutoff_ns: int
    """As for the search."""
    dry_run: bool

    def delete(self, parent: int, file: MatchedFile) -> int | Reason:
        """The bytes that the deletion frees, or why the file was left. `parent` is its open directory."""
        fd: int | None = None
        try:
            status = os.stat(file.name, dir_fd=parent, follow_symlinks=False)
            if (reason := _difference(status, file)) is not None:
                return reason
            if self.age_by.last_used_ns(status) != file.last_used_ns:
                return Reason.CHANGED
            fd = _open_for_reading(parent, file.name)
            # Another file may have come under the name since it was looked at.
            if fd is not None and not os.path.samestat(os.fstat(fd), status):
                return Reason.CHANGED
            if (reason := self.usage.obstacle(fd, file.inode)) is not None:
                return reason
            if self.dry_run:
                return _refusal(parent, status, fd) or stored_bytes(status)
            # The lease on `fd` lasts until then, so no process opens the file between the check and the deletion.
            os.unlink(file.name, dir_fd=parent)
            return stored_bytes(status)
        except OSError as error:
            return Reason.of(error)
        finally:
            if fd is not None:
                os.close(fd)

    def truncate(self, parent: int, file: MatchedFile) -> int | Reason:
        """The bytes that emptying the file frees, or why it was left.

        It may have been written since the search met it, but has to be old enough still.
        """
        fd: int | None = None
        try:
            # It is not opened for writing before it is known to be a regular file: opening a device can act on it.
            if (reason := _difference(os.stat(file.name, dir_fd=parent, follow_symlinks=False), file)) is not None:
                return reason
            fd = os.open(file.name, os.O_WRONLY | _OPEN_FILE, dir_fd=parent)
            status = os.fstat(fd)
            if (reason := _difference(status, file)) is not None:
                return reason
            if self.age_by.last_used_ns(status) > self.cutoff_ns:
                return Reason.YOUNG
            return self._empty(fd, status)
        except OSError as error:
            return Reason.of(error)
        finally:
            if fd is not None:
                os.close(fd)

    def _empty(self, fd: int, status: os.stat_result) -> int | Reason:
        stored = stored_bytes(status)
        if self.usage.may_truncate(fd, inode_of(status)):
            if not self.dry_run:
                os.ftruncate(fd, 0)
            return stored
        whole_blocks = status.st_size // status.st_blksize * status.st_blksize
        if not whole_blocks:
            return Reason.EMPTY
        if self.dry_run:
            return max(0, stored - (status.st_blksize if status.st_size > whole_blocks else 0))
        _punch_hole(fd, whole_blocks)
        return max(0, stored - stored_bytes(os.fstat(fd)))


@dataclass(frozen=True, slots=True)
class CheckpointRemoval:
    """The result for one checkpoint: files and bytes deleted, and why not all of it, if so."""

    files: int = 0
    bytes: int = 0
    reason: Reason | None = None


@dataclass(frozen=True, slots=True)
class CheckpointRemover:
    """Deletes checkpoints, or, in a trial run, says what would happen."""

    usage: FileUsage
    throttle: Throttle
    age_by: AgeBy
    cutoff_ns: int
    """As for the search."""
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
            if (reason := self._obstacle(directory, fd)) is not None:
                return CheckpointRemoval(reason=reason)
            if self.dry_run:
                reason = _refusal(parent, status, fd) or _refusal(fd, status, None)
                return (
                    CheckpointRemoval(reason=reason)
                    if reason
                    else CheckpointRemoval(checkpoint.contents.files, checkpoint.contents.bytes)
                )
            return self._delete(directory, parent, fd)
        except OSError as error:
            return CheckpointRemoval(reason=Reason.of(error))
        finally:
            for descriptor in (parent, fd):
                if descriptor >= 0:
                    os.close(descriptor)

    def _delete(self, directory: WalkedDirectory, parent: int, fd: int) -> CheckpointRemoval:
        name = hidden_name = directory.name
        if not name.startswith(DELETING):
            hidden_name = f"{DELETING}{name}"
            os.rename(name, hidden_name, src_dir_fd=parent, dst_dir_fd=parent)
            # What was renamed may be another directory that came under the name meanwhile.
            is_same = os.path.samestat(os.stat(hidden_name, dir_fd=parent, follow_symlinks=False), os.fstat(fd))
            reason = self._obstacle(directory, fd) if is_same else Reason.CHANGED
            if reason is not None:
                os.rename(hidden_name, name, src_dir_fd=parent, dst_dir_fd=parent)
                return CheckpointRemoval(reason=reason)
        contents = _ContentsRemoval(self.throttle, directory.root, self.cutoff_ns)
        reason = contents.run(fd)
        if reason is None:
            try:
                os.rmdir(hidden_name, dir_fd=parent)
            except OSError as error:
                reason = Reason.of(error)
        return CheckpointRemoval(contents.files, contents.bytes, reason)

    def _obstacle(self, directory: WalkedDirectory, fd: int) -> Reason | None:
        """Why the open checkpoint must not be deleted now."""
        opened = WalkedDirectory(directory.root, directory.parent, directory.name, directory.depth, fd)
        contents = search.survey(opened, self.age_by, self.throttle)
        if contents.obstacle is not None:
            return contents.obstacle
        if checkpoints.is_pinned(fd):
            return Reason.PINNED
        # Last, since looking for users of each file costs most.
        return Reason.YOUNG if contents.last_used_ns > self.cutoff_ns else self._used(opened)

    def _used(self, directory: WalkedDirectory) -> Reason | None:
        """Whether any file in it is in use."""
        with closing(directory.walk_all(self.throttle, lambda *_: None, lambda *_: True)) as entries:
            for inner, entry in entries:
                if entry is not None and entry.is_file(follow_symlinks=False):
                    reason = self._file_used(inner.fd, entry.name)
                    if reason is not None:
                        return reason
        return self.throttle.stop_reason

    def _file_used(self, parent: int, name: str) -> Reason | None:
        fd = _open_for_reading(parent, name)
        if fd is None:
            return self.usage.obstacle(None, inode_of(os.stat(name, dir_fd=parent, follow_symlinks=False)))
        try:
            return self.usage.obstacle(fd, inode_of(os.fstat(fd)))
        finally:
            os.close(fd)


@dataclass(slots=True)
class _ContentsRemoval:
    """Deletes what is in a directory, from the leaves up; the first thing that cannot be deleted ends it.

    So does something that was written, or mounted, after the checkpoint was looked through.
    """

    throttle: Throttle
    root: Root
    cutoff_ns: int
    files: int = 0
    bytes: int = 0

    def run(self, fd: int) -> Reason | None:
        """Empty the open directory; why it could not be emptied, if so."""
        inner: list[tuple[int, str]] = []
        try:
            while True:
                current = inner[-1][0] if inner else fd
                child = self._unlink_files(current)
                if isinstance(child, Reason):
                    return child
                if child is not None:
                    inner.append((open_directory(current, child), child))
                    if not self.root.contains(inner[-1][0]):
                        return Reason.MOUNT_POINT
                elif inner:
                    emptied, name = inner.pop()
                    os.close(emptied)
                    os.rmdir(name, dir_fd=inner[-1][0] if inner else fd)
                else:
                    return None
        except OSError as error:
            return Reason.of(error)
        finally:
            for descriptor, _ in inner:
                os.close(descriptor)

    def _unlink_files(self, fd: int) -> str | Reason | None:
        """Delete the files of a directory; stops at a directory in it, whose name it returns, or for a reason."""
        with os.scandir(fd) as entries:
            for entry in entries:
                if entry.is_dir(follow_symlinks=False):
                    return entry.name
                status = os.stat(entry.name, dir_fd=fd, follow_symlinks=False)
                if stat.S_ISDIR(status.st_mode):
                    return entry.name
                if stat.S_ISREG(status.st_mode) and status.st_mtime_ns > self.cutoff_ns:
                    return Reason.YOUNG
                os.unlink(entry.name, dir_fd=fd)
                self.files += 1
                self.bytes += freed_bytes(status)
                if not self.throttle.may_continue():
                    return self.throttle.stop_reason
        return None


def _difference(status: os.stat_result, file: MatchedFile) -> Reason | None:
    """Why the file is not the one that the search met, or must not be touched any more; None if it may be."""
    if inode_of(status) != file.inode or not stat.S_ISREG(status.st_mode):
        return Reason.CHANGED
    return Reason.HARD_LINK if status.st_nlink > 1 else None


def _open_for_reading(parent: int, name: str) -> int | None:
    """The file, open for reading; None where that is not permitted. Raises OSError."""
    try:
        return os.open(name, os.O_RDONLY | _OPEN_FILE, dir_fd=parent)
    except PermissionError:
        return None


def _refusal(parent: int, status: os.stat_result, fd: int | None) -> Reason | None:
    """Why the system would not let this process take a name out of the directory `parent`; None where it would."""
    directory = os.fstat(parent)
    if os.fstatvfs(parent).f_flag & os.ST_RDONLY:
        return Reason.READ_ONLY
    if not os.access(".", os.W_OK | os.X_OK, dir_fd=parent, effective_ids=True):
        return Reason.NOT_PERMITTED
    own = os.geteuid()
    if directory.st_mode & stat.S_ISVTX and own not in (0, directory.st_uid, status.st_uid):
        return Reason.NOT_PERMITTED
    if _is_unchangeable(parent) or (fd is not None and _is_unchangeable(fd)):
        return Reason.NOT_PERMITTED
    return None


def _is_unchangeable(fd: int) -> bool:
    """Whether a file or directory has the attribute "immutable" or "append only"."""
    flags = array.array("l", [0])
    try:
        fcntl.ioctl(fd, _FS_IOC_GETFLAGS, flags)
    except OSError:
        return False  # a filesystem without attributes
    return bool(flags[0] & (_IMMUTABLE | _APPEND_ONLY))


def _punch_hole(fd: int, length: int) -> None:
    """Give back what the first `length` bytes of a file take on the disk; they read as zeros then. Raises OSError."""
    if _libc.fallocate(fd, _KEEP_SIZE | _PUNCH_HOLE, 0, length) < 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
