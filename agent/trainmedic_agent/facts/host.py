"""CPU, memory and disk facts. Network file systems can block, so only the root may be one."""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from msgspec import Struct

from trainmedic_agent.disk.mounts import mounts_of

PROC = Path("/proc")

ON_DISK = frozenset({"ext2", "ext3", "ext4", "xfs", "btrfs", "zfs", "f2fs", "bcachefs", "vfat", "exfat", "ntfs3"})
_NETWORK = re.compile(
    r"nfs|cifs|smb|ceph|lustre|beegfs|gpfs|glusterfs|afs|9p|fuse|wekafs|virtiofs|gfs2|ocfs2|orangefs|daos|vastnfs"
)
# A container's root is an overlay; data loaders use shared memory.
_ALWAYS_LISTED = ("/", "/dev/shm")  # noqa: S108 - nothing is put there


class CpuTimes(Struct, frozen=True):
    idle: int
    waiting: int
    total: int


def cpu_times(proc: Path = PROC) -> CpuTimes:
    """Read ``/proc/stat``: user nice system idle iowait irq softirq steal; user includes guest times."""
    ticks = [int(text) for text in proc.joinpath("stat").read_text().split("\n", 1)[0].split()[1:9]]
    return CpuTimes(ticks[3], ticks[4], sum(ticks))


def cpu(before: CpuTimes, after: CpuTimes, proc: Path = PROC) -> dict[str, Any]:
    """Return the load between samples; I/O wait is idle."""
    passed = max(after.total - before.total, 1)
    waiting = max(after.waiting - before.waiting, 0)
    idle = max(after.idle - before.idle, 0) + waiting
    loads = proc.joinpath("loadavg").read_text().split()[:3]
    return {
        "count": len([line for line in _lines(proc / "stat") if line.startswith("cpu") and line[3].isdigit()]),
        "percent": _percent(passed - idle, passed),
        "iowait_percent": _percent(waiting, passed),
        **{f"load_{minutes}m": float(load) for minutes, load in zip((1, 5, 15), loads, strict=True)},
        **_pressure(proc, "cpu"),
    }


def memory(proc: Path = PROC) -> dict[str, dict[str, Any]]:
    """Return ``memory`` and, if present, ``swap``. Reclaimable memory counts as available."""
    texts = dict(line.split(":", 1) for line in _lines(proc / "meminfo"))
    kib = {name: int(text.split()[0]) for name, text in texts.items()}
    total, available = kib["MemTotal"] * 1024, kib["MemAvailable"] * 1024
    facts = {
        "memory": {
            "total_bytes": total,
            "available_bytes": available,
            "used_bytes": total - available,
            "percent": _percent(total - available, total),
            **_pressure(proc, "memory"),
        }
    }
    swap = kib.get("SwapTotal", 0) * 1024
    if swap:
        used = swap - kib["SwapFree"] * 1024
        facts["swap"] = {"total_bytes": swap, "used_bytes": used, "percent": _percent(used, swap)}
    return facts


def disks(
    paths: Iterable[str] = (), proc: Path = PROC, ask: Callable[[str], os.statvfs_result] = os.statvfs
) -> dict[str, dict[str, Any]]:
    """Return local disks, root, shared memory, and the mounts of `paths`, by mount point."""
    mounts = {os.fsdecode(mount.point): mount.filesystem for mount in mounts_of(proc / "self")}
    listed = {*_ALWAYS_LISTED, *(mount for mount, kind in mounts.items() if kind in ON_DISK)}
    listed |= {mount for mount in (_mount_of(path, mounts) for path in paths) if not _NETWORK.match(mounts[mount])}
    facts: dict[str, dict[str, Any]] = {}
    devices: set[int] = set()
    # The root first, so that it stands for its file system.
    for mount in sorted(listed & mounts.keys(), key=lambda mount: (mount != "/", mount)):
        try:
            device = _device(mount)
            if device in devices:  # another mount of the same file system
                continue
            filesystem = ask(mount)
        except OSError:
            continue
        devices.add(device)
        if filesystem.f_blocks:
            facts[mount] = _disk(filesystem, mounts[mount])
    return facts


def uptime(proc: Path = PROC) -> float:
    return float(proc.joinpath("uptime").read_text().split()[0])


def _disk(filesystem: os.statvfs_result, kind: str) -> dict[str, Any]:
    """Return sizes in bytes, and percentages as in ``df``."""
    size, used, available = filesystem.f_blocks, filesystem.f_blocks - filesystem.f_bfree, filesystem.f_bavail
    facts = {
        "total_bytes": size * filesystem.f_frsize,
        "available_bytes": available * filesystem.f_frsize,
        "used_bytes": used * filesystem.f_frsize,
        "percent": _percent(used, used + available),
        "available_percent": _percent(available, size),
        "type": kind,
        "is_read_only": bool(filesystem.f_flag & os.ST_RDONLY),
    }
    if filesystem.f_files:
        facts["inodes_percent"] = _percent(filesystem.f_files - filesystem.f_ffree, filesystem.f_files)
    return facts


def _mount_of(name: str, mounts: Mapping[str, str]) -> str:
    path = Path(name)
    return next((str(parent) for parent in (path, *path.parents) if str(parent) in mounts), next(iter(mounts)))


def _device(mount: str) -> int:
    status = Path(mount).stat()
    if not stat.S_ISDIR(status.st_mode):  # a file mounted by a container
        raise NotADirectoryError(mount)
    return status.st_dev


def _pressure(proc: Path, resource: str) -> dict[str, float]:
    try:
        first = _lines(proc / "pressure" / resource)[0]
        return {"pressure_percent": float(first.split("avg10=")[1].split()[0])}
    except (OSError, IndexError, ValueError):
        return {}


def _lines(path: Path) -> list[str]:
    # Users can mount in their own directories, so a name may have any character except a line feed, which is escaped.
    return os.fsdecode(path.read_bytes()).rstrip("\n").split("\n")


def _percent(part: float, whole: float) -> float:
    return round(min(max(100 * part / whole, 0.0), 100.0), 1) if whole else 0.0
