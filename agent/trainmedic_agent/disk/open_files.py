"""Whether a file is in use: by a write lease from the kernel, or else by reading what every process has open.

The kernel grants a write lease (`acquire_write_lease`) only if no other process has the file open or mapped, in any
container. It needs no view of other processes, is certain, and costs three system calls. It cannot be had for a file
of another user without CAP_LEASE, nor on filesystems without leases (NFS, Lustre and others).

There, and where it matters *how* a file is open, the descriptors and mappings of every process are read, at most once
in `FRESH_SECONDS` for a filesystem. Of what they have open on other ones nothing is asked that a server would have to
answer: it may hang, and any user can mount one that does. What was read counts as an answer only if all processes
could be seen: in the first PID namespace, with ``/proc`` not restricted by ``hidepid``, and as root or with
CAP_SYS_PTRACE. If not, what is not known to be unused is left (`Reason.OPEN_UNKNOWN`). On a filesystem that several
machines share, neither way sees what the others have open: there only the age of a file speaks for it.
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

FRESH_SECONDS = 10.0
_FIRST_PID_NAMESPACE = 0xEFFFFFFC
"""Its inode number, fixed in the kernel (PROC_PID_INIT_INO)."""
_KERNEL_THREAD = 0x00200000
"""PF_KTHREAD, in field 9 of /proc/PID/stat: kernel threads have no descriptors to look at."""

_WITHOUT_FILES = ("/dev/", "/proc/", "/sys/")
_SHARED_MEMORY = "/dev/shm/"  # noqa: S108
_DESCRIPTORS_PER_CHECK = 128
"""Descriptors of a process between two looks at the clock."""
# Of statx(2): its flags, and where its result has the two numbers of the device.
_FROM_HERE, _DO_NOT_SYNC = -100, 0x4000
_STATX_BYTES, _STATX_DEVICE_AT, _STATX_DEVICE = 256, 136, struct.Struct("II")
_libc = ctypes.CDLL(None, use_errno=True)


def acquire_write_lease(fd: int) -> bool:
    """Take a write lease on the file (fcntl(2), F_SETLEASE); return False if another process has it open or mapped.

    While `fd` is open, other opens of the file block. Raises OSError if the kernel gives no lease for another reason:
    the file belongs to another user and this process lacks CAP_LEASE, or the filesystem has no leases.
    """
    # When another process opens the file, the kernel sends this one a signal. The default, SIGIO, would end it;
    # SIGURG is ignored by default.
    fcntl.fcntl(fd, fcntl.F_SETSIG, signal.SIGURG)
    try:
        fcntl.fcntl(fd, fcntl.F_SETLEASE, fcntl.F_WRLCK)
    except BlockingIOError:
        return False
    return True


class OpenFileSnapshot(Struct):
    """What all processes had open on one filesystem at one moment."""

    device: int
    is_complete: bool = True
    """Whether everything that every process has open could be seen."""
    open: set[int] = field(default_factory=set)
    """By inode number."""
    writers: dict[int, bool] = field(default_factory=dict)
    """For each file that is open for writing, whether all of its writers append."""
    mapped: set[int] = field(default_factory=set)
    """What is mapped, on any filesystem: the table of mappings does not name each by the device that stat(2) does."""

    def has(self, inode: Inode) -> bool:
        return inode[1] in self.open or inode[1] in self.mapped


class FileUsage:
    """Says for one cleaning which files are in use. `proc` is where the process filesystem is mounted."""

    def __init__(self, clocks: Clocks, throttle: Throttle, proc: str = "/proc") -> None:
        self._clocks = clocks
        self._throttle = throttle
        self._proc = Path(proc)
        self._snapshots: dict[int, tuple[float, OpenFileSnapshot]] = {}
        """By device, the last one, and when it was taken."""

    def obstacle(self, fd: int | None, inode: Inode) -> Reason | None:
        """Why a file must not be deleted; None if it is not in use, and cannot be opened until `fd` is closed.

        `fd` has the file open for reading; it is None where that is not permitted.
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
        """Whether the length of an open file can be set to 0: nobody else has it open, or all its writers append."""
        try:
            if acquire_write_lease(fd):
                return True
        except OSError:  # no leases here
            pass
        return self.all_writers_append(inode)

    def all_writers_append(self, inode: Inode) -> bool:
        """Whether it is certain that every process which has the file open for writing appends to it."""
        snapshot = self._recent_snapshot(inode)
        return snapshot.is_complete and snapshot.writers.get(inode[1], True)

    def sees_every_process(self) -> bool:
        """Whether ``/proc`` lists every process of the machine; whether their files can be read is another question,
        of privilege."""
        try:
            lines = (self._proc / "self/mounts").read_bytes().split(b"\n")
        except OSError:
            return False
        # Users mount in their own directories, and so choose names in this table; the kernel escapes blanks in them.
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
            # Half a snapshot would be of no use. So only the end of the cleaning ends it, and it says nothing then.
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
        """Add what one process has open; whether all of it could be seen."""
        try:
            with os.scandir(process / "fd") as descriptors:
                for count, descriptor in enumerate(descriptors):
                    self._add_descriptor(snapshot, process, descriptor)
                    # A process may have a million of them.
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
            if flags & os.O_PATH:  # it names the file and can neither read nor write it
                return
            number = os.stat(descriptor.path).st_ino  # noqa: PTH116
        except (FileNotFoundError, ProcessLookupError):
            return  # closed meanwhile
        snapshot.open.add(number)
        if flags & os.O_ACCMODE != os.O_RDONLY:
            snapshot.writers[number] = snapshot.writers.get(number, True) and bool(flags & os.O_APPEND)

    def _add_mappings(self, snapshot: OpenFileSnapshot, process: Path) -> None:
        # As bytes, since a path in it may hold anything but a line feed, which the kernel escapes.
        with (process / "maps").open("rb") as lines:
            for line in lines:
                # address perms offset dev inode path
                parts = line.split(None, 5)
                if len(parts) == 6 and parts[4] != b"0":
                    snapshot.mapped.add(int(parts[4]))


def device_of(path: str) -> int:
    """The device of what is open, by its path in ``/proc``, without asking its filesystem for anything else.

    A network filesystem or one of FUSE is not waited for, and tells it also to whom it denies everything else. Raises
    OSError.
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
