"""Detection of files in use, by a write lease or by scanning ``/proc``.

The kernel grants a write lease only if no other process has the file open or mapped. NFS, Lustre and others have no
leases.

A scan is conclusive only in the first PID namespace, without ``hidepid``, as root or with CAP_SYS_PTRACE; else the file
is left. It never queries other file systems, which may hang. Use by other machines is invisible.
"""

from __future__ import annotations

import ctypes
import fcntl
import math
import os
import signal
import struct
from collections.abc import Iterator
from pathlib import Path

from msgspec import Struct, field

from trainmedic_agent.disk.filesystems import Inode
from trainmedic_agent.disk.report import Reason
from trainmedic_agent.disk.throttle import Clocks, Throttle

FRESH_SECONDS = 10.0  # seconds for which a scan is used
_FIRST_PID_NAMESPACE = 0xEFFFFFFC  # Kernel, PROC_PID_INIT_INO
_KERNEL_THREAD = 0x00200000  # PF_KTHREAD, in field 9 of /proc/PID/stat

_WITHOUT_FILES = ("/dev/", "/proc/", "/sys/")
_SHARED_MEMORY = "/dev/shm/"  # noqa: S108
_DESCRIPTORS_PER_CHECK = 128
# statx(2): flags, and offset of the device numbers in its result.
_FROM_HERE, _DO_NOT_SYNC = -100, 0x4000
_STATX_BYTES, _STATX_DEVICE_AT, _STATX_DEVICE = 256, 136, struct.Struct("II")
_libc = ctypes.CDLL(None, use_errno=True)


def acquire_write_lease(fd: int) -> bool:
    """Take a write lease (fcntl(2), F_SETLEASE), which blocks other opens until `fd` is closed.

    Returns False if the file is in use. Raises OSError without leases.
    """
    # The kernel signals when another process opens the file. The default SIGIO would kill this process; SIGURG is
    # ignored.
    fcntl.fcntl(fd, fcntl.F_SETSIG, signal.SIGURG)
    try:
        fcntl.fcntl(fd, fcntl.F_SETLEASE, fcntl.F_WRLCK)
    except BlockingIOError:
        return False
    return True


class OpenFileSnapshot(Struct):
    """Inodes in use."""

    device: int
    is_complete: bool = True  # False if some process's files may be missing
    open: set[int] = field(default_factory=set)
    writers: dict[int, bool] = field(default_factory=dict)  # by inode of files with writers: True if all of them append
    mapped: set[int] = field(default_factory=set)
    """Inodes on any device: mappings may state another than stat(2)."""

    def has(self, inode: Inode) -> bool:
        return inode[1] in self.open or inode[1] in self.mapped


