"""Whether a file is in use: by a write lease from the kernel, or else by reading what every process has open.

The kernel grants a write lease (`acquire_write_lease`) only if no other process has the file open or mapped, in any
container. It needs no view of other processes, is certain, and costs three system calls. It cannot be had for a file
of another user without CAP_LEASE, nor on filesystems without leases (NFS, Lustre and others).

There, and where it matters *how* a file is open, the descriptors and mappings of every process are read, at most once
in `FRESH_SECONDS`. That counts as an answer only if all processes could be seen: in the first PID namespace, with
``/proc`` not restricted by ``hidepid``, and as root or with CAP_SYS_PTRACE. If not, what is not known to be unused
is left (`Reason.OPEN_UNKNOWN`). On a filesystem that several machines share, neither way sees what the others have
open: there only the age of a file speaks for it.
"""

from __future__ import annotations

import fcntl
import os
import signal
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from trainmedic_server.agent.disk.filesystems import Inode, inode_of
from trainmedic_server.agent.disk.report import Reason
from trainmedic_server.agent.disk.throttle import Clocks, Throttle

FRESH_SECONDS = 10.0
_FIRST_PID_NAMESPACE = 0xEFFFFFFC
"""Its inode number, fixed in the kernel (PROC_PID_INIT_INO)."""
_KERNEL_THREAD = 0x00200000
"""PF_KTHREAD, in field 9 of /proc/PID/stat: kernel threads have no descriptors to look at."""

_WITHOUT_FILES = ("/dev/", "/proc/", "/sys/")
_SHARED_MEMORY = "/dev/shm/"  # noqa: S108


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


@dataclass(slots=True)
class OpenFileSnapshot:
    """What all processes had open at one moment."""

    is_complete: bool = True
    """Whether everything that every process has open could be seen."""
    open: set[Inode] = field(default_factory=set)
    writers: dict[Inode, bool] = field(default_factory=dict)
    """For each file that is open for writing, whether all of its writers append."""


class FileUsage:
    """Says for one cleaning which files are in use. `proc` is where the process filesystem is mounted."""

    def __init__(self, clocks: Clocks, throttle: Throttle, proc: str = "/proc") -> None:
        self._clocks = clocks
        self._throttle = throttle
        self._proc = Path(proc)
        self._snapshot = OpenFileSnapshot()
        self._taken_at: float | None = None

    def obstacle(self, fd: int | None, inode: Inode) -> Reason | None:
        """Why a file must not be deleted; None if it is not in use, and cannot be opened until `fd` is closed.

        `fd` has the file open for reading; it is None where that is not permitted.
        """
        try:
            if fd is not None:
                return None if acquire_write_lease(fd) else Reason.OPEN
        except OSError:  # no leases here
            pass
        snapshot = self._recent_snapshot()
        if inode in snapshot.open:
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
        snapshot = self._recent_snapshot()
        return snapshot.is_complete and snapshot.writers.get(inode, True)

    def sees_every_process(self) -> bool:
        """Whether ``/proc`` lists every process of the machine; whether their files can be read is another question,
        of privilege."""
        try:
            mounts = (self._proc / "self/mounts").read_text(encoding="utf-8", errors="replace").splitlines()
        except OSError:
            return False
        options = [line.split()[3] for line in mounts if line.split()[1:3] == [str(self._proc), "proc"]]
        is_hiding = any("hidepid=" in text and "hidepid=0" not in text for text in options)
        return self._is_first_namespace() and not is_hiding

    def _is_first_namespace(self) -> bool:
        try:
            return (self._proc / "self/ns/pid").stat().st_ino == _FIRST_PID_NAMESPACE
        except OSError:
            return False

    def _recent_snapshot(self) -> OpenFileSnapshot:
        now = self._clocks.steady()
        if self._taken_at is None or now - self._taken_at > FRESH_SECONDS:
            self._snapshot = self._take_snapshot()
            self._taken_at = self._clocks.steady()
        return self._snapshot

    def _take_snapshot(self) -> OpenFileSnapshot:
        snapshot = OpenFileSnapshot(is_complete=self.sees_every_process())
        own_pid = str(os.getpid())
        for process in self._processes():
            if process.name != own_pid:
                snapshot.is_complete &= self._add_process(snapshot, process)
            # Only rests: half a snapshot would be of no use, so it is finished even when the cleaning is to end.
            self._throttle.may_continue()
        return snapshot

    def _processes(self) -> Iterator[Path]:
        with os.scandir(self._proc) as entries:
            for entry in entries:
                if entry.name.isdigit():
                    yield self._proc / entry.name

    def _add_process(self, snapshot: OpenFileSnapshot, process: Path) -> bool:
        """Add what one process has open; whether all of it could be seen."""
        try:
            for descriptor in (process / "fd").iterdir():
                self._add_descriptor(snapshot, process, descriptor)
            self._add_mappings(snapshot, process)
        except (FileNotFoundError, ProcessLookupError):
            return True  # the process has ended
        except OSError:
            return _is_kernel_thread(process)
        return True

    def _add_descriptor(self, snapshot: OpenFileSnapshot, process: Path, descriptor: Path) -> None:
        try:
            target = str(descriptor.readlink())
            if not target.startswith("/") or (
                target.startswith(_WITHOUT_FILES) and not target.startswith(_SHARED_MEMORY)
            ):
                return
            inode = inode_of(descriptor.stat())
            flags = _flags(process / "fdinfo" / descriptor.name)
        except (FileNotFoundError, ProcessLookupError):
            return  # closed meanwhile
        if flags & os.O_PATH:  # it names the file and can neither read nor write it
            return
        snapshot.open.add(inode)
        if flags & os.O_ACCMODE != os.O_RDONLY:
            snapshot.writers[inode] = snapshot.writers.get(inode, True) and bool(flags & os.O_APPEND)

    def _add_mappings(self, snapshot: OpenFileSnapshot, process: Path) -> None:
        with (process / "maps").open(encoding="utf-8", errors="surrogateescape") as lines:
            for line in lines:
                # address perms offset dev inode path
                parts = line.split(None, 5)
                if len(parts) == 6 and parts[4] != "0":
                    major, _, minor = parts[3].partition(":")
                    snapshot.open.add((os.makedev(int(major, 16), int(minor, 16)), int(parts[4])))


def _flags(fdinfo: Path) -> int:
    for line in fdinfo.read_text(encoding="ascii").splitlines():
        if line.startswith("flags:"):
            return int(line.split()[1], 8)
    return os.O_RDWR


def _is_kernel_thread(process: Path) -> bool:
    try:
        fields = (process / "stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
        return bool(int(fields[6]) & _KERNEL_THREAD)
    except (OSError, IndexError, ValueError):
        return False
