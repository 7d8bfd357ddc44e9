"""Reliability of access times, by the mounts through which a file can be read:

- ``strictatime``: every read is recorded.
- ``relatime`` (Linux's default): access times may lag a day (`AccessTimes.lag_ns`).
- ``noatime`` or read-only, also in containers: reads leave no trace.
- File systems other than `_KEEPING` have their own rules.

Where reads may leave no trace, they must be watched (``read_watch``); ages count from the last change or recorded
access. Reads with ``O_NOATIME`` or ``ProtectSystem=strict`` are never detected.
"""

from __future__ import annotations

import errno
import os
from pathlib import Path

from msgspec import Struct

from trainmedic_agent.disk.mounts import Mount, mounts_of

_KEEPING = frozenset({"btrfs", "ext2", "ext3", "ext4", "f2fs", "tmpfs", "xfs"})
_DAY_NS = 86_400 * 10**9  # RELATIME_MARGIN of the kernel
_HAS_ENDED = frozenset({errno.ENOENT, errno.ESRCH, errno.EINVAL})  # errors for ended processes and zombies


class AccessTimes(Struct, frozen=True):
    lag_ns: int = 0  # maximum lag of an access time
    untraced: tuple[str, ...] = ()  # reasons why reads may leave no trace

    def last_use_ns(self, status: os.stat_result) -> int:
        """Return the last change, or a later recorded access plus its lag."""
        changed = max(status.st_mtime_ns, status.st_ctime_ns)
        return changed if status.st_atime_ns <= changed else status.st_atime_ns + self.lag_ns

    def __str__(self) -> str:
        if self.untraced:
            return f"not kept: {', '.join(self.untraced)}"
        return "a day behind at most" if self.lag_ns else "kept"


KEPT = AccessTimes()  # all reads are recorded


def access_times(mount: int | None, proc: Path, *, sees_every_process: bool) -> AccessTimes:
    """Return the reliability on a mount with this ID. `sees_every_process`: `proc` lists all processes."""
    try:
        own = mounts_of(proc / "self")
    except OSError:
        own = []
    ours = next((entry for entry in own if entry.number == mount), None)
    if ours is None:
        return AccessTimes(untraced=("its mount is unknown",))
    untraced = [] if ours.filesystem in _KEEPING else [f"the filesystem is {ours.filesystem}"]
    try:
        others = _mounts_of_others(proc)
    except OSError:
        others, sees_every_process = [], False
    # The agent's own mounts may be read-only only for its protection, so only the others' count.
    is_read_only = any(b"ro" in entry.options for entry in others if entry.device == ours.device)
    options = [entry.options for entry in (*own, *others) if entry.device == ours.device]
    if any(b"noatime" in each for each in options):
        untraced.append("mounted noatime")
    if is_read_only:
        untraced.append("also mounted read-only")
    if not sees_every_process:
        untraced.append("the mounts of other containers cannot be seen")
    return AccessTimes(_DAY_NS if any(b"relatime" in each for each in options) else 0, tuple(untraced))


def _mounts_of_others(proc: Path) -> list[Mount]:
    """Return the mounts of the machine and its containers. Raises OSError.

    Other namespaces with the machine's ``/`` are skipped: to restricted services nearly everything is read-only.
    """
    mounts = mounts_of(proc / "1")
    top = _top(mounts)
    seen: set[Path] = set()
    with os.scandir(proc) as entries:
        for entry in entries:
            if not entry.name.isdigit():
                continue
            try:
                namespace = _namespace(proc / entry.name)
                if namespace in seen:
                    continue
                theirs = mounts_of(proc / entry.name)
            except OSError as error:
                if error.errno in _HAS_ENDED:
                    continue
                raise
            if namespace is not None:
                seen.add(namespace)
            if _top(theirs) != top:
                mounts.extend(theirs)
    return mounts


def _namespace(process: Path) -> Path | None:
    """Return None without permission."""
    try:
        return (process / "ns/mnt").readlink()
    except PermissionError:
        return None


def _top(mounts: list[Mount]) -> tuple[bytes, bytes] | None:
    # The last mount at a point hides the others.
    return next(((entry.device, entry.root) for entry in reversed(mounts) if entry.point == b"/"), None)
