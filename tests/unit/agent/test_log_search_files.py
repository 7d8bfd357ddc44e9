"""Searching files as they are on nodes: rotated, copied, packed, without ranks, and made to do harm."""

from __future__ import annotations

import errno
import gzip
import os
import random
import time
import tracemalloc
from collections.abc import Mapping
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from tests.support.search_in_process import searcher_of
from trainmedic.wire.log_layout import AttemptLogs
from trainmedic_agent.log_opening.node_files import LogRefused, NamedBy, UnreadReason
from trainmedic_agent.log_opening.own_files import OwnFiles
from trainmedic_agent.log_reading.log_policy import LogsPolicy
from trainmedic_agent.log_search import packed_lines, searcher
from trainmedic_agent.log_search.searcher import LogPage
from trainmedic_agent.log_search.wanted_lines import FilePlace, ReadBudget
from trainmedic_logs.domain.log_search import FoundLine, LeftOut, LogQuery, left_out_notes

NOW = datetime.now(UTC).replace(microsecond=0)
QUERY = LogQuery("llm-1", NOW - timedelta(hours=1))


class SearchedNode:
    """One job's launcher log on a node, and what follows it."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.attempt = AttemptLogs.of(root, "llm-1", 1)
        self.attempt.path.mkdir(parents=True)
        self.log = self.attempt.launcher("n1")
        self.search = searcher_of(LogsPolicy(roots=(str(root),)), "n1", zone=UTC)
        self.places: Mapping[str, FilePlace] = {}
        self.count = 0

    def write(self, count: int, path: Path | None = None, text: str = "line") -> None:
        """Lines with growing numbers, each a second after the one before."""
        with (path or self.log).open("a") as file:
            for _ in range(count):
                at = NOW - timedelta(seconds=3000 - self.count)
                file.write(f"{at:%Y-%m-%d %H:%M:%S},000 {text} {self.count}\n")
                self.count += 1

    def page(self, **conditions: Any) -> LogPage:
        """A whole answer from the beginning."""
        lines: list[FoundLine] = []
        places: Mapping[str, FilePlace] = {}
        notes: dict[str, None] = {}
        first = None
        while True:
            page = self.search.page(replace(QUERY, **conditions), places)
            first = first or page
            lines += page.lines
            notes |= dict.fromkeys(page.notes)
            places = page.places
            if page.is_end:
                return LogPage(lines, places, True, list(notes), first.left_out, first.job_files)

    def follow(self) -> list[int]:
        """The numbers of the lines that are new since the last call."""
        self.search._scanned_at = float("-inf")
        found: list[int] = []
        while True:
            page = self.search.page(QUERY, self.places)
            self.places = page.places
            found += [int(line.text.rpartition(" ")[2]) for line in page.lines]
            if page.is_end:
                return found


@pytest.fixture
def node(tmp_path: Path) -> SearchedNode:
    return SearchedNode(tmp_path / "logs")


def rename(log: Path) -> None:
    for number in range(3, 0, -1):
        older = log.with_name(f"{log.name}.{number}")
        if older.exists():
            older.rename(log.with_name(f"{log.name}.{number + 1}"))
    log.rename(log.with_name(f"{log.name}.1"))
    log.touch()


def copy_and_truncate(log: Path) -> None:
    log.with_name(f"{log.name}.1").write_bytes(log.read_bytes())
    log.write_bytes(b"")


def rename_and_pack(log: Path) -> None:
    rename(log)
    older = log.with_name(f"{log.name}.2")
    if older.exists():
        with gzip.open(log.with_name(f"{log.name}.2.gz"), "wb") as packed:
            packed.write(older.read_bytes())
        older.unlink()


@pytest.mark.parametrize("rotate", [rename, copy_and_truncate, rename_and_pack])
@pytest.mark.parametrize("seed", range(4))
def test_following_over_rotations_returns_each_line_once(rotate: Any, seed: int, node: SearchedNode) -> None:
    """The file is rotated between two checks, or before one of its lines was read."""
    choice = random.Random(seed)
    node.write(3)
    found = node.follow()
    for _ in range(25):
        node.write(choice.randint(0, 3))
        if choice.random() < 0.4:
            rotate(node.log)
            node.write(choice.randint(0, 3))
        if choice.random() < 0.7 or rotate is not rename:
            found += node.follow()
    found += node.follow()
    assert found == list(range(node.count))


def test_lines_written_after_the_last_scan_are_in_a_short_window(node: SearchedNode) -> None:
    """A quiet log is searched after another search has just scanned it."""
    node.write(1)
    os.utime(node.log, (time.time() - 600,) * 2)
    window = replace(QUERY, since=datetime.now(UTC) - timedelta(seconds=2))
    assert node.search.page(window, {}).lines == []
    with node.log.open("a") as file:
        file.write(f"{datetime.now(UTC):%Y-%m-%d %H:%M:%S.%f} NCCL timeout\n")
    page = node.search.page(window, {})
    assert [line.text.rpartition(" ")[2] for line in page.lines] == ["timeout"]


def test_a_truncated_file_that_outgrew_its_position_is_read_from_its_start(
    node: SearchedNode,
) -> None:
    """Its size alone does not show that the content is new."""
    node.write(5)
    assert node.follow() == list(range(5))
    node.log.write_bytes(b"")
    node.write(30)
    assert node.follow() == list(range(5, 35))


def test_compressed_files_are_searched_as_far_as_they_are_unpacked(
    node: SearchedNode, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are read in order, before the file itself; skipped and damaged parts are reported."""
    for name in ("launcher-n1.log-20260101.gz", "launcher-n1.log.1.gz"):
        with gzip.open(node.attempt.path / name, "wt") as packed:
            for _ in range(200):
                packed.write(f"{NOW - timedelta(seconds=3000 - node.count):%Y-%m-%d %H:%M:%S} line {node.count}\n")
                node.count += 1
    node.write(10)
    page = node.page()
    assert [int(line.text.rpartition(" ")[2]) for line in page.lines] == list(range(410))
    assert page.notes == []
    monkeypatch.setattr(packed_lines, "MOST_UNPACKED", 1000)
    monkeypatch.setattr(packed_lines, "_PIECE", 500)
    page = node.page()
    assert len(page.lines) < 100
    assert page.notes[0].startswith("2 compressed files on n1 exceed")
    (node.attempt.path / "launcher-n1.log.1.gz").write_bytes(b"\x1f\x8b no gzip")
    assert "damaged" in node.page().notes[0]


