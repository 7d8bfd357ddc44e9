"""Searching the logs of a node: which lines answer a query, in which order, and what never leaves the node."""

from __future__ import annotations

import json
import os
import random
import time
from collections.abc import Callable, Collection, Mapping
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from tests.support.messages import make_command
from tests.support.search_in_process import search_executor, searcher_of
from trainmedic_agent.errors import CommandRejected
from trainmedic_agent.executors import AcceptedCommand, Executor
from trainmedic_agent.log_reading.discovery import Discovery, Scan
from trainmedic_agent.log_reading.log_policy import KernelLog, KernelReading, LogsPolicy
from trainmedic_agent.log_search import searcher
from trainmedic_agent.log_search.searcher import LogSearcher
from trainmedic_agent.no_logs import NoLogsExecutor
from trainmedic_logs.domain import log_pages
from trainmedic_logs.domain.log_search import FoundLine, LogLevel, LogQuery

NOW = datetime.now(UTC).replace(microsecond=0)
QUERY = LogQuery("llm-1", since=NOW - timedelta(hours=1))


def at(seconds: float) -> str:
    return (NOW - timedelta(seconds=seconds)).isoformat()


class Node:
    """The logs of a node, with two ranks of a job."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.attempt = root / "llm-1" / "attempt-1"
        self.attempt.mkdir(parents=True)
        self.kernel = root.parent / "kern.log"
        self.kernel.touch()
        for rank in (0, 1):
            sources = {"version": 1, "job": "llm-1", "attempt": 1, "rank": rank, "local_rank": rank, "node_rank": 0}
            file = self.attempt / f"sources-gpu-07-{rank}.json"
            file.write_text(json.dumps({**sources, "node": "gpu-07", "files": []}))
        self.policy = LogsPolicy(roots=(str(root),), kernel=KernelLog(KernelReading.FILE, str(self.kernel)))

    def searcher(self) -> LogSearcher:
        return searcher_of(self.policy, "gpu-07")

    def write(self, name: str, *lines: str) -> Path:
        file = self.attempt / name
        file.parent.mkdir(parents=True, exist_ok=True)
        with file.open("a") as opened:
            opened.writelines(f"{line}\n" for line in lines)
        return file

    def found(self, query: LogQuery = QUERY) -> list[FoundLine]:
        return list(self.searcher().page(query, {}).lines)


@pytest.fixture
def node(tmp_path: Path) -> Node:
    return Node(tmp_path / "logs")


def record(rank: int, seconds: float, **fields: Any) -> str:
    return json.dumps({"ts": at(seconds), "job": "llm-1", "rank": rank, "level": "info", "event": "step", **fields})


def test_the_lines_of_all_files_are_ordered_by_time_with_their_rank(node: Node) -> None:
    """torchrun's launcher log repeats the same lines, and those are skipped."""
    out = "ranks-gpu-07/none_x/attempt_0"
    node.write("rank-0.jsonl", record(0, 50, step=1), record(0, 30, step=2))
    node.write(f"{out}/0/stdout.log", f"{at(40)} rank 0 says something", "and goes on")
    node.write(f"{out}/1/stderr.log", f"{at(45)} rank 1 says something")
    node.write("launcher-gpu-07.log", f"[default0]:{at(40)} rank 0 says something", f"{at(35)} torchrun itself")
    lines = node.found()
    told = [(line.rank, line.source, line.text.partition(" ")[2] if line.is_sure else line.text) for line in lines]
    assert told == [
        (0, "training", record(0, 50, step=1).partition(" ")[2]),
        (1, "training", "rank 1 says something"),
        (0, "training", "rank 0 says something"),
        (0, "training", "and goes on"),
        (None, "launcher", "torchrun itself"),
        (0, "training", record(0, 30, step=2).partition(" ")[2]),
    ]
    assert [line.at for line in lines] == sorted(line.at for line in lines)
    assert [line.is_sure for line in lines] == [True, True, True, False, True, True]


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"rank": 1}, ["b1", "b2"]),
        ({"node_rank": 0}, ["a1", "b1", "a2", "b2"]),
        ({"node_rank": 1}, []),
        ({"attempt": 1}, ["a1", "b1", "a2", "b2"]),
        ({"attempt": 2}, []),
        ({"since": NOW - timedelta(seconds=35)}, ["a2", "b2"]),
        ({"until": NOW - timedelta(seconds=35)}, ["a1", "b1"]),
        ({"grep": "[ab]1|x*y"}, ["a1", "b1"]),
        ({"level": LogLevel.WARNING}, ["b1", "a2"]),
        ({"level": LogLevel.ERROR}, ["a2"]),
        ({"job": "llm-2"}, []),
    ],
)
def test_each_part_of_a_query_excludes_lines_that_do_not_match_it(
    node: Node, change: dict[str, Any], expected: list[str]
) -> None:
    """It excludes no others."""
    out = "ranks-gpu-07/none_x/attempt_0"
    node.write(f"{out}/0/stdout.log", f"{at(50)} a1", f"{at(30)} ERROR a2")
    node.write(f"{out}/1/stdout.log", f"{at(40)} WARNING b1", f"{at(20)} b2")
    assert [line.text[-2:] for line in node.found(replace(QUERY, **change))] == expected


