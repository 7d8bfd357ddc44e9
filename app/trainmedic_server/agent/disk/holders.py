"""Whether somebody uses a file: the kernel's own answer, and where it gives none, a look at every process.

A write lease (`kernel.lease`) is given only if nobody else has the file open or mapped, whoever it is and in
whichever container. It needs no view of other processes, is sure, and costs three system calls. It cannot be
had for a file of another user without CAP_LEASE, nor on filesystems without leases (NFS, Lustre and others).

There, and where it has to be known *how* a file is open, every process's descriptors and mappings are gone
through, once in `FRESH` seconds at most. That counts as an answer only if all of them could be seen: in the
first PID namespace, with ``/proc`` not restricted by ``hidepid``, and as root or with CAP_SYS_PTRACE. If
not, what is not known to be unused is left (`Reason.OPEN_UNKNOWN`). On a filesystem that several machines
share, neither sees what the others have open: there the age must speak for it.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from trainmedic_server.agent.disk import kernel
from trainmedic_server.agent.disk.pace import Pace, Time
from trainmedic_server.agent.disk.reasons import Reason

FRESH = 10.0
_FIRST_PID_NAMESPACE = 0xEFFFFFFC
"""Its inode number, fixed in the kernel (PROC_PID_INIT_INO)."""
_KERNEL_THREAD = 0x00200000
"""PF_KTHREAD, in field 9 of /proc/PID/stat: they have no descriptors to look at."""

_NO_FILES = ("/dev/", "/proc/", "/sys/")
_SHARED_MEMORY = "/dev/shm/"  # noqa: S108

Inode = tuple[int, int]
"""Device and inode number."""


@dataclass(slots=True)
class Seen:
    """What all processes have open on some devices.

    ``writers`` says of each file that is open for writing whether all of its writers append.
    """

    complete: bool = True
    open: set[Inode] = field(default_factory=set)
    writers: dict[Inode, bool] = field(default_factory=dict)


class Holders:
    """Who uses what, for one cleaning. `proc` is where the process filesystem is mounted."""

    def __init__(self, clock: Time, pace: Pace, proc: str = "/proc") -> None:
        self._clock = clock
        self._pace = pace
        self._proc = Path(proc)
        self._seen = Seen()
        self._at: float | None = None

    def user_of(self, fd: int | None, inode: Inode) -> Reason | None:
        """Why a file must not be deleted; None where nobody uses it, and until `fd` is closed nobody will.

        `fd` has it open for reading; it is None where that is not permitted.
        """
        try:
            if fd is not None:
                return None if kernel.lease(fd) else Reason.OPEN
        except OSError:  # no leases here
            pass
        seen = self.seen()
        if inode in seen.open:
            return Reason.OPEN
        return None if seen.complete else Reason.OPEN_UNKNOWN

    def all_writers_append(self, inode: Inode) -> bool:
        """Whether it is known of a file that whoever has it open for writing appends to it."""
        seen = self.seen()
        return seen.complete and seen.writers.get(inode, True)

    def seen(self) -> Seen:
        """What all processes have open, as of a moment ago."""
        now = self._clock.steady()
        if self._at is None or now - self._at > FRESH:
            self._seen = self._look()
            self._at = self._clock.steady()
        return self._seen

    def sees_every_process(self) -> bool:
        """Whether the look at the processes, where it is needed, finds them all; what they have open is another
        question, of privilege."""
        return self._sees_all()

    def _look(self) -> Seen:
        seen = Seen(complete=self._sees_all())
        own = str(os.getpid())
        for process in self._processes():
            if process.name != own:
                seen.complete &= self._add(seen, process)
            self._pace.goes_on()
        return seen

    def _sees_all(self) -> bool:
        """Whether every process of the machine is listed in ``/proc``."""
        try:
            mounts = (self._proc / "self/mounts").read_text(encoding="utf-8", errors="replace").splitlines()
        except OSError:
            return False
        options = [line.split()[3] for line in mounts if line.split()[1:3] == [str(self._proc), "proc"]]
        hidden = any("hidepid=" in one and "hidepid=0" not in one for one in options)
        return self._is_first_namespace() and not hidden

    def _is_first_namespace(self) -> bool:
        try:
            return (self._proc / "self/ns/pid").stat().st_ino == _FIRST_PID_NAMESPACE
        except OSError:
            return False

    def _processes(self) -> Iterator[Path]:
        with os.scandir(self._proc) as entries:
            for entry in entries:
                if entry.name.isdigit():
                    yield self._proc / entry.name

    def _add(self, seen: Seen, process: Path) -> bool:
        """Add what one process has open; whether all of it could be seen."""
        try:
            for descriptor in (process / "fd").iterdir():
                self._add_descriptor(seen, process, descriptor)
            self._add_mappings(seen, process)
        except (FileNotFoundError, ProcessLookupError):
            return True  # it has ended
        except OSError:
            return _is_kernel_thread(process)
        return True

    def _add_descriptor(self, seen: Seen, process: Path, descriptor: Path) -> None:
        try:
            target = str(descriptor.readlink())
            if not target.startswith("/") or (target.startswith(_NO_FILES) and not target.startswith(_SHARED_MEMORY)):
                return
            facts = descriptor.stat()
            inode = (facts.st_dev, facts.st_ino)
            flags = _flags(process / "fdinfo" / descriptor.name)
        except (FileNotFoundError, ProcessLookupError):
            return  # closed meanwhile
        if flags & os.O_PATH:
            return
        seen.open.add(inode)
        if flags & os.O_ACCMODE != os.O_RDONLY:
            seen.writers[inode] = seen.writers.get(inode, True) and bool(flags & os.O_APPEND)

    def _add_mappings(self, seen: Seen, process: Path) -> None:
        with (process / "maps").open(encoding="utf-8", errors="surrogateescape") as lines:
            for line in lines:
                # address perms offset dev inode path
                parts = line.split(None, 5)
                if len(parts) == 6 and parts[4] != "0":
                    major, _, minor = parts[3].partition(":")
                    seen.open.add((os.makedev(int(major, 16), int(minor, 16)), int(parts[4])))


def _flags(path: Path) -> int:
    for line in path.read_text(encoding="ascii").splitlines():
        if line.startswith("flags:"):
            return int(line.split()[1], 8)
    return os.O_RDWR


def _is_kernel_thread(process: Path) -> bool:
    try:
        fields = (process / "stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
        return bool(int(fields[6]) & _KERNEL_THREAD)
    except (OSError, IndexError, ValueError):
        return False