@pytest.mark.parametrize("before", [0, 1])
def test_a_compressed_file_that_ends_early_is_named(before: int, node: SearchedNode) -> None:
    node.write(1)
    member = gzip.compress(b"".join(b"line %d\n" % number**5 for number in range(2000)))
    older = node.attempt.path / "launcher-n1.log.1.gz"
    older.write_bytes(member * (before + 1))
    assert not any("end early" in note for note in node.page().notes)
    older.write_bytes((member * (before + 1))[:-100])
    assert any("end early" in note for note in node.page().notes)


def test_a_decompression_bomb_uses_little_memory(node: SearchedNode) -> None:
    """The file is made to fill the memory when it is unpacked."""
    node.write(1)
    with gzip.open(node.attempt.path / "launcher-n1.log.1.gz", "wb", compresslevel=1) as packed:
        for _ in range(200):
            packed.write(b"\0" * 1024 * 1024)
    tracemalloc.start()
    try:
        page = node.page()
        _, most = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert most < 20 * 1024 * 1024
    assert "compressed files" in page.notes[0]


@pytest.mark.parametrize(
    ("conditions", "numbers", "left_out"),
    [
        ({}, [0, 1, 2, 3], {}),
        ({"node_rank": 3}, [], {"node_rank": LeftOut(files=2)}),
        ({"rank": 0}, [1], {"rank": LeftOut(lines=2)}),
        ({"rank": 5}, [], {"rank": LeftOut(lines=2)}),
        ({"local_rank": 1}, [3], {"local_rank": LeftOut(lines=3)}),
        ({"rank": 0, "grep": "line 1"}, [1], {}),
        ({"rank": 0, "grep": "line 0"}, [], {"rank": LeftOut(lines=1)}),
    ],
)
def test_lines_without_a_rank_answer_no_query_for_a_rank(
    node: SearchedNode, conditions: dict[str, Any], numbers: list[int], left_out: dict[str, LeftOut]
) -> None:
    """They are counted if they match the rest of the query."""
    own = node.attempt.ranks("n1") / "x" / "attempt_0" / "1" / "stderr.log"
    own.parent.mkdir(parents=True)
    node.write(1)
    node.write(1, text="[rank0]: never a prefix here")
    with node.log.open("a") as file:
        file.truncate(0)
        file.write(f"{NOW - timedelta(seconds=30)} line 0\n[rank0]: {NOW - timedelta(seconds=20)} line 1\n")
        file.write(f"{NOW - timedelta(seconds=10)} line 2\n")
    with own.open("a") as file:
        file.write(f"{NOW - timedelta(seconds=5)} line 3\n")
    page = node.page(**conditions)
    assert [int(line.text.rpartition(" ")[2]) for line in page.lines] == numbers
    relevant = {name: each for name, each in page.left_out.items() if name != "rank" or "rank" in left_out}
    if "rank" in left_out and "grep" not in conditions:
        # The rank's own file states its local rank alone.
        left_out = {"rank": left_out["rank"] + LeftOut(lines=1)}
    assert relevant == left_out


