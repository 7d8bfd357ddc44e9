"""Disks and local file systems, from ``/sys`` and ``/proc/self/mountinfo``, without tools or privileges."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from trainmedic_agent.disk.mounts import mounts_of
from trainmedic_agent.facts import host
from trainmedic_agent.health.checks import CheckResults, HealthCheck, HealthValue, HealthVerdict, ValueKind
from trainmedic_agent.health.sysfs import NodeRoots, entries, number, pcie_checks, text, unknown_if_unread

_HEALTHY_STATES = frozenset({"running", "live"})
_FAILED_STATES = frozenset(
    {"offline", "transport-offline", "blocked", "dead", "deleting", "deleting (no IO)", "quiesce"}
)
"""States of SCSI devices and NVMe controllers (kernel: scsi_sysfs.c, nvme/host/sysfs.c)."""
_VIRTUAL = ("loop", "ram", "zram", "dm-")  # block devices without hardware of their own
_POD_MOUNTS = ("/var/lib/kubelet/", "/run/")  # mount points that come and go with pods


def disk_checks(roots: NodeRoots) -> CheckResults:
    results = CheckResults()
    with unknown_if_unread(results, "disk", ""):
        for disk in entries(roots.sys / "block"):
            if not disk.name.startswith(_VIRTUAL):
                with unknown_if_unread(results, "disk", disk.name):
                    _add_disk(disk, results)
    with unknown_if_unread(results, "filesystem", ""):
        for filesystem in entries(roots.sys / "fs" / "ext4"):
            with unknown_if_unread(results, "filesystem", filesystem.name):
                _add_error_count(results, filesystem.name, number(filesystem / "errors_count"))
        for volume in entries(roots.sys / "fs" / "btrfs"):
            for device in entries(volume / "devinfo"):
                with unknown_if_unread(results, "filesystem", volume.name):
                    counts = (text(device / "error_stats") or "").split()[1::2]  # lines of name and count
                    _add_error_count(results, f"{volume.name}/{device.name}", sum(map(int, counts)) if counts else None)
        for mount, is_writable in _local_mounts(roots.proc):
            results.values.append(HealthValue("mount_writable", mount, ValueKind.STATE, int(is_writable)))
    return results


def _add_disk(disk: Path, results: CheckResults) -> None:
    if (missing := number(disk / "md" / "degraded")) is not None:
        verdict = HealthVerdict.DEGRADED if missing else HealthVerdict.OK
        results.checks.append(HealthCheck("disk", disk.name, verdict, f"{missing} disks of the array missing", "0"))
    state = text(disk / "device" / "state")
    if state is not None:
        verdict = HealthVerdict.DEGRADED
        if state in _HEALTHY_STATES:
            verdict = HealthVerdict.OK
        elif state in _FAILED_STATES:
            verdict = HealthVerdict.FAILED
        results.checks.append(HealthCheck("disk", disk.name, verdict, state, "running or live"))
    if (errors := number(disk / "device" / "ioerr_cnt", 16)) is not None:
        results.values.append(HealthValue("disk_errors", disk.name, ValueKind.COUNTER, errors))
    if disk.name.startswith("nvme"):
        results.checks += pcie_checks(disk / "device" / "device", disk.name)


def _add_error_count(results: CheckResults, part: str, count: int | None) -> None:
    if count is not None:
        verdict = HealthVerdict.DEGRADED if count else HealthVerdict.OK
        results.checks.append(HealthCheck("filesystem", part, verdict, f"{count} errors since its last repair", "0"))


def _local_mounts(proc: Path) -> Iterator[tuple[str, bool]]:
    """Yield each local file system's first mount point, and whether the file system, not the mount, is writable."""
    seen: set[bytes] = set()
    for mount in mounts_of(proc / "self"):
        point = mount.point.decode(errors="backslashreplace")  # to be stored as text
        if mount.filesystem in host.ON_DISK and mount.device not in seen and not point.startswith(_POD_MOUNTS):
            seen.add(mount.device)
            yield point, b"ro" not in mount.filesystem_options