def test_the_kernel_is_searched_only_if_requested(node: Node) -> None:
    """Its lines belong to the node, so that they come for each rank."""
    node.kernel.write_text(f"{at(10)} gpu-07 kernel: NVRM: Xid (PCI:0000:9b:00): 79\n")
    assert node.found() == []
    (line,) = node.found(replace(QUERY, kernel=True, rank=1))
    assert (line.source, line.node, line.rank, line.text) == (
        "kernel",
        "gpu-07",
        None,
        "NVRM: Xid (PCI:0000:9b:00): 79",
    )


def test_secrets_are_masked_and_no_pattern_finds_them(node: Node) -> None:
    """A search must not allow guessing a token letter by letter; a key of many lines is masked whole."""
    token = "hf_" + "a" * 30
    key = ["-----BEGIN RSA PRIVATE KEY-----", "MIIEow", "-----END RSA PRIVATE KEY-----"]
    node.write("launcher-gpu-07.log", f"{at(10)} logging in with {token}", *key, "done")
    texts = [line.text for line in node.found()]
    assert token not in "".join(texts)
    assert texts[1:] == ["***", "***", "***", "done"]
    assert node.found(replace(QUERY, grep="hf_a")) == []
    assert node.found(replace(QUERY, grep="MIIE")) == []


def test_pages_contain_each_line_once_even_over_a_rotation(node: Node) -> None:
    """This holds for all page sizes, even if a file is renamed and extended between two pages."""
    file = node.write("launcher-gpu-07.log", *(f"{at(3000 - number)} line {number}" for number in range(1000)))
    node.write("rank-0.jsonl", *(record(0, 3000 - 2 * number, step=number) for number in range(500)))
    search, places, lines = node.searcher(), {}, []  # type: ignore[var-annotated]
    choice = random.Random(3)
    while True:
        page = search.page(QUERY, places, most=choice.randint(1, 400))
        lines += page.lines
        places = dict(page.places)
        if len(lines) > 700 and file.exists() and not (rotated := file.with_name(f"{file.name}.1")).exists():
            file.rename(rotated)
            node.write("launcher-gpu-07.log", *(f"{at(3000 - number)} line {number}" for number in range(1000, 1200)))
            search._scanned_at = float("-inf")
        if page.is_end:
            break
    assert [line.at for line in lines] == sorted(line.at for line in lines)
    texts = [line.text.partition(" line ")[2] for line in lines if line.source == "launcher"]
    assert texts == [str(number) for number in range(1200)]
    assert sum(line.source == "training" for line in lines) == 500


def test_a_following_search_gets_new_lines(node: Node) -> None:
    """A line counts once it is whole."""
    file = node.write("launcher-gpu-07.log", f"{at(10)} first")
    search = node.searcher()
    page = search.page(QUERY, {})
    with file.open("a") as opened:
        opened.write(f"{at(5)} sec")
    again = search.page(QUERY, page.places)
    assert (list(again.lines), again.is_end) == ([], True)
    with file.open("a") as opened:
        opened.write("ond\n")
    (line,) = search.page(QUERY, again.places).lines
    assert line.text.endswith(" second")


