"""What a file's access time says about its last read: that depends on the mounts by which the file can be read.

- ``strictatime``: each read is written down.
- ``relatime``, the default of Linux: a read is written down if the access time is not later than the last change, or
  is 24 hours old. So an access time that is later than the last change may be up to a day behind the last read
  (`AccessTimes.lag_ns`); and one that is not shows that nobody has read the file since that change.
- ``noatime``, or a read-only mount, such as a container's volume with ``readOnly``: reads leave no trace, though they
  do by another mount of the same filesystem. So all mounts count: those of this process, and those of all processes,
  whose containers have mounts of their own.
- Filesystems other than `_KEEPING`: those of a network, FUSE and overlays keep access times in ways of their own, on
  another machine, or not at all.

Where reads may leave no trace (`AccessTimes.untraced`), an age counts from the last write or change, or from the
access time if that is later, and whoever deletes has to watch for reads himself (``read_watch``).

Not seen are reads with ``O_NOATIME``, by which backups ask that they leave no trace, those by a mount that was
different then, and those of a service of the machine that sees the filesystem as read-only
(``ProtectSystem=strict``). Who calls it: ``cleaner``, and ``agent check``.
"""

from __future__ import annotations

import errno
import os
from pathlib import Path

from msgspec import Struct

from trainmedic_agent.disk.mounts import Mount, mounts_of

_KEEPING = frozenset({"btrfs", "ext2", "ext3", "ext4", "f2fs", "tmpfs", "xfs"})
"""Filesystems of one machine that keep access times just as their mounts say."""
_DAY_NS = 86_400 * 10**9
"""RELATIME_MARGIN of the kernel."""
_HAS_ENDED = frozenset({errno.ENOENT, errno.ESRCH, errno.EINVAL})
"""What reading the mounts of a process gives that has ended; EINVAL while its parent has not waited for it yet."""


class AccessTimes(Struct, frozen=True):
    """How far access times can be trusted."""

    lag_ns: int = 0
    """How long before the last read an access time may lie that is later than the last change."""
    untraced: tuple[str, ...] = ()
    """Why reads may leave no trace; empty where each leaves one."""

    def last_use_ns(self, status: os.stat_result) -> int:
        """The latest time at which the file can have been read, written or changed, as far as its times tell it."""
        changed = max(status.st_mtime_ns, status.st_ctime_ns)
        return changed if status.st_atime_ns <= changed else status.st_atime_ns + self.lag_ns

    def __str__(self) -> str:
        if self.untraced:
            return f"not kept: {', '.join(self.untraced)}"
        return "a day behind at most" if self.lag_ns else "kept"


KEPT = AccessTimes()


def access_times(mount: int | None, proc: Path, *, sees_every_process: bool) -> AccessTimes:
    """How far the access times can be trusted of what is reached by a mount, which has this id in this process.

    `proc` is where the process filesystem is mounted; `sees_every_process` whether it lists all of them.
    """
    try:
        own = mounts_of(proc / "self")
    except OSError:
        own = []
    ours = next((entry for entry in own if entry.number == mount), None)
    if ours is None:
        return AccessTimes(untraced=("it is not known how it is mounted",))
    untraced = [] if ours.filesystem in _KEEPING else [f"the filesystem is {ours.filesystem}"]
    try:
        others = _mounts_of_others(proc)
    except OSError:
        others, sees_every_process = [], False
    # This process may see as read-only what it may not write; so only whether the others do is of interest.
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
    """The mounts of the machine and of each container. Raises OSError where not all of them can be seen.

    A mount namespace with the same ``/`` as that of the first process is no container, but a service of the machine
    with fewer rights. What it sees as read-only is in most cases all that there is, so it is left out.
    """
    mounts = mounts_of(proc / "1")
    top = _top(mounts)
    met: set[Path] = set()
    with os.scandir(proc) as entries:
        for entry in entries:
            if not entry.name.isdigit():
                continue
            try:
                namespace = _namespace(proc / entry.name)
                if namespace in met:
                    continue
                theirs = mounts_of(proc / entry.name)
            except OSError as error:
                if error.errno in _HAS_ENDED:
                    continue
                raise
            if namespace is not None:
                met.add(namespace)
            if _top(theirs) != top:
                mounts.extend(theirs)
    return mounts


def _namespace(process: Path) -> Path | None:
    """What names the mount namespace of a process; None where that may not be read. Its mounts may be, by everybody."""
    try:
        return (process / "ns/mnt").readlink()
    except PermissionError:
        return None


def _top(mounts: list[Mount]) -> tuple[bytes, bytes] | None:
    """What is mounted at ``/``: the last one hides those before it."""
    return next(((entry.device, entry.root) for entry in reversed(mounts) if entry.point == b"/"), None)
