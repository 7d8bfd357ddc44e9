"""Mounts of a process, and lookup of file systems that an alert names.

The alert's exporter may see other mounts, or the same under a prefix.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from pathlib import Path

from msgspec import Struct

# Usual mount points of the machine's root in exporters.
_PREFIXES = ("/host/rootfs", "/host/root", "/hostfs", "/host", "/rootfs")
_PSEUDO = frozenset({"tmpfs", "devtmpfs", "ramfs", "overlay"})  # file systems whose device name identifies none
_ESCAPED = re.compile(rb"\\([0-7]{3})")


class Mount(Struct, frozen=True):
    """A line of ``/proc/PID/mountinfo``."""

    number: int  # mount ID
    device: bytes  # major and minor number
    root: bytes  # the file system's directory that is mounted
    point: bytes  # where it is mounted
    options: frozenset[bytes]
    filesystem: str  # type
    source: bytes = b""  # name of the device
    filesystem_options: frozenset[bytes] = frozenset()


class NamedFilesystem(Struct, frozen=True):
    """A file system in an alert; `device` may be empty."""

    mountpoint: str
    device: str = ""

    def __str__(self) -> str:
        return f"{self.mountpoint} ({self.device})" if self.device else self.mountpoint


class FilesystemSearch:
    def __init__(self, names: Sequence[NamedFilesystem], proc: Path) -> None:
        self.names = names
        self._own = _mounts_if_readable(proc / "self")
        machine = _mounts_if_readable(proc / "1")
        self._found = [
            (name, [*_mounts_at(name.mountpoint, self._own), *_mounts_at(name.mountpoint, machine)]) for name in names
        ]

    def finds(self, mount_id: int | None) -> bool:
        mount = next((each for each in self._own if each.number == mount_id), None)
        return mount is not None and any(_is_named(mount, name, at_point) for name, at_point in self._found)


def _is_named(mount: Mount, name: NamedFilesystem, at_point: Sequence[Mount]) -> bool:
    """Return whether an alert names this mount. `at_point`: mounts at the alert's mount point.

    Point and device decide together if both fit one mount, otherwise either is enough.
    """
    device = name.device.encode()
    exact = {each.device for each in at_point if each.source == device}
    if exact:
        return mount.device in exact
    is_same_device = bool(device) and mount.source == device and mount.filesystem not in _PSEUDO
    return is_same_device or mount.device in {each.device for each in at_point}


def _mounts_at(mountpoint: str, mounts: Sequence[Mount]) -> list[Mount]:
    """Return the visible mount, with or without an exporter's prefix."""
    for point in _spellings(mountpoint):
        # The last mount at a point hides the others.
        matching = [mount for mount in mounts if mount.point == point.encode()]
        if matching:
            return matching[-1:]
    return []


def _spellings(mountpoint: str) -> Iterator[str]:
    plain = mountpoint.rstrip("/") or "/"
    yield plain
    for prefix in _PREFIXES:
        if plain == prefix or plain.startswith(f"{prefix}/"):
            yield plain.removeprefix(prefix) or "/"


def _mounts_if_readable(process: Path) -> list[Mount]:
    try:
        return mounts_of(process)
    except OSError:
        return []


def mounts_of(process: Path) -> list[Mount]:
    """Return a process's mounts. Blanks in `Mount.root` stay escaped. Raises OSError."""
    mounts = []
    for line in (process / "mountinfo").read_bytes().split(b"\n"):
        # number, parent, device, root, point, options, optional fields, "-", file system, source, its options
        before, _, after = line.partition(b" - ")
        parts, described = before.split(b" "), after.split(b" ")
        if len(parts) >= 6 and after:
            options = frozenset(parts[5].split(b","))
            filesystem = described[0].decode("ascii", "replace")
            source = _unescaped(described[1]) if len(described) > 1 else b""
            of_filesystem = frozenset(described[2].split(b",")) if len(described) > 2 else frozenset()
            point = _unescaped(parts[4])
            mount = Mount(int(parts[0]), parts[2], parts[3], point, options, filesystem, source, of_filesystem)
            mounts.append(mount)
    return mounts


def _unescaped(name: bytes) -> bytes:
    return _ESCAPED.sub(lambda octal: bytes([int(octal[1], 8) & 255]), name)
