"""Safe opening of a rule's roots, and free space on their file systems.

A root is refused if it

- is missing, or has a symbolic link in its path
- has an owner other than root, the agent's user and the policy's ``owners``
- has a parent with such an owner, or one that group or others can write without the sticky bit
- is ``/``, within the agent's state directory, or an earlier root of the rule

Free space is that of unprivileged processes, as node_exporter reports it. ZFS and btrfs free space seconds after a
deletion; the cleaner waits if the deleted bytes should suffice.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from msgspec import Struct

from trainmedic_agent.disk.access_times import KEPT, AccessTimes
from trainmedic_agent.disk.throttle import Throttle

_OPEN_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK
_LATE_SPACE_CHECKS, _LATE_SPACE_SECONDS = 20, 0.3  # number and interval: ZFS takes about 5 s
_MAX_LATE_SPACE_WAITS = 2  # waits per file system; then another process must be filling it
_BLOCK_BYTES = 512

Inode = tuple[int, int]  # device and number


def inode_of(facts: os.stat_result) -> Inode:
    return facts.st_dev, facts.st_ino


def stored_bytes(facts: os.stat_result) -> int:
    return facts.st_blocks * _BLOCK_BYTES


def freed_bytes(facts: os.stat_result) -> int:
    """Return the bytes that deletion frees: none with another hard link."""
    return stored_bytes(facts) if facts.st_nlink == 1 else 0


class Root(Struct, frozen=True):
    path: str
    fd: int
    device: int
    mount: int | None  # mount ID, if known
    protected: Inode | None = None  # the agent's state directory, which no walk enters
    access_times: AccessTimes = KEPT

    def contains(self, fd: int) -> bool:
        """Return whether an open directory is on the same mount."""
        return os.fstat(fd).st_dev == self.device and mount_of(fd) == self.mount


class OpenedRoots(Struct, frozen=True):
    roots: tuple[Root, ...]
    refused: Mapping[str, str]
    """Reasons by path."""


@contextmanager
def opened_roots(
    paths: tuple[str, ...], owners: frozenset[int], protected: Inode | None = None
) -> Iterator[OpenedRoots]:
    """Yield the open roots. `protected`: the agent's state directory."""
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
    """Open a directory that is no link. Raises OSError."""
    return os.open(name, _OPEN_DIRECTORY, dir_fd=parent)


def mount_of(fd: int) -> int | None:
    """Return the mount ID; None if unknown. Unlike the device number, it distinguishes bind mounts."""
    try:
        with open(f"/proc/self/fdinfo/{fd}", encoding="ascii") as lines:  # noqa: PTH123
            return next((int(line.split()[1]) for line in lines if line.startswith("mnt_id:")), None)
    except OSError:
        return None


def inode_at(path: str | os.PathLike[str]) -> Inode | None:
    """Return None if the path is missing or inaccessible."""
    try:
        return inode_of(Path(path).stat())
    except OSError:
        return None


def _open_root(path: str, trusted: frozenset[int], protected: Inode | None) -> Root | str:
    """Return the root, or why it is refused. Directories are checked by descriptor: paths can change."""
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
            return f"{path} is the root of the whole file system"
        root = Root(path, fd, facts.st_dev, mount_of(fd), protected)
        fd = -1
        return root
    finally:
        if fd >= 0:
            os.close(fd)


def _replacement_risk(path: str, facts: os.stat_result, trusted: frozenset[int]) -> str | None:
    """Return why an untrusted user could replace entries, if so."""
    if facts.st_uid not in trusted:
        return f"{path}, a parent directory, belongs to user {facts.st_uid}, who is not under owners"
    if facts.st_mode & (stat.S_IWGRP | stat.S_IWOTH) and not facts.st_mode & stat.S_ISVTX:
        return f"{path}, a parent directory, is writable for others, who could replace the root"
    return None


def _is_link(parent: int, name: str) -> bool:
    try:
        return stat.S_ISLNK(os.stat(name, dir_fd=parent, follow_symlinks=False).st_mode)
    except OSError:
        return False


class DiskSpace(Struct, frozen=True):
    free: int
    total: int

    @property
    def percent(self) -> float:
        return 100 * self.free / self.total if self.total else 100.0

    def plus(self, freed: int) -> DiskSpace:
        return DiskSpace(min(self.free + freed, self.total), self.total)


MeasureSpace = Callable[[int], DiskSpace]


def measure_space(fd: int) -> DiskSpace:
    """Raises OSError."""
    facts = os.fstatvfs(fd)
    return DiskSpace(facts.f_bavail * facts.f_frsize, facts.f_blocks * facts.f_frsize)


class Filesystem(Struct):
    root: str
    fd: int
    before: DiskSpace  # at the command's start
    freed: int = 0  # bytes, by this command
    waits: int = 0  # see `_MAX_LATE_SPACE_WAITS`


class Filesystems:
    """File systems of a cleaning by device number, open until `close`."""

    def __init__(self, measure: MeasureSpace, target: float | None, *, dry_run: bool, throttle: Throttle) -> None:
        self._measure = measure
        self._target = target
        self._dry_run = dry_run
        self._throttle = throttle
        self._by_device: dict[int, Filesystem] = {}

    def add(self, root: Root) -> None:
        """Raises OSError."""
        if root.device not in self._by_device:
            space = self._measure(root.fd)
            self._by_device[root.device] = Filesystem(root.path, os.dup(root.fd), space)

    def close(self) -> None:
        for filesystem in self._by_device.values():
            os.close(filesystem.fd)

    def count_freed(self, device: int, size: int) -> None:
        self._by_device[device].freed += size

    def space(self, device: int) -> DiskSpace:
        """Return the space; in a trial run, as it would be."""
        filesystem = self._by_device[device]
        if self._dry_run:
            return filesystem.before.plus(filesystem.freed)
        return self._measure(filesystem.fd)

    def wait_for_enough(self, device: int) -> bool:
        """Return whether the target is reached, after waiting for space freed late. Without a target, False."""
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
        parts = [self._part(device) for device in self._by_device]
        if not parts:
            return {"filesystems": []}
        after = [part["free_percent_after"] for part in parts]
        return {
            "free_percent_before": min(part["free_percent_before"] for part in parts),
            "free_percent_after": None if None in after else min(after),
            **({} if self._target is None else {"reached": _all_reached([part["reached"] for part in parts])}),
            "filesystems": parts,
        }

    def _part(self, device: int) -> dict[str, Any]:
        before = self._by_device[device].before
        after: DiskSpace | None
        try:
            after = self.space(device)
        except OSError:  # the report of what was deleted matters more
            after = None
        return {
            "root": self._by_device[device].root,
            "total_bytes": before.total,
            "free_bytes_before": before.free,
            "free_percent_before": round(before.percent, 2),
            "free_bytes_after": after.free if after else None,
            "free_percent_after": round(after.percent, 2) if after else None,
            **({} if self._target is None else {"reached": after.percent >= self._target if after else None}),
        }


def _all_reached(parts: Sequence[bool | None]) -> bool | None:
    if False in parts:
        return False
    return None if None in parts else True