def test_the_start_of_a_large_file_is_not_read(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    """The start position is found by the times of its lines."""
    lines = [f"{at(100_000 - number)} {'x' * 100} line {number}" for number in range(100_000)]
    node.write("launcher-gpu-07.log", *lines)
    read: list[int] = []
    pread = os.pread

    def counted(fd: int, count: int, offset: int) -> bytes:
        piece = pread(fd, count, offset)
        read.append(len(piece))
        return piece

    monkeypatch.setattr(os, "pread", counted)
    found = node.found(replace(QUERY, since=NOW - timedelta(seconds=10)))
    assert [line.text.partition(" line ")[2] for line in found] == [str(number) for number in range(99_990, 100_000)]
    assert sum(read) < 2_000_000


def test_only_the_end_of_a_large_file_without_times_is_searched_and_reported(node: Node) -> None:
    """Its lines have the time of the last write, marked as guessed."""
    node.write("launcher-gpu-07.log", *(f"{'x' * 100} line {number}" for number in range(30_000)))
    page = node.searcher().page(QUERY, {})
    assert page.notes == ["1 files on gpu-07 have no timestamps; only the last 1 MiB of each is searched"]
    assert {line.is_sure for line in page.lines} == {False}
    numbers = [int(line.text.rpartition(" ")[2]) for line in page.lines]
    assert numbers == list(range(numbers[0], numbers[0] + len(numbers)))
    assert 30_000 - 1024 * 1024 // 100 < numbers[0] < 30_000 - 1024 * 1024 // 120


def test_a_flood_is_read_in_bounded_pieces(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    """A page that finds nothing ends after a byte limit, and the next one continues there."""
    monkeypatch.setattr(searcher, "MOST_READ", 300_000)
    node.write("launcher-gpu-07.log", *(f"{at(3000)} {'x' * 100} line {number}" for number in range(10_000)))
    search, places, pages = node.searcher(), {}, 0  # type: ignore[var-annotated]
    lines: list[FoundLine] = []
    while True:
        page = search.page(replace(QUERY, grep="line 9999$"), places)
        places, pages = dict(page.places), pages + 1
        lines += page.lines
        if page.is_end:
            break
    assert [line.text[-9:] for line in lines] == ["line 9999"]
    assert pages > 3


def test_files_that_jobs_may_not_present_are_not_read(node: Node, tmp_path: Path) -> None:
    """Links and pipes are not read; the search still ends."""
    secret = tmp_path / "secret"
    secret.write_text("a secret\n")
    (node.attempt / "launcher-gpu-07.log").symlink_to(secret)
    os.mkfifo(node.attempt / "launcher-gpu-07.log.1")
    assert node.found() == []  # a pipe that is opened would never end it


def ask(executor: Executor, **params: Any) -> Mapping[str, Any]:
    accepted = AcceptedCommand(make_command("logs.read", target={"kind": "node", "node": "gpu-07"}, params=params))
    return log_pages.unpacked(executor.perform(accepted)["page"])


def test_an_answer_fits_into_a_reply_and_the_next_one_continues(node: Node) -> None:
    """Lines that hardly compress are returned in several answers."""
    noise = random.Random(1)
    lines = [f"{at(3000 - number)} {noise.randbytes(100).hex()} {number}" for number in range(2000)]
    node.write("launcher-gpu-07.log", *lines)
    executor = search_executor(node.searcher())
    found, cursor, answers = [], {}, 0  # type: ignore[var-annotated]
    while True:
        page = ask(executor, **QUERY.to_wire(), **cursor)
        found += [FoundLine.of_json(line) for line in page["lines"]]
        cursor, answers = {"cursor": page["cursor"]}, answers + 1
        if page["end"]:
            break
    assert [int(line.text.rpartition(" ")[2]) for line in found] == list(range(2000))
    assert answers > 2


@pytest.mark.parametrize(
    ("params", "reason"),
    [
        ({"job": 3, "since": at(0)}, "the query needs a job"),
        ({"job": "llm-1"}, "None is no time"),
        ({"job": "llm-1", "since": "yesterday"}, "'yesterday' is no time"),
        ({"job": "llm-1", "since": at(0), "grep": "("}, "missing"),
        ({"job": "llm-1", "since": at(0), "level": "loud"}, "'loud' is not a valid LogLevel"),
        ({"job": "llm-1", "since": at(0), "rank": -1}, "rank is not a whole number"),
        ({"job": "llm-1", "since": at(0), "cursor": ["x"]}, "not valid compressed JSON"),
        ({"job": "llm-1", "since": at(0), "cursor": log_pages.packed({"places": "[1]"})}, "not from this agent"),
    ],
)
def test_an_invalid_query_is_rejected(node: Node, params: dict[str, Any], reason: str) -> None:
    """The message says what is wrong."""
    with pytest.raises(CommandRejected, match=reason):
        ask(search_executor(node.searcher()), **params)


def test_without_a_log_policy_nothing_is_read() -> None:
    """The answer states the reason."""
    with pytest.raises(CommandRejected, match="has no logs part"):
        ask(NoLogsExecutor(), **QUERY.to_wire())


class BusyDiscovery(Discovery):
    """Counts its scans."""

    def __init__(self, policy: LogsPolicy) -> None:
        super().__init__(policy, "gpu-07")
        self.scans = 0

    def scan(
        self,
        known: Collection[tuple[int, int]],
        is_stopping: Callable[[], bool],
        seconds: float | None = None,
        *,
        is_asked: bool = False,
    ) -> Scan:
        self.scans += 1
        return super().scan(known, is_stopping, seconds, is_asked=is_asked)


def test_the_pages_of_one_answer_do_not_list_directories_again(node: Node) -> None:
    """Each scan of a large directory takes time."""
    node.write("launcher-gpu-07.log", *(f"{at(100)} line {number}" for number in range(100)))
    discovery = BusyDiscovery(node.policy)
    search, places = searcher_of(node.policy, "gpu-07", discovery), {}  # type: ignore[var-annotated]
    for _ in range(10):
        places = dict(search.page(QUERY, places, most=10).places)
    assert discovery.scans == 1


class KernelBuffer:
    """The kernel's own buffer, with lines that it has overwritten and lines that come."""

    lost = 0

    def __init__(self, *lines: tuple[int, bytes]) -> None:
        self.lines = list(lines)

    def fileno(self) -> None:
        return None

    def read(self) -> list[tuple[int, bytes]]:
        lines, self.lines = self.lines, []
        return lines

    def place_json(self) -> Mapping[str, Any]:
        return {}

    def close(self) -> None: ...


def test_the_kernel_buffer_is_searched_by_line_numbers(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each line is returned once over two pages, with its level; the time is counted from the boot."""
    since_boot = int(time.clock_gettime(time.CLOCK_BOOTTIME) * 1e6) - 10_000_000
    lines = [(7, f"3,7,{since_boot},-;NVRM: Xid".encode()), (8, f"6,8,{since_boot + 1},-;eth0 up".encode())]
    buffers = [KernelBuffer(*lines), KernelBuffer(*lines, (9, f"4,9,{since_boot + 2},-;warm".encode()))]
    monkeypatch.setattr(searcher.kernel_log, "open_reader", lambda *_: buffers.pop(0))
    policy = LogsPolicy(kernel=KernelLog(KernelReading.KMSG))
    search = searcher_of(policy, "gpu-07")
    query = replace(QUERY, kernel=True)
    page = search.page(query, {})
    assert [(line.text, line.level.value) for line in page.lines] == [("NVRM: Xid", "error"), ("eth0 up", "info")]
    assert abs((page.lines[0].at - datetime.now(UTC)).total_seconds() + 10) < 60
    (line,) = search.page(query, page.places).lines
    assert (line.text, line.level.value) == ("warm", "warning")
