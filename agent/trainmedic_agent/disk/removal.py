"""Deletion, truncation or shrinking of one file, after a final check.

- **Deletion** unlinks by name: Linux cannot unlink by descriptor. A process with write access has microseconds to
  replace the file.
- **Truncation** needs a log that no process has open, or whose writers append. Other writers would continue at their
  old offset after zeros, so a hole is punched instead.
- **Shrinking** punches a hole in all but the last bytes.
"""

from __future__ import annotations

import array
import ctypes
import fcntl
import os
import stat
from collections.abc import Callable

from msgspec import Struct

from trainmedic_agent.disk.access_times import AccessTimes
from trainmedic_agent.disk.filesystems import inode_of, stored_bytes
from trainmedic_agent.disk.open_files import FileUsage
from trainmedic_agent.disk.place import is_in_place
from trainmedic_agent.disk.report import Reason
from trainmedic_agent.disk.rules import AgeBy
from trainmedic_agent.disk.search import MatchedFile

_OPEN_FILE = os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOCTTY

# ioctl_iflags(2)
_FS_IOC_GETFLAGS, _IMMUTABLE, _APPEND_ONLY, _NO_ACCESS_TIME = 0x80086601, 0x10, 0x20, 0x80
# fallocate(2); Python's version has no flags.
_KEEP_SIZE, _PUNCH_HOLE = 0x01, 0x02
_libc = ctypes.CDLL(None, use_errno=True)
_libc.fallocate.argtypes = (ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64)


class FileRemover(Struct, frozen=True):
    """Methods return the freed bytes, or why the file was left."""

    usage: FileUsage
    age_by: AgeBy
    cutoff_ns: int
    dry_run: bool

    def delete(self, parent: int, file: MatchedFile) -> int | Reason:
        fd: int | None = None
        try:
            status = os.stat(file.name, dir_fd=parent, follow_symlinks=False)
            if (reason := _difference(status, file)) is not None:
                return reason
            if self.age_by.last_used_ns(status, file.directory.root.access_times) != file.last_used_ns:
                return Reason.CHANGED
            fd = open_for_reading(parent, file.name)
            # Another file may have taken the name since the stat.
            if fd is not None and not os.path.samestat(os.fstat(fd), status):
                return Reason.CHANGED
            if (reason := self.usage.obstacle(fd, file.inode)) is not None:
                return reason
            if may_hide_reads(fd, self.age_by, file.directory.root.access_times):
                return Reason.OPEN_UNKNOWN
            if not is_in_place(parent, file.directory.path()):
                return Reason.MOVED
            if self.dry_run:
                return refusal(parent, status, fd) or stored_bytes(status)
            # A lease on `fd`, if `obstacle` got one, prevents an open between check and deletion.
            os.unlink(file.name, dir_fd=parent)
            return stored_bytes(status)
        except OSError as error:
            return Reason.of(error)
        finally:
            if fd is not None:
                os.close(fd)

    def truncate(self, parent: int, file: MatchedFile) -> int | Reason:
        """Empty a file that is still old enough, though possibly written since the search."""

        def empty(fd: int) -> int | Reason:
            # Verify the place last: the check may take seconds.
            may_truncate = self.usage.may_truncate(fd, file.inode)
            if not is_in_place(parent, file.directory.path()):
                return Reason.MOVED
            status = os.fstat(fd)
            return self._truncate(fd, status) if may_truncate else self._punch_hole(fd, status, status.st_size)

        return self._change(parent, file, empty)

    def shrink(self, parent: int, file: MatchedFile, keep_tail: int) -> int | Reason:
        """Free all but the last `keep_tail` bytes; the beginning reads as zeros, and the length stays."""

        def shrink_open(fd: int) -> int | Reason:
            if not is_in_place(parent, file.directory.path()):
                return Reason.MOVED
            status = os.fstat(fd)
            return self._punch_hole(fd, status, status.st_size - keep_tail)

        return self._change(parent, file, shrink_open)

    def _change(self, parent: int, file: MatchedFile, act: Callable[[int], int | Reason]) -> int | Reason:
        fd: int | None = None
        try:
            # Check for a regular file first: opening a device for writing can act on it.
            if (reason := _difference(os.stat(file.name, dir_fd=parent, follow_symlinks=False), file)) is not None:
                return reason
            fd = os.open(file.name, os.O_WRONLY | _OPEN_FILE, dir_fd=parent)
            status = os.fstat(fd)
            if (reason := _difference(status, file)) is not None:
                return reason
            if self.age_by.last_used_ns(status, file.directory.root.access_times) > self.cutoff_ns:
                return Reason.YOUNG
            if may_hide_reads(fd, self.age_by, file.directory.root.access_times):
                return Reason.OPEN_UNKNOWN
            return act(fd)
        except OSError as error:
            return Reason.of(error)
        finally:
            if fd is not None:
                os.close(fd)

    def _truncate(self, fd: int, status: os.stat_result) -> int:
        if not self.dry_run:
            os.ftruncate(fd, 0)
        return stored_bytes(status)

    def _punch_hole(self, fd: int, status: os.stat_result, length: int) -> int | Reason:
        stored = stored_bytes(status)
        hole = max(0, length) // status.st_blksize * status.st_blksize
        if not hole:
            return Reason.EMPTY
        if self.dry_run:
            # The bytes after the hole use at least the blocks that they fill.
            rest = -(-(status.st_size - hole) // status.st_blksize) * status.st_blksize
            return max(0, stored - rest) or Reason.EMPTY
        _punch_hole(fd, hole)
        return max(0, stored - stored_bytes(os.fstat(fd))) or Reason.EMPTY


def _difference(status: os.stat_result, file: MatchedFile) -> Reason | None:
    if inode_of(status) != file.inode or not stat.S_ISREG(status.st_mode):
        return Reason.CHANGED
    return Reason.HARD_LINK if status.st_nlink > 1 else None


def open_for_reading(parent: int, name: str) -> int | None:
    """Return None if not permitted. Raises OSError."""
    try:
        return os.open(name, os.O_RDONLY | _OPEN_FILE, dir_fd=parent)
    except PermissionError:
        return None


def refusal(parent: int, status: os.stat_result, fd: int | None) -> Reason | None:
    """Return why the system would refuse to delete an entry, if so."""
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


def may_hide_reads(fd: int | None, age_by: AgeBy, access_times: AccessTimes) -> bool:
    """Return whether a file attribute may hide reads that count."""
    if age_by is not AgeBy.USED:
        return False
    if fd is None:  # its attributes are unreadable too; without access times, reads are watched anyway
        return not access_times.untraced
    return bool(_attributes(fd) & _NO_ACCESS_TIME)


def _is_unchangeable(fd: int) -> bool:
    return bool(_attributes(fd) & (_IMMUTABLE | _APPEND_ONLY))


def _attributes(fd: int) -> int:
    flags = array.array("l", [0])
    try:
        fcntl.ioctl(fd, _FS_IOC_GETFLAGS, flags)
    except OSError:
        return 0  # file system without attributes
    return flags[0]


def _punch_hole(fd: int, length: int) -> None:
    if _libc.fallocate(fd, _KEEP_SIZE | _PUNCH_HOLE, 0, length) < 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