def test_notes_state_what_was_left_out() -> None:
    """The notes contain the numbers."""
    counts = {"node_rank": LeftOut(1, 0), "rank": LeftOut(2, 31), "time": LeftOut(0, 4, NOW), "attempt": LeftOut()}
    assert left_out_notes(counts) == [
        "1 file states no node rank and is left out",
        "2 files and 31 lines state no rank and are left out",
        "4 lines state no time and may have been written outside of the window, before the agent looked at the file; "
        f"they are left out; since {NOW:%Y-%m-%dT%H:%M:%S}.000000Z includes them",
    ]


def test_lines_of_a_launcher_have_the_node_rank_that_the_ranks_state(node: SearchedNode) -> None:
    """The ranks belong to the same attempt on this node."""
    node.write(3)
    said = '{"version": 1, "job": "llm-1", "attempt": 1, "rank": 8, "local_rank": 0, "node_rank": 1, "node": "n1", '
    node.attempt.sources("n1", 0).write_text(f'{said}"files": []}}')
    node.attempt.records(8).write_text(f'{{"ts": "{NOW.isoformat()}", "event": "step", "step": 3}}\n')
    assert len(node.page(node_rank=1).lines) == 4
    assert node.page(node_rank=0).lines == []


def hostile_files(path: Path) -> None:
    choice = random.Random(2)
    names = iter(range(100))

    def written(content: bytes) -> None:
        own = path / "ranks-n1" / "x" / "attempt_0" / str(next(names)) / "stdout.log"
        own.parent.mkdir(parents=True)
        own.write_bytes(content)

    written(b"x" * 4_000_000)
    written(b"\0" * 4_000_000 + b"\n")
    written(choice.randbytes(1_000_000))
    written(b"\n" * 60_000)
    written(b"".join(f"{NOW - timedelta(seconds=choice.randint(-(9**6), 9**6))} x\n".encode() for _ in range(2_000)))
    written(b"9999-12-31 23:59:59 x\n0001-01-01 00:00:00 x\n[9999999999] x\n" * 500)
    written((b"[" * 500 + b"\n") * 2_000)


