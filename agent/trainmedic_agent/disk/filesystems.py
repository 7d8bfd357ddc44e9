"""The roots of a rule, opened safely, and the free space of the filesystems on which they lie.

**Roots** are opened once for a command: each from ``/`` on, part by part, following no link. The directory that is
open then is the one on which the checks were made, whatever happens to its name afterwards. Refused is a root

- that is missing, or has a symbolic link on its way: its real path belongs in the policy;
- that belongs to somebody other than root, the agent's user, and the policy's ``owners``;
- whose way leads through a directory in which somebody else could put another in its place: one of another
  owner, or one that group or others may write in without the sticky bit;
- that is the filesystem of the system: ``/`` by another name;
- that is, or lies in, the agent's own state directory. One that lies below a root is `Root.protected`, and the walk
  does not enter it, under whatever name.

**Free** is what an unprivileged process may still use, as a share of the whole: node_exporter's
``node_filesystem_avail_bytes / node_filesystem_size_bytes``, on which alerts are written. A trial run frees nothing,
so there the bytes that it would have freed are added. Some filesystems (ZFS, btrfs) give space back some seconds
after a deletion; where what was deleted should be enough and the filesystem does not show it yet, it is given a
moment, so that no more is deleted than needed.

Not here: which paths a policy may name at all (``rules``), and what is below a root (``walk``).
"""

from __future__ import annotations

import os
import stat
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from msgspec import Struct

from trainmedic_agent.disk.access_times import KEPT, AccessTimes
from trainmedic_agent.disk.throttle import Throttle

_OPEN_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK
_LATE_SPACE_CHECKS, _LATE_SPACE_SECONDS = 20, 0.3
"""How often, and how many seconds apart, space that should be free is looked for; ZFS shows it within about five."""
_MAX_LATE_SPACE_WAITS = 2
"""Times that a filesystem is waited for: if it shows less even then, another process fills it."""
_BLOCK_BYTES = 512
"""Bytes in the unit of ``st_blocks``."""

Inode = tuple[int, int]
"""Device and inode number."""


def inode_of(facts: os.stat_result) -> Inode:
    return facts.st_dev, facts.st_ino


def stored_bytes(facts: os.stat_result) -> int:
    """What a file takes on the disk."""
    return facts.st_blocks * _BLOCK_BYTES


def freed_bytes(facts: os.stat_result) -> int:
    """What deleting a file frees: nothing where it has another name."""
    return stored_bytes(facts) if facts.st_nlink == 1 else 0


class Root(Struct, frozen=True):
    """An open root of a rule."""

    path: str
    fd: int
    device: int
    mount: int | None
    """The id of the mount by which the root was reached; see `mount_of`."""
    protected: Inode | None = None
    """A directory that is never entered, though it may lie below the root."""
    access_times: AccessTimes = KEPT
    """How far those of its files can be trusted; for a rule whose ages count from the last use."""

    def contains(self, fd: int) -> bool:
        """Whether an open directory is on the root's filesystem and mount."""
        return os.fstat(fd).st_dev == self.device and mount_of(fd) == self.mount


class OpenedRoots(Struct, frozen=True):
    """The roots of a rule that could be opened, in its order, and for each other path why it is refused."""

    roots: tuple[Root, ...]
    refused: Mapping[str, str]


@contextmanager
def opened_roots(
    paths: tuple[str, ...], owners: frozenset[int], protected: Inode | None = None
) -> Iterator[OpenedRoots]:
    """The roots, open while the block runs.

    `owners` may own a root, beside root and the agent's own user; `protected` is the agent's state directory.
    """
    trusted = owners | {0, os.geteuid()}
    roots: list[Root] = []
    refused: dict[str, str] = {}
    with ExitStack() as stack:
        for path in paths:
            root = _open_root(path, trusted, protected)
            if isinstance(root, str):
                refused[path] = root
                continue
            stack.callback(os.close, root.fd)
            if any(os.path.samestat(os.fstat(root.fd), os.fstat(other.fd)) for other in roots):
                refused[path] = f"{path} is the same directory as another root of the rule"
                continue
            roots.append(root)
        yield OpenedRoots(tuple(roots), refused)


def open_directory(parent: int, name: str) -> int:
    """A descriptor of the directory `name` in the open directory `parent`; a link is not followed. Raises OSError."""
    return os.open(name, _OPEN_DIRECTORY, dir_fd=parent)


def mount_of(fd: int) -> int | None:
    """The id of the mount by which `fd` was reached; None where the kernel does not say.

    It tells a bind mount of the same filesystem, which has the same device number.
    """
    try:
        with open(f"/proc/self/fdinfo/{fd}", encoding="ascii") as lines:  # noqa: PTH123
            return next((int(line.split()[1]) for line in lines if line.startswith("mnt_id:")), None)
    except OSError:
        return None


def inode_at(path: str | os.PathLike[str]) -> Inode | None:
    """The inode of what is at a path; None where nothing is."""
    try:
        return inode_of(Path(path).stat())
    except OSError:
        return None


