"""One page of an answer: the lines of all files that can have some, merged by time.

A cursor says how far each file was read, by its inode, so that a file which was renamed meanwhile is read on. Only
this node makes and reads cursors. Who calls it: ``executor``, in one thread.
"""

from __future__ import annotations

import heapq
import json
import logging
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from datetime import datetime

from msgspec import Struct, field

from trainmedic_server.agent.log_reading import kernel_log
from trainmedic_server.agent.log_reading.discovery import Discovery
from trainmedic_server.agent.log_reading.log_files import LogRefused
from trainmedic_server.agent.log_reading.log_policy import KernelReading, LogsPolicy
from trainmedic_server.agent.log_search.file_lines import (
    FileLines,
    FilePlace,
    KernelLines,
    LineFilter,
    ReadBudget,
    WantedLines,
)
from trainmedic_server.domain.finding import Origin
from trainmedic_server.domain.log_search import FoundLine, LogQuery, read_time, written
from trainmedic_server.domain.log_sources import KERNEL_SOURCES

log = logging.getLogger(__name__)

MOST_FILES = 256
MOST_LINES = 5000
"""Lines of a page."""
MOST_TEXT = 512 * 1024
"""Characters of the lines of a page."""
MOST_READ = 64 * 1024 * 1024
"""Bytes that are read for a page."""
MOST_SECONDS = 4.0
_SCAN_AGAIN = 5.0
_ROTATED = ".1"

Places = Mapping[str, FilePlace]


class LogFileFound(Struct, frozen=True):
    """A file that can have lines of the answer."""

    path: str
    origin: Origin
    written_at: float


class LogPage(Struct, frozen=True):
    """What one command answers."""

    lines: Sequence[FoundLine]
    places: Places
    """From where on the next page goes on, by file."""
    is_end: bool
    """There is nothing more now."""
    notes: Sequence[str] = field(default=())
    """What a reader of the lines should know: files that were left out."""


class LogSearcher:
    """Searches the files that the policy lets be read. One thread uses it."""

    def __init__(self, policy: LogsPolicy, node: str, discovery: Discovery | None = None) -> None:
        self._policy = policy
        self._node = node
        self._kernel = Origin("kernel", node)
        self._discovery = discovery if discovery is not None else Discovery(policy, node)
        self._files: Sequence[LogFileFound] = ()
        self._scanned_at = float("-inf")

    def page(
        self, query: LogQuery, places: Places, is_stopping: Callable[[], bool] = lambda: False, most: int = MOST_LINES
    ) -> LogPage:
        """The next lines, oldest first. Raises ValueError where the query's pattern cannot be used."""
        line_filter = LineFilter.of(query)
        if time.monotonic() - self._scanned_at > _SCAN_AGAIN:
            self._files = self._scan(is_stopping)
            self._scanned_at = time.monotonic()
        notes: list[str] = []
        files = self._candidates(query, notes)
        budget = ReadBudget(MOST_READ, MOST_SECONDS)
        with ExitStack() as stack:
            opened: list[WantedLines] = [*_opened(files, line_filter, places, budget, stack)]
            opened += self._kernel_lines(line_filter, places, stack, notes)
            untimed = sum(file.is_untimed for file in opened)
            if untimed and not places:
                notes.append(f"{untimed} files on {self._node} say no times: of each only the last 1 MiB is searched")
            lines, is_cut = _merged(opened, min(most, MOST_LINES))
            reached = {**places, **{file.key: file.place for file in opened}}
        return LogPage(lines, reached, not is_cut and not budget.is_spent, notes)

    def _scan(self, is_stopping: Callable[[], bool]) -> list[LogFileFound]:
        entries = self._discovery.scan((), is_stopping).files
        files = [
            LogFileFound(each.path, each.origin, each.written_ns / 1e9) for each in entries if each.origin is not None
        ]
        kernel = self._policy.kernel
        if kernel is not None and kernel_log.way_of(kernel) is KernelReading.FILE:
            files.append(LogFileFound(kernel.path, self._kernel, time.time()))
        return files

    def _kernel_lines(
        self, line_filter: LineFilter, places: Places, stack: ExitStack, notes: list[str]
    ) -> list[KernelLines]:
        """What is read of the kernel's log other than from a file."""
        kernel = self._policy.kernel
        if kernel is None or not line_filter.query.kernel:
            return []
        way = kernel_log.way_of(kernel)
        if way is KernelReading.FILE:
            return []
        try:
            reader = kernel_log.opened(way, {}, "")
            stack.callback(reader.close)
            return [KernelLines(reader, self._kernel, places, line_filter)]
        except OSError as error:
            notes.append(f"the kernel's log of {self._node} cannot be read: {error.strerror}")
            return []

    def _candidates(self, query: LogQuery, notes: list[str]) -> list[LogFileFound]:
        files = [file for file in self._files if _can_answer(file, query)]
        files.sort(key=lambda file: -file.written_at)
        if len(files) > MOST_FILES:
            notes.append(f"of {len(files)} files on {self._node} the last written {MOST_FILES} are searched")
        return files[:MOST_FILES]