def test_a_malicious_file_neither_hangs_the_search_nor_fills_the_memory(node: SearchedNode) -> None:
    """It has giant lines, zeros, noise and unordered times; other files' lines are still returned."""
    hostile_files(node.attempt.path)
    node.write(50)
    tracemalloc.start()
    began = time.process_time()
    try:
        page = node.page(grep="line", until=NOW - timedelta(minutes=10))
        _, most = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert [int(line.text.rpartition(" ")[2]) for line in page.lines] == list(range(50))
    assert most < 64 * 1024 * 1024
    assert time.process_time() - began < 90


def test_a_hole_of_any_size_is_skipped(node: SearchedNode) -> None:
    """The launcher makes one in the middle of a rank's output, so that it stays bounded."""
    node.write(10)
    with node.log.open("r+b") as file:
        file.seek(200 * 1024**3)
        file.write(b"\n")
    node.write(10)
    began = time.process_time()
    page = node.page()
    assert [int(line.text.rpartition(" ")[2]) for line in page.lines if line.text.strip("\0 ")] == list(range(20))
    assert time.process_time() - began < 5
    assert os.stat(node.log).st_blocks < 1000  # noqa: PTH116


def test_a_page_that_ends_early_returns_no_line_before_an_earlier_one(
    node: SearchedNode, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file that was not read far enough delays the lines of others."""
    other = node.attempt.ranks("n1") / "x" / "attempt_0" / "1" / "stderr.log"
    other.parent.mkdir(parents=True)
    for _ in range(300):
        node.write(5, other)
        node.write(5)
    monkeypatch.setattr(searcher, "MOST_READ", 20_000)
    monkeypatch.setattr("trainmedic_agent.log_search.file_lines.PIECE", 4096)
    lines = node.page(grep="line [0-9]*5$").lines
    numbers = [int(line.text.rpartition(" ")[2]) for line in lines]
    assert numbers == list(range(5, 3000, 10))


def test_a_search_for_files_that_takes_too_long_is_cut_and_reported(
    node: SearchedNode, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another user's job with very many directories does not delay the search. A note names what was missed."""
    node.write(3)
    (node.root / "large").mkdir()
    monkeypatch.setattr(searcher, "SCAN_SECONDS", 0.0)
    page = node.search.page(QUERY, {})
    assert not page.lines
    assert any("2 jobs on n1 were not scanned in time" in note for note in page.notes)


def test_listing_directories_for_older_parts_is_cut_and_reported(
    node: SearchedNode, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The files themselves are searched."""
    node.write(3)
    node.write(3, node.log.with_name(f"{node.log.name}.1"))
    monkeypatch.setattr(searcher, "LISTING_SECONDS", -1.0)
    page = node.search.page(QUERY, {})
    assert len(page.lines) == 3
    assert any("older parts of 1 files on n1 are not searched" in note for note in page.notes)


def test_files_that_are_not_opened_in_time_are_left_out_and_reported(
    node: SearchedNode, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A page gets on however slow opening is: reading has its time afterwards, and the first file is always read."""
    node.write(3)
    other = node.log.parent.with_name("attempt-9") / node.log.name
    other.parent.mkdir()
    node.write(3, other)
    monkeypatch.setattr(searcher, "OPEN_SECONDS", -1.0)
    page = node.search.page(QUERY, {})
    assert len(page.lines) == 3
    assert any("1 files on n1 are not searched: opening them takes too long" in note for note in page.notes)


class ForbiddenFiles(OwnFiles):
    """The node's files, of which the agent's user may not read one. Root may read every file."""

    def __init__(self, error: Exception) -> None:
        super().__init__()
        self.error = error

    def open(self, path: str, named_by: NamedBy | None = None) -> int:
        if "attempt-9" in path:
            raise self.error
        return super().open(path, named_by)


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (LogRefused(UnreadReason.FORBIDDEN), "permission denied"),
        (OSError(errno.EIO, "Input/output error"), "Input/output error"),
        (LogRefused(UnreadReason.LINK), None),
        (FileNotFoundError(errno.ENOENT, "No such file or directory"), None),
    ],
)
def test_an_unreadable_file_is_counted(node: SearchedNode, error: Exception, reason: str | None) -> None:
    """Its lines may be relevant. Links are never read, and a file may have disappeared since the scan."""
    node.write(3)
    other = node.log.parent.with_name("attempt-9") / node.log.name
    other.parent.mkdir()
    node.write(3, other)
    search = searcher_of(LogsPolicy(roots=(str(node.root),)), "n1", zone=UTC, files=ForbiddenFiles(error))
    page = search.page(QUERY, {})
    assert len(page.lines) == 3
    told = [note for note in page.notes if "cannot be read" in note]
    assert told == ([f"1 files on n1 cannot be read ({reason}); lines may be missing"] if reason else [])


