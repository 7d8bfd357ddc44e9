"""How far access times can be trusted, by the tables of mounts that processes see."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from trainmedic_agent.disk.access_times import AccessTimes, access_times

DAY_NS = 86_400 * 10**9
HOST = "21 1 8:1 / / rw,relatime shared:1 - ext4 /dev/sda1 rw"
DATA = 40
"""The number of the mount by which the root is reached."""


def mounts(proc: Path, pid: str, *lines: str, namespace: str = "") -> None:
    """A process that sees these mounts, in a namespace of its own where none is named."""
    (proc / pid / "ns").mkdir(parents=True)
    (proc / pid / "mountinfo").write_text("".join(f"{line}\n" for line in lines))
    (proc / pid / "ns" / "mnt").symlink_to(f"mnt:[{namespace or pid}]")


def data(options: str, *, number: int = DATA, point: str = "/data", kind: str = "xfs") -> str:
    return f"{number} 21 8:17 / {point} {options} shared:2 - {kind} /dev/sdb1 rw,attr2"


def told(proc: Path, line: str, *others: str, sees_every_process: bool = True) -> AccessTimes:
    """What is known of the mount in the line, where the machine has it too."""
    for pid in ("1", "self"):
        mounts(proc, pid, HOST, line, *others, namespace="host")
    return access_times(DATA, proc, sees_every_process=sees_every_process)


@pytest.mark.parametrize(
    ("options", "kind", "lag_ns", "untraced"),
    [
        ("rw", "xfs", 0, ()),
        ("rw,nosuid,relatime", "ext4", DAY_NS, ()),
        ("rw,noatime", "xfs", 0, ("mounted noatime",)),
        ("rw,nodiratime,relatime", "tmpfs", DAY_NS, ()),
        ("rw,relatime", "nfs4", DAY_NS, ("the filesystem is nfs4",)),
        ("rw", "fuse.sshfs", 0, ("the filesystem is fuse.sshfs",)),
        ("rw,relatime", "overlay", DAY_NS, ("the filesystem is overlay",)),
        ("rw,noatime", "lustre", 0, ("the filesystem is lustre", "mounted noatime")),
    ],
)
def test_the_mount_and_the_filesystem_decide_whether_access_times_are_trusted(
    tmp_path: Path, options: str, kind: str, lag_ns: int, untraced: tuple[str, ...]
) -> None:
    """Only filesystems known to keep access times as their mounts state are trusted."""
    assert told(tmp_path, data(options, kind=kind)) == AccessTimes(lag_ns, untraced)


def test_each_mount_of_the_same_filesystem_counts(tmp_path: Path) -> None:
    """Reads through one mount leave a trace, and reads through another leave none."""
    other = data("rw,noatime", number=41, point="/elsewhere")
    assert told(tmp_path, data("rw"), other).untraced == ("mounted noatime",)


def test_a_containers_read_only_volume_leaves_no_trace(tmp_path: Path) -> None:
    """A container has its own mounts; a service that sees the whole machine as read-only is no container."""
    service = ["61 1 8:1 / / ro,relatime - ext4 /dev/sda1 rw", data("ro,relatime", number=62)]
    mounts(tmp_path, "300", *service)
    assert told(tmp_path, data("rw,relatime")).untraced == ()
    mounts(tmp_path, "400", "71 1 0:50 / / rw - overlay overlay rw", data("ro,relatime", number=72))
    assert access_times(DATA, tmp_path, sees_every_process=True).untraced == ("also mounted read-only",)


def test_unseen_mounts_and_processes_are_not_trusted(tmp_path: Path) -> None:
    """The mount may be missing in the table, or other processes may be hidden."""
    hidden = told(tmp_path, data("rw"), sees_every_process=False)
    assert hidden.untraced == ("the mounts of other containers cannot be seen",)
    assert access_times(99, tmp_path, sees_every_process=True).untraced == ("its mount is unknown",)
    assert access_times(None, tmp_path / "none", sees_every_process=True).untraced


def test_names_chosen_by_a_user_do_not_break_lines(tmp_path: Path) -> None:
    """In a mount in a user's directory, an apparent line end or blank is part of the name."""
    odd = data("rw,noatime", number=41, point="/home/u/a\rb\x0c\x1c\u2028\xa0c")
    fake = f"42 21 8:99 / /home/u/x\x0c{DATA} rw - fuse.x y rw,user_id=7"
    assert told(tmp_path, data("rw"), odd, fake).untraced == ("mounted noatime",)


def test_an_access_time_may_be_a_day_behind_the_last_read(tmp_path: Path) -> None:
    """This holds if it is later than the last change; otherwise relatime would have recorded the next read."""
    path = tmp_path / "file"
    path.write_text("x")
    changed = path.stat().st_ctime_ns
    late = AccessTimes(lag_ns=DAY_NS)
    os.utime(path, ns=(changed - 5, changed - 5))
    status = path.stat()
    assert late.last_use_ns(status) == status.st_ctime_ns
    read = status.st_ctime_ns + 10**12
    os.utime(path, ns=(read, changed - 5))
    assert late.last_use_ns(path.stat()) == read + DAY_NS
    assert AccessTimes().last_use_ns(path.stat()) == read
