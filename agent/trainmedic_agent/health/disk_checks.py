"""Disks and local file systems, from ``/sys`` and ``/proc/self/mountinfo``, without tools or privileges."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from trainmedic_agent.facts import host
from trainmedic_agent.health.checks import Check, Found, Kind, Value, Verdict
from trainmedic_agent.health.sysfs import NodeRoots, Unread, entries, number, pcie_checks, text

_WELL = frozenset({"running", "live"})
_BROKEN = frozenset({"offline", "transport-offline", "blocked", "dead", "deleting", "deleting (no IO)", "quiesce"})
"""States of SCSI devices and NVMe controllers (kernel: scsi_sysfs.c, nvme/host/sysfs.c)."""
_VIRTUAL = ("loop", "ram", "zram", "dm-")


def disk_checks(roots: NodeRoots) -> Found:
    found = Found()
    with Unread(found, "disk", ""):
        for disk in entries(roots.sys / "block"):
            if not disk.name.startswith(_VIRTUAL):
                with Unread(found, "disk", disk.name):
                    _disk(disk, found)
    with Unread(found, "filesystem", ""):
        for filesystem in entries(roots.sys / "fs" / "ext4"):
            with Unread(found, "filesystem", filesystem.name):
                _errors(found, filesystem.name, number(filesystem / "errors_count"))
        for volume in entries(roots.sys / "fs" / "btrfs"):
            for device in entries(volume / "devinfo"):
                with Unread(found, "filesystem", volume.name):
                    counts = (text(device / "error_stats") or "").split()[1::2]
                    _errors(found, f"{volume.name}/{device.name}", sum(map(int, counts)) if counts else None)
        for mount, is_writable in _local_mounts(roots.proc):
            found.values.append(Value("mount_writable", mount, Kind.STATE, int(is_writable)))
    return found


def _disk(disk: Path, found: Found) -> None:
    if (missing := number(disk / "md" / "degraded")) is not None:
        verdict = Verdict.DEGRADED if missing else Verdict.OK
        found.checks.append(Check("disk", disk.name, verdict, f"{missing} disks of the array missing", "0"))
    state = text(disk / "device" / "state")
    if state is not None:
        verdict = Verdict.OK if state in _WELL else Verdict.FAILED if state in _BROKEN else Verdict.DEGRADED
        found.checks.append(Check("disk", disk.name, verdict, state, "running or live"))
    if (errors := number(disk / "device" / "ioerr_cnt", 16)) is not None:
        found.values.append(Value("disk_errors", disk.name, Kind.COUNTER, errors))
    if disk.name.startswith("nvme"):
        found.checks += pcie_checks(disk / "device" / "device", disk.name)


def _errors(found: Found, part: str, count: int | None) -> None:
    if count is not None:
        verdict = Verdict.DEGRADED if count else Verdict.OK
        found.checks.append(Check("filesystem", part, verdict, f"{count} errors since its last repair", "0"))


def _local_mounts(proc: Path) -> Iterator[tuple[str, bool]]:
    """Yield mount points of local disks, once for each file system, and whether it is writable.

    Its own options count, not those of the mount: after an error the kernel makes the file system read-only.
    """
    seen: set[str] = set()
    for line in os.fsdecode((proc / "self" / "mountinfo").read_bytes()).rstrip("\n").split("\n"):
        before, _, after = line.partition(" - ")
        fields, (kind, _, options) = before.split(" "), after.split(" ", 2)
        if kind in host.ON_DISK and fields[2] not in seen:
            seen.add(fields[2])
            yield host.unescaped(fields[4]), "ro" not in options.split(",")