class UnreadableFiles(OwnFiles):
    """The node's files, of which one is opened but cannot be read, as on a file system that fails in between."""

    def open(self, path: str, named_by: NamedBy | None = None) -> int:
        return os.open(path, os.O_WRONLY) if "attempt-9" in path else super().open(path, named_by)


class RememberedFiles(OwnFiles):
    """The node's files, and the descriptors that were given."""

    def __init__(self) -> None:
        self.opened: list[int] = []

    def open(self, path: str, named_by: NamedBy | None = None) -> int:
        self.opened.append(super().open(path, named_by))
        return self.opened[-1]


@pytest.mark.parametrize("call", ["fstat", "pread"])
def test_an_unreadable_file_is_closed_after_the_page(
    call: str, node: SearchedNode, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise each search would keep it open, compressed or not."""
    node.write(3)
    (node.attempt.path / "launcher-n1.log.1.gz").write_bytes(gzip.compress(b"line"))
    files, original = RememberedFiles(), getattr(os, call)

    def failing(fd: int, *more: int) -> object:
        if fd in files.opened:
            raise OSError(errno.ESTALE, "stale file handle")
        return original(fd, *more)

    with monkeypatch.context() as patch:
        patch.setattr(os, call, failing)
        page = searcher_of(LogsPolicy(roots=(str(node.root),)), "n1", zone=UTC, files=files).page(QUERY, {})
    assert any("cannot be read" in note for note in page.notes)
    assert len(files.opened) == 2
    for descriptor in files.opened:
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.fstat(descriptor)


def test_a_file_that_became_unreadable_does_not_block_the_page(node: SearchedNode) -> None:
    """Its lines may be missing, which is reported."""
    node.write(3)
    other = node.log.parent.with_name("attempt-9") / node.log.name
    other.parent.mkdir()
    node.write(3, other)
    search = searcher_of(LogsPolicy(roots=(str(node.root),)), "n1", zone=UTC, files=UnreadableFiles())
    page = search.page(QUERY, {})
    assert len(page.lines) == 3
    assert "1 files on n1 cannot be read (Bad file descriptor); lines may be missing" in page.notes


@pytest.mark.parametrize(
    "cursor",
    [
        '{"f": [1e999, false, "", 1]}',
        '{"f": [0, false, "", 1e999]}',
        '{"f": [1e30, false, "", 0]}',
        '{"f": [-1e30, false, "", 0]}',
        "[" * 100_000,
    ],
)
def test_a_position_that_no_page_has_returned_is_rejected(cursor: str) -> None:
    with pytest.raises(ValueError, match="the cursor is not from this agent"):
        searcher.places_of_json(cursor)


def test_the_time_for_reading_starts_after_the_files_are_open() -> None:
    """Otherwise each page of many files would be empty, and the next one too."""
    budget = ReadBudget(1000, 0.0)
    assert budget.is_spent
    lasting = ReadBudget(1000, 60.0)
    lasting._until = 0.0
    assert lasting.is_spent
    lasting.restart_time()
    assert not lasting.is_spent
