"""Which mounts hold the file systems that an alert names, by the tables of mounts that two processes see."""

from __future__ import annotations

from pathlib import Path

import pytest

from trainmedic_agent.disk.mounts import FilesystemSearch, NamedFilesystem

ROOT, DATA, TMP, BOOT = 21, 40, 42, 43
"""Mounts of the agent's process, by number."""


def tables(proc: Path, own: tuple[str, ...], machine: tuple[str, ...] | None = None) -> Path:
    for process, lines in (("self", own), ("1", own if machine is None else machine)):
        (proc / process).mkdir(parents=True)
        (proc / process / "mountinfo").write_text("".join(f"{line}\n" for line in lines))
    return proc


def line(number: int, device: str, point: str, source: str, kind: str = "xfs", root: str = "/") -> str:
    return f"{number} 21 {device} {root} {point} rw,relatime shared:1 - {kind} {source} rw"


MACHINE = (
    line(ROOT, "259:2", "/", "/dev/nvme0n1p2"),
    line(DATA, "9:127", "/data", "/dev/md127"),
    line(TMP, "0:44", "/run", "tmpfs", "tmpfs"),
    line(BOOT, "259:1", "/boot/efi", "/dev/nvme0n1p1", "vfat"),
)
CONTAINER = (
    line(ROOT, "0:301", "/", "overlay", "overlay"),
    line(DATA, "9:127", "/in/data", "/dev/md127", root="/jobs"),
    line(TMP, "259:2", "/var/tmp", "/dev/nvme0n1p2", root="/var/tmp"),
)


def found(proc: Path, *names: NamedFilesystem) -> set[int]:
    search = FilesystemSearch(names, proc)
    return {number for number in (ROOT, DATA, TMP, BOOT) if search.finds(number)}


@pytest.mark.parametrize(
    ("mountpoint", "device", "numbers"),
    [
        ("/", "/dev/nvme0n1p2", {ROOT}),
        ("/", "", {ROOT}),
        ("/data", "/dev/md127", {DATA}),
        ("/data/", "", {DATA}),
        ("/host/data", "", {DATA}),
        ("/rootfs", "/dev/nvme0n1p2", {ROOT}),
        ("/host/rootfs/boot/efi", "", {BOOT}),
        ("/nowhere", "/dev/md127", {DATA}),
        ("/nowhere", "/dev/sdz", set()),
        ("/nowhere", "", set()),
        ("/dat", "", set()),
        ("C:", "", set()),
    ],
)
def test_on_the_machine_itself_the_mount_point_identifies_the_file_system(
    tmp_path: Path, mountpoint: str, device: str, numbers: set[int]
) -> None:
    """A prefix seen by an exporter in a container is also accepted; otherwise the device decides."""
    assert found(tables(tmp_path, MACHINE), NamedFilesystem(mountpoint, device)) == numbers


def test_one_of_several_file_systems_is_enough(tmp_path: Path) -> None:
    """Several occur where alerts on two file systems have joined one run."""
    proc = tables(tmp_path, MACHINE)
    assert found(proc, NamedFilesystem("/data"), NamedFilesystem("/run")) == {DATA, TMP}


@pytest.mark.parametrize(
    ("mountpoint", "device", "numbers"),
    [("/", "/dev/nvme0n1p2", {TMP}), ("/data", "", {DATA}), ("/data", "/dev/md127", {DATA}), ("/boot/efi", "", set())],
)
def test_an_agent_in_a_container_uses_the_machines_mounts(
    tmp_path: Path, mountpoint: str, device: str, numbers: set[int]
) -> None:
    """It does so if it sees the machine's processes: its own directories are on the same file systems."""
    assert found(tables(tmp_path, CONTAINER, MACHINE), NamedFilesystem(mountpoint, device)) == numbers


def test_an_agent_that_sees_only_its_container_uses_the_device(tmp_path: Path) -> None:
    """The machine's / is not its own /, but the device of a mount is the same for both."""
    proc = tables(tmp_path, CONTAINER)
    assert TMP in found(proc, NamedFilesystem("/", "/dev/nvme0n1p2"))
    assert TMP not in found(proc, NamedFilesystem("/", "/dev/sdz"))


def test_a_source_shared_by_many_file_systems_does_not_match_all_of_them(tmp_path: Path) -> None:
    """Every tmpfs has the same source; only the one at the mount point is meant."""
    proc = tables(tmp_path, (*MACHINE, line(DATA + 10, "0:60", "/dev/shm", "tmpfs", "tmpfs")))
    search = FilesystemSearch([NamedFilesystem("/run", "tmpfs")], proc)
    assert (search.finds(TMP), search.finds(DATA + 10)) == (True, False)


@pytest.mark.parametrize("source", ["tmpfs", "overlay"])
def test_a_source_that_identifies_no_device_matches_nothing_elsewhere(tmp_path: Path, source: str) -> None:
    """If the agent cannot see the mount point, another tmpfs or its container's root does not match."""
    proc = tables(
        tmp_path, (line(ROOT, "0:301", "/", "overlay", "overlay"), line(TMP, "0:61", "/run", "tmpfs", "tmpfs"))
    )
    assert found(proc, NamedFilesystem("/elsewhere", source)) == set()


def test_the_last_mount_at_a_path_hides_earlier_ones(tmp_path: Path) -> None:
    """For example, a disk was mounted over a directory that was a mount point."""
    proc = tables(tmp_path, (*MACHINE, line(DATA + 1, "9:3", "/data", "/dev/md3")))
    search = FilesystemSearch([NamedFilesystem("/data")], proc)
    assert (search.finds(DATA), search.finds(DATA + 1)) == (False, True)


def test_blanks_in_a_name_are_decoded(tmp_path: Path) -> None:
    """The kernel escapes them."""
    proc = tables(tmp_path, (line(DATA, "9:3", "/my\\040data", "/dev/md3"),))
    assert found(proc, NamedFilesystem("/my data")) == {DATA}


def test_nothing_matches_if_the_mounts_cannot_be_read(tmp_path: Path) -> None:
    """So nothing is deleted that may be on another file system."""
    assert found(tmp_path, NamedFilesystem("/", "/dev/sda1")) == set()
    assert not FilesystemSearch([NamedFilesystem("/")], tables(tmp_path, MACHINE)).finds(None)