def _open_root(path: str, trusted: frozenset[int], protected: Inode | None) -> Root | str:
    """The root at `path`, or why it is refused.

    Each directory is checked before the next one is opened in it, by its descriptor: a check by path would say
    nothing about the directory that the same path names a moment later.
    """
    fd = os.open("/", _OPEN_DIRECTORY)
    try:
        top = os.fstat(fd)
        walked = ""
        for name in path.split("/")[1:]:
            if (risk := _replacement_risk(walked or "/", os.fstat(fd), trusted)) is not None:
                return risk
            walked = f"{walked}/{name}"
            try:
                child = open_directory(fd, name)
            except OSError as error:
                if _is_link(fd, name):
                    return f"{walked} is a symbolic link; name the real path of {path}"
                return f"{walked}: {error.strerror}"
            os.close(fd)
            fd = child
            if protected == inode_of(os.fstat(fd)):
                return f"{walked} is the agent's state directory; name another one with --state-dir, or another root"
        facts = os.fstat(fd)
        if facts.st_uid not in trusted:
            return f"{path} belongs to user {facts.st_uid}; name that user under owners if it may be cleaned"
        if os.path.samestat(facts, top):
            return f"{path} is the root of the whole filesystem"
        root = Root(path, fd, facts.st_dev, mount_of(fd), protected)
        fd = -1
        return root
    finally:
        if fd >= 0:
            os.close(fd)


def _replacement_risk(path: str, facts: os.stat_result, trusted: frozenset[int]) -> str | None:
    """Why another user could exchange the entries of this directory, on the way to a root; None if none can."""
    if facts.st_uid not in trusted:
        return f"{path}, on the way to it, belongs to user {facts.st_uid}, who is not among the owners"
    if facts.st_mode & (stat.S_IWGRP | stat.S_IWOTH) and not facts.st_mode & stat.S_ISVTX:
        return f"{path}, on the way to it, may be written by others, who could put another directory in its place"
    return None


def _is_link(parent: int, name: str) -> bool:
    try:
        return stat.S_ISLNK(os.stat(name, dir_fd=parent, follow_symlinks=False).st_mode)
    except OSError:
        return False


class DiskSpace(Struct, frozen=True):
    """Free and total bytes of a filesystem."""

    free: int
    total: int

    @property
    def percent(self) -> float:
        """The free share."""
        return 100 * self.free / self.total if self.total else 100.0

    def plus(self, freed: int) -> DiskSpace:
        return DiskSpace(min(self.free + freed, self.total), self.total)


MeasureSpace = Callable[[int], DiskSpace]


def measure_space(fd: int) -> DiskSpace:
    """The space on the filesystem of an open file. Raises OSError."""
    facts = os.fstatvfs(fd)
    return DiskSpace(facts.f_bavail * facts.f_frsize, facts.f_blocks * facts.f_frsize)


class Filesystem(Struct):
    """One filesystem that a cleaning works on."""

    root: str
    """The path of the first root on it that was opened."""
    fd: int
    before: DiskSpace
    freed: int = 0
    """Bytes that this cleaning freed there, or would have freed."""
    waits: int = 0
    """Times that space was waited for that should have been free."""


class Filesystems:
    """All filesystems of one cleaning, by device number; each is kept open until `close`.

    `target` is the percentage of free space to reach, None for no end.
    """

    def __init__(self, measure: MeasureSpace, target: float | None, *, dry_run: bool, throttle: Throttle) -> None:
        self._measure = measure
        self._target = target
        self._dry_run = dry_run
        self._throttle = throttle
        self._by_device: dict[int, Filesystem] = {}

    def add(self, root: Root) -> None:
        """Measure the filesystem of an open root, if it is new. Raises OSError."""
        if root.device not in self._by_device:
            space = self._measure(root.fd)
            self._by_device[root.device] = Filesystem(root.path, os.dup(root.fd), space)

    def close(self) -> None:
        for filesystem in self._by_device.values():
            os.close(filesystem.fd)

    def count_freed(self, device: int, size: int) -> None:
        self._by_device[device].freed += size

    def space(self, device: int) -> DiskSpace:
        """The space on a filesystem now; in a trial run, as it would be."""
        filesystem = self._by_device[device]
        if self._dry_run:
            return filesystem.before.plus(filesystem.freed)
        return self._measure(filesystem.fd)

    def has_enough(self, device: int) -> bool:
        """Whether the target is reached on a filesystem."""
        if self._target is None:
            return False
        if self.space(device).percent >= self._target:
            return True
        filesystem = self._by_device[device]
        expected = filesystem.before.plus(filesystem.freed)
        if self._dry_run or expected.percent < self._target or filesystem.waits >= _MAX_LATE_SPACE_WAITS:
            return False
        filesystem.waits += 1
        for _ in range(_LATE_SPACE_CHECKS):
            self._throttle.wait(_LATE_SPACE_SECONDS)
            if self.space(device).percent >= self._target:
                return True
            if not self._throttle.may_continue():
                break
        return False

    def output(self) -> Mapping[str, Any]:
        """Each filesystem's part of the output, and the least free share before and after."""
        parts = [self._part(device) for device in self._by_device]
        if not parts:
            return {"filesystems": []}
        return {
            "free_percent_before": min(part["free_percent_before"] for part in parts),
            "free_percent_after": min(part["free_percent_after"] for part in parts),
            **({} if self._target is None else {"reached": all(part["reached"] for part in parts)}),
            "filesystems": parts,
        }

    def _part(self, device: int) -> dict[str, Any]:
        before, after = self._by_device[device].before, self.space(device)
        return {
            "root": self._by_device[device].root,
            "total_bytes": before.total,
            "free_bytes_before": before.free,
            "free_percent_before": round(before.percent, 2),
            "free_bytes_after": after.free,
            "free_percent_after": round(after.percent, 2),
            **({} if self._target is None else {"reached": after.percent >= self._target}),
        }