class FileUsage:
    def __init__(self, clocks: Clocks, throttle: Throttle, proc: str = "/proc") -> None:
        self._clocks = clocks
        self._throttle = throttle
        self._proc = Path(proc)
        self._snapshots: dict[int, tuple[float, OpenFileSnapshot]] = {}

    def obstacle(self, fd: int | None, inode: Inode) -> Reason | None:
        """Return why a file must not be deleted; None if unused, with a lease until `fd` is closed.

        `fd` is None if reading is not permitted.
        """
        try:
            if fd is not None:
                return None if acquire_write_lease(fd) else Reason.OPEN
        except OSError:  # no leases here
            pass
        snapshot = self._recent_snapshot(inode)
        if snapshot.has(inode):
            return Reason.OPEN
        return None if snapshot.is_complete else Reason.OPEN_UNKNOWN

    def may_truncate(self, fd: int, inode: Inode) -> bool:
        """Return whether no other process has the file open, or all writers append."""
        try:
            if acquire_write_lease(fd):
                return True
        except OSError:  # no leases here
            pass
        return self.all_writers_append(inode)

    def all_writers_append(self, inode: Inode) -> bool:
        snapshot = self._recent_snapshot(inode)
        return snapshot.is_complete and snapshot.writers.get(inode[1], True)

    def sees_every_process(self) -> bool:
        try:
            lines = (self._proc / "self/mounts").read_bytes().split(b"\n")
        except OSError:
            return False
        # Users can mount in their own directories, so names here are untrusted; the kernel escapes blanks in them.
        mounts = [line.split(b" ") for line in lines]
        options = [parts[3] for parts in mounts if parts[1:3] == [os.fsencode(self._proc), b"proc"] and len(parts) > 3]
        is_hiding = any(b"hidepid=" in text and b"hidepid=0" not in text for text in options)
        return self._is_first_namespace() and not is_hiding

    def _is_first_namespace(self) -> bool:
        try:
            return (self._proc / "self/ns/pid").stat().st_ino == _FIRST_PID_NAMESPACE
        except OSError:
            return False

    def _recent_snapshot(self, inode: Inode) -> OpenFileSnapshot:
        device = inode[0]
        taken_at, snapshot = self._snapshots.get(device, (-math.inf, None))
        if snapshot is None or self._clocks.steady() - taken_at > FRESH_SECONDS:
            snapshot = self._take_snapshot(device)
            self._snapshots[device] = (self._clocks.steady(), snapshot)
        return snapshot

    def _take_snapshot(self, device: int) -> OpenFileSnapshot:
        snapshot = OpenFileSnapshot(device, is_complete=self.sees_every_process())
        own_pid = str(os.getpid())
        for process in self._processes():
            if process.name != own_pid:
                snapshot.is_complete &= self._add_process(snapshot, process)
            # An incomplete snapshot is useless, so only the cleaning's end stops it, and it is inconclusive then.
            if not self._throttle.may_continue():
                snapshot.is_complete = False
                break
        return snapshot

    def _processes(self) -> Iterator[Path]:
        with os.scandir(self._proc) as entries:
            for entry in entries:
                if entry.name.isdigit():
                    yield self._proc / entry.name

    def _add_process(self, snapshot: OpenFileSnapshot, process: Path) -> bool:
        """Return False if the process's files could not all be seen."""
        try:
            with os.scandir(process / "fd") as descriptors:
                for count, descriptor in enumerate(descriptors):
                    self._add_descriptor(snapshot, process, descriptor)
                    # A process may have a million descriptors.
                    if count % _DESCRIPTORS_PER_CHECK == 0 and not self._throttle.may_continue():
                        return False
            self._add_mappings(snapshot, process)
        except (FileNotFoundError, ProcessLookupError):
            return True  # the process has ended
        except OSError:
            return _is_kernel_thread(process)
        return True

    def _add_descriptor(self, snapshot: OpenFileSnapshot, process: Path, descriptor: os.DirEntry[str]) -> None:
        try:
            target = os.readlink(descriptor.path)  # noqa: PTH115
            if not target.startswith("/") or (
                target.startswith(_WITHOUT_FILES) and not target.startswith(_SHARED_MEMORY)
            ):
                return
            if device_of(descriptor.path) != snapshot.device:
                return
            flags = _flags(process / "fdinfo" / descriptor.name)
            if flags & os.O_PATH:  # cannot read or write the file
                return
            number = os.stat(descriptor.path).st_ino  # noqa: PTH116
        except (FileNotFoundError, ProcessLookupError):
            return  # closed in between
        snapshot.open.add(number)
        if flags & os.O_ACCMODE != os.O_RDONLY:
            snapshot.writers[number] = snapshot.writers.get(number, True) and bool(flags & os.O_APPEND)

    def _add_mappings(self, snapshot: OpenFileSnapshot, process: Path) -> None:
        # Bytes, because a path may contain anything except a line feed, which is escaped.
        with (process / "maps").open("rb") as lines:
            for line in lines:
                # address perms offset dev inode path
                parts = line.split(None, 5)
                if len(parts) == 6 and parts[4] != b"0":
                    snapshot.mapped.add(int(parts[4]))


def device_of(path: str) -> int:
    """Return the device of a ``/proc`` descriptor path without a request to its file system, which may hang.

    Raises OSError.
    """
    status = ctypes.create_string_buffer(_STATX_BYTES)
    if _libc.statx(_FROM_HERE, os.fsencode(path), _DO_NOT_SYNC, 0, status) < 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number), path)
    return os.makedev(*_STATX_DEVICE.unpack_from(status, _STATX_DEVICE_AT))


def _flags(fdinfo: Path) -> int:
    for line in fdinfo.read_bytes().split(b"\n"):
        if line.startswith(b"flags:"):
            return int(line.split()[1], 8)
    return os.O_RDWR


def _is_kernel_thread(process: Path) -> bool:
    try:
        fields = (process / "stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
        return bool(int(fields[6]) & _KERNEL_THREAD)
    except (OSError, IndexError, ValueError):
        return False
