"""Whether a file is in use, where the kernel gives no lease: every process is looked at, and nothing is guessed."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.unit.agent.disk.trees import NEVER, clean, cleaner, left, put
from trainmedic_agent.disk import open_files
from trainmedic_agent.disk.open_files import FileUsage
from trainmedic_agent.disk.report import Reason
from trainmedic_agent.disk.throttle import Clocks, Throttle

FIRST = 0xEFFFFFFC


def file_usage(proc: Path, *, stopping: bool = False) -> FileUsage:
    clocks = Clocks(sleep=lambda _: None)
    return FileUsage(clocks, Throttle(clocks, NEVER, lambda: stopping), str(proc))


def process(proc: Path, pid: int, opened: dict[str, tuple[Path, int]], maps: str = "") -> None:
    """A process as ``/proc`` shows it: descriptors with what they have open and the flags, and mappings."""
    (proc / str(pid) / "fd").mkdir(parents=True)
    (proc / str(pid) / "fdinfo").mkdir()
    for name, (path, flags) in opened.items():
        (proc / str(pid) / "fd" / name).symlink_to(path)
        (proc / str(pid) / "fdinfo" / name).write_text(f"pos:\t0\nflags:\t0{flags:o}\nmnt_id:\t1\n")
    (proc / str(pid) / "maps").write_bytes(os.fsencode(maps))


@pytest.fixture
def proc(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A ``/proc`` that shows all processes."""
    (tmp_path / "proc" / "self").mkdir(parents=True)
    (tmp_path / "proc" / "self" / "mounts").write_text(f"proc {tmp_path}/proc proc rw,nosuid 0 0\n")
    monkeypatch.setattr(FileUsage, "_is_first_namespace", lambda _: True)
    return tmp_path / "proc"


def inode(path: Path) -> tuple[int, int]:
    facts = path.stat()
    return facts.st_dev, facts.st_ino


def test_open_and_mapped_files_are_found(proc: Path, tmp_path: Path) -> None:
    """Any process may have them open, in any mode; a descriptor opened only as a path does not count."""
    read, written, mapped, named, free = (put(tmp_path / name) for name in ("r", "w", "m", "n", "f"))
    facts = mapped.stat()
    device = f"{os.major(facts.st_dev):02x}:{os.minor(facts.st_dev):02x}"
    line = f"7f00-7f01 r--p 00000000 {device} {facts.st_ino} /m (deleted)\n"
    process(
        proc, 5, {"3": (read, os.O_RDONLY), "4": (named, os.O_PATH)}, maps=f"7f02-7f03 rw-p 00000000 00:00 0\n{line}"
    )
    process(proc, 6, {"3": (written, os.O_RDWR)})
    usage = file_usage(proc)
    assert [usage.obstacle(None, inode(path)) for path in (read, written, mapped)] == [Reason.OPEN] * 3
    assert [usage.obstacle(None, inode(path)) for path in (named, free)] == [None, None]


def test_all_writers_must_append(proc: Path, tmp_path: Path) -> None:
    """One writer that does not append is enough to return False."""
    both, one, nobody = (put(tmp_path / name) for name in ("both", "one", "nobody"))
    append = os.O_WRONLY | os.O_APPEND
    process(proc, 5, {"3": (both, append), "4": (one, append)})
    process(proc, 6, {"3": (both, append), "4": (one, os.O_WRONLY), "5": (nobody, os.O_RDONLY)})
    usage = file_usage(proc)
    assert [usage.all_writers_append(inode(path)) for path in (both, one, nobody)] == [True, False, True]


@pytest.mark.parametrize("hidden", ["hidepid", "namespace", "permission"])
def test_unseen_processes_do_not_make_a_file_unused(
    proc: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, hidden: str
) -> None:
    """Processes may be hidden by a mount option, by a namespace, or by their owner."""
    free = put(tmp_path / "free")
    process(proc, 5, {})
    if hidden == "hidepid":
        (proc / "self" / "mounts").write_text(f"proc {proc} proc rw,hidepid=invisible 0 0\n")
    elif hidden == "namespace":
        monkeypatch.setattr(FileUsage, "_is_first_namespace", lambda _: False)
    else:
        monkeypatch.setattr(FileUsage, "_add_mappings", _not_permitted)
    usage = file_usage(proc)
    assert usage.obstacle(None, inode(free)) is Reason.OPEN_UNKNOWN
    assert usage.all_writers_append(inode(free)) is False


def test_a_kernel_thread_has_no_open_files_to_see(proc: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is not readable for every user, and that hides nothing."""
    monkeypatch.setattr(FileUsage, "_add_mappings", _not_permitted)
    process(proc, 2, {})
    (proc / "2" / "stat").write_text("2 (kthread (odd) name) S 0 0 0 0 -1 2129984 0 0")
    assert file_usage(proc).obstacle(None, inode(put(tmp_path / "free"))) is None


def test_names_chosen_by_a_user_neither_hide_a_file_nor_end_the_cleaning(proc: Path, tmp_path: Path) -> None:
    """The user maps files and mounts at places whose names contain apparent further lines."""
    mapped, free = put(tmp_path / "mapped"), put(tmp_path / "free")
    odd = "7f00-7f01 r--p 00000000 08:01 7 /tmp/a\rb\x0c\x1c 00000000-1 r-xp 0 zz:zz zz /x\x85 y\n"
    process(proc, 5, {}, maps=f"{odd}7f00-7f01 r--p 00000000 08:01 {mapped.stat().st_ino} /m\udcff\n")
    with (proc / "self" / "mounts").open("a") as mounts:
        mounts.write(f"x /home/u/a\x0cb\xa0{proc}\xa0proc\x0cc fuse.x rw 0 0\n")
        mounts.write(f"x /home/u/a\x0cb\xa0{proc}\xa0proc\xa0hidepid=2 fuse.x rw 0 0\n")
    usage = file_usage(proc)
    assert usage.obstacle(None, inode(mapped)) is Reason.OPEN
    assert usage.obstacle(None, inode(free)) is None


def test_a_processes_open_files_are_searched_only_until_the_deadline(proc: Path, tmp_path: Path) -> None:
    """There may be a million open files, and unchecked ones do not count as unused."""
    free = put(tmp_path / "free")
    process(proc, 5, {str(number): (free, os.O_PATH) for number in range(300)})
    assert file_usage(proc, stopping=True).obstacle(None, inode(free)) is Reason.OPEN_UNKNOWN
    assert file_usage(proc).obstacle(None, inode(free)) is None


def test_without_leases_the_processes_decide(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a network filesystem, files open on this node stay; the rest goes if every process could be seen."""

    def none(fd: int) -> bool:
        raise OSError("no leases")

    monkeypatch.setattr(open_files, "acquire_write_lease", none)
    root = tmp_path / "root"
    put(root / "a")
    for sees_all, expected in ((False, {"use_unknown": 1}), (True, {})):
        monkeypatch.setattr(FileUsage, "sees_every_process", lambda _, answer=sees_all: answer)
        monkeypatch.setattr(FileUsage, "_add_process", lambda *_: True)
        assert left(clean(cleaner({"tmp": {"roots": [root]}})), "tmp") == expected


def _not_permitted(*_: object) -> None:
    raise PermissionError
