"""Emptying and shrinking logs: what is freed, what their writers notice of it, and what is left."""

from __future__ import annotations

import array
import fcntl
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.unit.agent.disk.trees import clean, cleaner, left, put, stored_below
from trainmedic_agent.disk.access_times import KEPT, AccessTimes
from trainmedic_agent.disk.open_files import FileUsage
from trainmedic_agent.disk.removal import may_hide_reads
from trainmedic_agent.disk.rules import AgeBy

RULE = {"globs": "*.log", "do": "truncate", "min_age": "0s"}
SHRINK = {"globs": "*.log", "do": "shrink", "min_age": "0s", "keep_tail": 5000}
WRITER = """
import os, sys
fd = os.open(sys.argv[1], os.O_WRONLY | (os.O_APPEND if sys.argv[2] == "append" else 0))
os.lseek(fd, 0, os.SEEK_END)
for line in sys.stdin:
    os.write(fd, line.encode())
    print(flush=True)
"""


@pytest.fixture
def root(tmp_path: Path) -> Path:
    (tmp_path / "logs").mkdir()
    return tmp_path / "logs"


@pytest.fixture
def proc(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A ``/proc`` with those processes alone that a test links into it, all of which can be seen."""
    (tmp_path / "proc" / "self").mkdir(parents=True)
    (tmp_path / "proc" / "self" / "mounts").write_text("")
    monkeypatch.setattr(FileUsage, "_is_first_namespace", lambda _: True)
    return tmp_path / "proc"


def test_a_log_without_a_writer_is_emptied_and_keeps_its_name(root: Path) -> None:
    """Its bytes are freed; a log that is already empty is skipped."""
    put(root / "a.log", size=10_000)
    put(root / "b.log", size=0)
    output = clean(cleaner({"logs": {"roots": [root], **RULE}}))
    assert (output["files"], output["bytes"]) == (1, 12_288)
    assert (root / "a.log").read_bytes() == b""
    assert left(output, "logs") == {"nothing_to_free": 1}


@pytest.mark.parametrize("rule", [RULE, SHRINK])
def test_a_log_with_unrecorded_reads_does_not_count_as_unused(root: Path, rule: dict[str, object]) -> None:
    put(root / "a.log", size=40_000)
    try:
        _set_no_access_time(root / "a.log")
    except OSError:
        pytest.skip("the file system has no such attribute")
    output = clean(cleaner({"logs": {"roots": [root], **rule, "age_by": "used"}}))
    assert left(output, "logs") == {"use_unknown": 1}
    output = clean(cleaner({"logs": {"roots": [root], **rule, "age_by": "changed"}}))
    assert output["files"] == 1


def test_the_attributes_of_an_unreadable_file_are_unknown() -> None:
    assert may_hide_reads(None, AgeBy.USED, KEPT)
    assert not may_hide_reads(None, AgeBy.CHANGED, KEPT)
    assert not may_hide_reads(None, AgeBy.USED, AccessTimes(untraced=("mounted noatime",)))


def _set_no_access_time(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY)
    try:
        flags = array.array("l", [0])
        fcntl.ioctl(fd, 0x80086601, flags)  # FS_IOC_GETFLAGS
        flags[0] |= 0x80
        fcntl.ioctl(fd, 0x40086602, flags)  # FS_IOC_SETFLAGS
    finally:
        os.close(fd)


def test_a_reader_does_not_block_truncation(root: Path, proc: Path) -> None:
    """A process that follows the log sees the truncation, as with every copytruncate rotation."""
    put(root / "a.log", size=10_000)
    with (root / "a.log").open("rb") as follower:
        clean(cleaner({"logs": {"roots": [root], **RULE}}, proc=proc))
        assert follower.read() == b""


@pytest.mark.parametrize("how", ["append", "at its place"])
def test_a_writer_continues_to_write(root: Path, proc: Path, how: str) -> None:
    """An appending writer starts again at 0; for another, which would leave zeros, a hole is made."""
    path = put(root / "a.log", size=40_000)
    argv = [sys.executable, "-c", WRITER, str(path), how]
    with subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as writer:
        assert writer.stdin is not None
        assert writer.stdout is not None

        def write(line: str) -> None:
            writer.stdin.write(f"{line}\n")  # type: ignore[union-attr]
            writer.stdin.flush()  # type: ignore[union-attr]
            writer.stdout.readline()  # type: ignore[union-attr]

        write("one")
        (proc / str(writer.pid)).symlink_to(f"/proc/{writer.pid}")
        by = cleaner({"logs": {"roots": [root], **RULE}}, proc=proc)
        trial, run = clean(by, dry_run=True), clean(by)
        write("two")
        writer.stdin.close()
    assert (run["files"], run["bytes"]) == (trial["files"], trial["bytes"])
    assert run["bytes"] == (40_960 if how == "append" else 36_864)
    text = path.read_bytes()
    if how == "append":
        assert text == b"two\n"
    else:
        assert text.endswith(b"xone\ntwo\n")
        assert text.startswith(b"\0" * 36_864)
        assert path.stat().st_blocks * 512 == 4096


def test_a_hole_is_made_if_not_every_process_can_be_seen(root: Path, tmp_path: Path) -> None:
    """Whether an unseen writer appends is unknown, and a hole harms neither kind."""
    path = put(root / "a.log", size=40_000)
    with path.open("ab"):
        assert clean(cleaner({"logs": {"roots": [root], **RULE}}, proc=tmp_path))["bytes"] == 36_864
    assert path.stat().st_size == 40_000


def test_a_given_minimum_age_is_respected(root: Path) -> None:
    """A log written a moment ago is young."""
    put(root / "old.log", days=9)
    put(root / "new.log", days=2)
    output = clean(cleaner({"logs": {"roots": [root], **RULE, "min_age": "7d"}}))
    assert (output["files"], left(output, "logs")) == (1, {"young": 1})
    assert (root / "new.log").stat().st_size == 100


def test_a_log_keeps_its_end_when_it_is_shrunk(root: Path) -> None:
    """The whole blocks before the tail are freed, and a second run finds nothing to free."""
    text = "".join(f"line {number}\n" for number in range(10_000)).encode()
    (root / "a.log").write_bytes(text)
    put(root / "small.log", size=4000)
    by = cleaner({"logs": {"roots": [root], **SHRINK}})
    stored = stored_below(root)
    trial, run, again = clean(by, dry_run=True), clean(by), clean(by)
    assert trial["bytes"] == run["bytes"] == stored - stored_below(root) > len(text) - 5000 - 2 * 4096
    shrunk = (root / "a.log").read_bytes()
    assert len(shrunk) == len(text)
    assert shrunk[-5000:] == text[-5000:]
    assert not shrunk[:4096].strip(b"\0")
    assert (again["files"], left(again, "logs")) == (0, {"nothing_to_free": 2})


@pytest.mark.parametrize("how", ["append", "at its place"])
def test_a_writer_and_a_reader_of_the_end_do_not_notice_shrinking(root: Path, how: str) -> None:
    """The writer's next line follows its last one, and a reader that follows the log reads both."""
    path = put(root / "a.log", size=40_000)
    argv = [sys.executable, "-c", WRITER, str(path), how]
    with subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as writer:
        assert writer.stdin is not None
        assert writer.stdout is not None
        follower = path.open("rb")
        follower.seek(0, 2)

        def write(line: str) -> None:
            writer.stdin.write(f"{line}\n")  # type: ignore[union-attr]
            writer.stdin.flush()  # type: ignore[union-attr]
            writer.stdout.readline()  # type: ignore[union-attr]

        write("one")
        assert clean(cleaner({"logs": {"roots": [root], **SHRINK}}))["bytes"] == 32_768
        write("two")
        writer.stdin.close()
        with follower:
            assert follower.read() == b"one\ntwo\n"
    assert path.read_bytes().endswith(b"xone\ntwo\n")


def test_a_shrunk_log_counts_by_its_remaining_size(root: Path) -> None:
    """Otherwise each cleaning would treat it as a large log again."""
    path = put(root / "a.log", size=400_000)
    by = cleaner({"logs": {"roots": [root], **SHRINK, "min_size": 100_000}})
    assert (clean(by)["files"], clean(by)["rules"]["logs"]["left"]) == (
        1,
        {"size": {"count": 1, "examples": [str(path)]}},
    )


def test_a_log_with_another_name_and_a_checkpoints_log_are_not_shrunk(root: Path) -> None:
    """Files that are never deleted are never cut either."""
    os.link(put(root / "a.log", size=40_000), root / "b.txt")
    put(root / "checkpoint-3" / "train.log", size=40_000)
    output = clean(cleaner({"logs": {"roots": [root], **SHRINK, "globs": "**/*.log"}}))
    assert (output["files"], left(output, "logs")) == (0, {"hard_link": 1, "in_checkpoint": 1})