def _can_answer(file: LogFileFound, query: LogQuery) -> bool:
    origin = file.origin
    if origin.source in KERNEL_SOURCES:
        return query.kernel
    if file.written_at < query.since.timestamp():
        return False
    if origin.job != query.job and (origin.pod is None or origin.pod not in query.pods):
        return False
    pairs = ((query.attempt, origin.attempt), (query.rank, origin.rank), (query.node_rank, origin.node_rank))
    if query.attempt is not None and origin.attempt is None:
        return False
    return all(asked is None or of_file is None or asked == of_file for asked, of_file in pairs)


def _opened(
    files: Iterable[LogFileFound], line_filter: LineFilter, places: Places, budget: ReadBudget, stack: ExitStack
) -> Iterable[FileLines]:
    """The files that can be opened, and the older half of each that was rotated."""
    files = list(files)
    own_files = {(file.origin.job, file.origin.attempt) for file in files if "/ranks-" in file.path}
    met: set[str] = set()
    for file in files:
        for path in (file.path, f"{file.path}{_ROTATED}"):
            try:
                lines = FileLines(path, file.origin, places, line_filter, budget)
            except (OSError, LogRefused):
                continue
            stack.callback(lines.close)
            if lines.key in met:
                continue
            met.add(lines.key)
            lines.skips_ranks = file.origin.source == "launcher" and (file.origin.job, file.origin.attempt) in own_files
            yield lines


def _merged(files: Sequence[WantedLines], most: int) -> tuple[list[FoundLine], bool]:
    """The next lines of all files by time, and whether the page was full. Each file is left behind its last line."""
    heads: list[tuple[datetime, int, FoundLine]] = []
    latest: dict[int, datetime] = {}

    def push(number: int) -> None:
        try:
            line = files[number].next()
        except OSError as error:
            log.warning("a log cannot be read on", extra={"reason": error.strerror})
            return
        if line is not None:
            latest[number] = max(line.at, latest.get(number, line.at))
            heapq.heappush(heads, (latest[number], number, line))

    for number in range(len(files)):
        push(number)
    lines: list[FoundLine] = []
    characters = 0
    while heads and len(lines) < most and characters < MOST_TEXT:
        _, number, line = heapq.heappop(heads)
        lines.append(line)
        characters += len(line.text) + 100
        push(number)
    for _, number, _ in heads:  # read, and not given out
        files[number].go_to(files[number].line_place)
    return lines, bool(heads)


def places_json(places: Places) -> str:
    return json.dumps({key: [each.offset, each.is_skipping, written(each.at)] for key, each in places.items()})


def places_of_json(text: str) -> dict[str, FilePlace]:
    """Raises ValueError where it is none of `places_json`."""
    try:
        members = json.loads(text)
        return {
            str(key): FilePlace(int(offset), bool(is_skipping), read_time(at))
            for key, (offset, is_skipping, at) in members.items()
        }
    except (TypeError, AttributeError, KeyError) as error:
        raise ValueError("the cursor is none of this agent's") from error
