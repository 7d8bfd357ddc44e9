"""Processors, memory and disks, from a ``/proc`` of the test's own."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from trainmedic_agent.facts import host

STAT = "cpu  100 0 50 800 40 5 5 0 7 0\ncpu0 50 0 25 400 20 2 3 0 0 0\ncpu1 50 0 25 400 20 3 2 0 0 0\nintr 5\n"
MEMINFO = "MemTotal:  1000 kB\nMemFree: 100 kB\nMemAvailable:  250 kB\nSwapTotal: 400 kB\nSwapFree: 100 kB\n"
MOUNTS = (
    "21 1 8:1 / / rw - ext4 /dev/sda1 rw\n"
    "22 21 0:5 / /proc rw - proc proc rw\n"
    "23 21 0:6 / {data} rw shared:1 - xfs /dev/sdb1 rw\n"
    "24 21 0:7 / /mnt/nfs rw - nfs4 server:/x rw\n"
    "25 21 0:8 / /nowhere\\040at\\040all rw - ext4 /dev/sdc1 rw\n"
)


@pytest.fixture
def proc(tmp_path: Path) -> Path:
    made = tmp_path / "proc"
    (made / "self").mkdir(parents=True)
    (made / "pressure").mkdir()
    (tmp_path / "data").mkdir()
    (made / "stat").write_text(STAT)
    (made / "loadavg").write_text("1.50 1.25 0.75 2/345 6789\n")
    (made / "meminfo").write_text(MEMINFO)
    (made / "uptime").write_text("12345.67 8000.00\n")
    (made / "pressure" / "memory").write_text(
        "some avg10=1.23 avg60=0.00 total=5\nfull avg10=0.50 avg60=0.00 total=1\n"
    )
    (made / "self" / "mountinfo").write_text(MOUNTS.format(data=tmp_path / "data"))
    return made


def test_cpu_usage_is_measured_over_the_window(proc: Path) -> None:
    """Waiting for a disk counts as idle, and guests are not counted twice."""
    before = host.cpu_times(proc)
    (proc / "stat").write_text(STAT.replace("cpu  100 0 50 800 40 5 5 0 7 0", "cpu  140 0 70 830 50 5 5 0 47 0"))
    assert host.cpu(before, host.cpu_times(proc), proc) == {
        "count": 2,
        "percent": 60.0,
        "iowait_percent": 10.0,
        "load_1m": 1.5,
        "load_5m": 1.25,
        "load_15m": 0.75,
    }


@pytest.mark.parametrize("later", ["cpu  100 0 50 800 40 5 5 0 7 0", "cpu  90 0 40 700 30 5 5 0 7 0"])
def test_counters_that_stall_or_decrease_are_no_error(proc: Path, later: str) -> None:
    """Counters of some virtual machines do."""
    before = host.cpu_times(proc)
    (proc / "stat").write_text(STAT.replace("cpu  100 0 50 800 40 5 5 0 7 0", later))
    assert 0 <= host.cpu(before, host.cpu_times(proc), proc)["percent"] <= 100


def test_reclaimable_memory_is_available(proc: Path) -> None:
    """The output includes swap, and memory pressure if the kernel reports it."""
    kib = 1024
    assert host.memory(proc) == {
        "memory": {
            "total_bytes": 1000 * kib,
            "available_bytes": 250 * kib,
            "used_bytes": 750 * kib,
            "percent": 75.0,
            "pressure_percent": 1.23,
        },
        "swap": {"total_bytes": 400 * kib, "used_bytes": 300 * kib, "percent": 75.0},
    }


def test_a_machine_without_swap_reports_none(proc: Path) -> None:
    """Missing values are omitted."""
    (proc / "meminfo").write_text(MEMINFO.replace("SwapTotal: 400", "SwapTotal: 0"))
    assert "swap" not in host.memory(proc)


def test_local_disks_and_requested_ones_are_reported(proc: Path, tmp_path: Path) -> None:
    """Network file systems are never asked, for one whose server is gone would never answer; a mount that cannot
    be asked is left out, and one file system counts once."""
    asked: list[str] = []

    def ask(mount: str) -> os.statvfs_result:
        asked.append(mount)
        return os.statvfs_result((4096, 4096, 1000, 400, 300, 100, 50, 50, os.ST_RDONLY, 255))

    found = host.disks(["/mnt/nfs/checkpoints", str(tmp_path / "data" / "deep")], proc, ask)
    assert "/mnt/nfs" not in asked
    assert found["/"] == {
        "total_bytes": 4096 * 1000,
        "available_bytes": 4096 * 300,
        "used_bytes": 4096 * 600,
        "percent": 66.7,
        "available_percent": 30.0,
        "inodes_percent": 50.0,
        "type": "ext4",
        "is_read_only": True,
    }
    assert set(found) <= {"/", str(tmp_path / "data")}


def test_this_machine_can_be_read() -> None:
    """The test reads the real files of whatever kernel runs it."""
    times = host.cpu_times()
    assert host.cpu(times, host.cpu_times())["count"] >= 1
    assert host.memory()["memory"]["total_bytes"] > 0
    assert host.disks()["/"]["total_bytes"] > 0
    assert host.uptime() > 0


def test_mount_names_chosen_by_a_user_do_not_break_lines(proc: Path) -> None:
    """In a mount in a user's directory, an apparent line end is part of the name."""
    unchanged = os.statvfs("/")  # what is free changes while others write
    before = host.disks(proc=proc, ask=lambda mount: unchanged)
    with (proc / "self" / "mountinfo").open("a", newline="") as mounts:
        mounts.write("90 1 0:77 / /home/u/a\rb\x0c\x1c\x85\u2028 rw - fuse.x x rw\n")
    assert host.disks(proc=proc, ask=lambda mount: unchanged) == before != {}
