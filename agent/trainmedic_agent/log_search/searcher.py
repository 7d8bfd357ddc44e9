"""One page of a search: lines of all files, merged by time."""

from __future__ import annotations

import heapq
import json
import logging
import os
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack, suppress
from datetime import datetime, tzinfo
from typing import Any

from msgspec import Struct, field, structs

from trainmedic_agent.errors import CommandInterrupted, CommandRejected
from trainmedic_agent.log_opening.node_files import LogRefused, NamedBy, NodeFiles, UnreadReason
from trainmedic_agent.log_opening.own_files import OwnFiles
from trainmedic_agent.log_reading import kernel_log
from trainmedic_agent.log_reading.arrivals import ArrivalIndex
from trainmedic_agent.log_reading.discovery import Scan
from trainmedic_agent.log_reading.log_policy import KernelReading, LogsPolicy
from trainmedic_agent.log_search import packed_lines
from trainmedic_agent.log_search.file_lines import FileLines
from trainmedic_agent.log_search.line_clock import BEGINNING
from trainmedic_agent.log_search.line_filter import LineFilter, unknown_of_file
from trainmedic_agent.log_search.packed_lines import PackedLines
from trainmedic_agent.log_search.rotations import OlderPart, Rotations
from trainmedic_agent.log_search.wanted_lines import FilePlace, KernelLines, ReadBudget, WantedLines
from trainmedic_logs.domain import log_pages
from trainmedic_logs.domain.finding import Origin
from trainmedic_logs.domain.log_search import FoundLine, LeftOut, LogQuery, read_time, written
from trainmedic_logs.domain.log_sources import KERNEL_SOURCES

log = logging.getLogger(__name__)

# Limits of a page.
MOST_FILES = 256
MOST_LINES = 5000
MOST_TEXT = 512 * 1024  # characters
MOST_READ = 64 * 1024 * 1024  # bytes
MOST_SECONDS = 4.0  # for reading
SCAN_SECONDS = 4.0  # for finding files
OPEN_SECONDS = 4.0  # for opening files
LISTING_SECONDS = 4.0  # for directories with rotated logs
_SCAN_VALID_SECONDS = 5.0  # for which a scan is used

Places = Mapping[str, FilePlace]  # by device and inode; `KERNEL` for the kernel's log


class LogFileFound(Struct, frozen=True):
    path: str
    origin: Origin
    written_at: float  # Unix time
    named_by: NamedBy | None = None  # see `FoundFile`


class LogPage(Struct, frozen=True):
    lines: Sequence[FoundLine]
    places: Places  # where the next page continues, by file
    is_end: bool  # True if nothing follows
    notes: Sequence[str] = field(default=())  # sentences on what is not searched
    left_out: Mapping[str, LeftOut] = field(default_factory=dict)  # excluded because this attribute is unknown
    job_files: int = 0  # files of the query's job; with 0, a search of all nodes stops asking this one

    def packed(self) -> list[str]:
        return log_pages.packed(
            {
                "lines": [line.to_json() for line in self.lines],
                "cursor": log_pages.packed({"places": places_json(self.places)}),
                "end": self.is_end,
                "notes": list(self.notes),
                "left_out": {name: each.to_json() for name, each in self.left_out.items()},
                "job_files": self.job_files,
            }
        )


class LogSearcher:
    """Not thread-safe."""

    def __init__(
        self,
        policy: LogsPolicy,
        node: str,
        scan: Callable[[Callable[[], bool], float], Scan],
        *,
        arrivals: ArrivalIndex | None = None,
        zone: tzinfo | None = None,
        files: NodeFiles = OwnFiles(),
    ) -> None:
        """`scan`: see `SharedScan`. `zone` of times without one; None is this machine's."""
        self._policy = policy
        self._arrivals = arrivals
        self._zone = zone
        self._node = node
        self._kernel = Origin("kernel", node)
        self._scan = scan
        self._node_files = files
        self._files: Sequence[LogFileFound] = ()
        self._scanned_at = float("-inf")
        self._late, self._is_cut, self._is_stale = 0, False, False  # of the last scan, as in `Scan`

    def packed_page(self, params: Mapping[str, Any], is_stopping: Callable[[], bool]) -> list[str]:
        """Return a page of ``logs.read`` in pieces.

        Raises CommandRejected for an invalid query, CommandInterrupted once `is_stopping` returns true.
        """
        try:
            query = LogQuery.of_wire(params)
            cursor = params.get("cursor")
            places = places_of_json(log_pages.unpacked(cursor)["places"]) if cursor is not None else {}
            most = params.get("most")
            most = most if isinstance(most, int) and 0 < most <= MOST_LINES else MOST_LINES
            while True:
                page = self.page(query, places, is_stopping, most)
                if is_stopping():
                    raise CommandInterrupted("the search was stopped")
                pieces = page.packed()
                if log_pages.fits(pieces) or most == 1:
                    return pieces
                most = max(len(page.lines) // 2, 1)  # too large for an answer: search again for half
        except (ValueError, KeyError) as error:
            raise CommandRejected(f"the query cannot be answered: {error}") from error

    def page(
        self, query: LogQuery, places: Places, is_stopping: Callable[[], bool] = lambda: False, most: int = MOST_LINES
    ) -> LogPage:
        """Return the next lines, oldest first. `places` are the previous page's, empty for the first.

        The page is unusable once `is_stopping` returns true. Raises ValueError for an unusable pattern.
        """
        line_filter = LineFilter.of(query)
        query = line_filter.query
        if time.monotonic() - self._scanned_at > _SCAN_VALID_SECONDS:
            scan = self._scan(is_stopping, SCAN_SECONDS)
            if is_stopping():
                return LogPage((), places, False)
            self._files, self._scanned_at = self._found(scan), time.monotonic()
            self._late, self._is_cut, self._is_stale = scan.late, scan.is_cut, scan.is_stale
        job_files = [file for file in self._files if _is_of_job(file, query)]
        notes = self._notes_on_scan()
        if query.is_search and not job_files:  # asks all nodes; one without the job shows no kernel lines
            return LogPage((), places, True, [] if places else notes)
        left_out: dict[str, LeftOut] = {}
        files = self._candidates(query, job_files, notes, left_out)
        budget = ReadBudget(MOST_READ, MOST_SECONDS, is_stopping)
        rotations = Rotations(self._node_files, LISTING_SECONDS)
        unopened: list[str] = []
        unreadable: dict[str, str] = {}
        with ExitStack() as stack:
            opened: list[WantedLines] = [
                *self._open_files(files, line_filter, places, budget, stack, rotations, unopened, unreadable)
            ]
            budget.restart_time()  # a page makes progress even if opening is slow
            opened += self._kernel_lines(line_filter, places, budget, stack, notes)
            lines, is_cut = _merge(opened, min(most, MOST_LINES), unreadable)
            reached = {**places, **{file.key: file.marked(file.place) for file in opened}}
        if places:
            notes, left_out = [], {}  # already on the first page
        notes += unopened
        if unreadable:
            reasons = ", ".join(sorted(set(unreadable.values())))
            notes.append(f"{len(unreadable)} files on {self._node} cannot be read ({reasons}); lines may be missing")
        if rotations.left_out:
            notes.append(
                f"older parts of {rotations.left_out} files on {self._node} are not searched: listing their "
                "directories takes too long"
            )
        notes += self._notes_on(opened, is_first=not places)
        for file in opened:
            for name, counted in file.left_out.items():
                left_out[name] = left_out.get(name, LeftOut()) + counted
        is_end = not is_cut and not any(file.has_more for file in opened)
        return LogPage(lines, reached, is_end, notes, left_out, len(job_files))

    def _notes_on(self, opened: Sequence[WantedLines], *, is_first: bool) -> list[str]:
        notes = []
        untimed = sum(file.is_untimed for file in opened)
        if untimed and is_first:
            notes.append(f"{untimed} files on {self._node} have no timestamps; only the last 1 MiB of each is searched")
        cut = sum(isinstance(file, PackedLines) and file.is_cut for file in opened)
        if cut:
            most = packed_lines.MOST_UNPACKED >> 20
            notes.append(
                f"{cut} compressed files on {self._node} exceed {most} MiB, are damaged or end early; "
                "the rest is not searched"
            )
        disordered = sum(file.clock.goes_back for file in opened)
        if disordered:
            notes.append(
                f"{disordered} files on {self._node} have times out of order; lines are in the file's order, and some "
                "lines of the window may be missing"
            )
        return notes

    def _notes_on_scan(self) -> list[str]:
        notes = []
        if self._late:
            notes.append(
                f"the directories of {self._late} jobs on {self._node} were not scanned in time; files may be missing"
            )
        if self._is_stale:
            notes.append(f"the scan for files on {self._node} did not end in time; new files may be missing")
        if self._is_cut:
            notes.append(f"a directory on {self._node} has too many entries; files may be missing")
        return notes

    def _found(self, scan: Scan) -> list[LogFileFound]:
        files = [
            LogFileFound(each.path, each.origin, each.written_ns / 1e9, each.named_by)
            for each in scan.files
            if each.origin is not None
        ]
        kernel = self._policy.kernel
        is_found = any(each.origin.source in KERNEL_SOURCES for each in files)
        if kernel is not None and kernel_log.choose_reading(kernel) is KernelReading.FILE and not is_found:
            files.append(LogFileFound(kernel.path, self._kernel, time.time()))
        return _with_node_ranks(files)

    def _kernel_lines(
        self, line_filter: LineFilter, places: Places, budget: ReadBudget, stack: ExitStack, notes: list[str]
    ) -> list[KernelLines]:
        kernel = self._policy.kernel
        if kernel is None or not line_filter.query.kernel:
            return []
        way = kernel_log.choose_reading(kernel)
        if way is KernelReading.FILE:
            return []
        try:
            reader = kernel_log.open_reader(way, {}, "")
            stack.callback(reader.close)
            return [KernelLines(reader, self._kernel, places, line_filter, budget)]
        except OSError as error:
            notes.append(f"the kernel's log of {self._node} cannot be read: {error.strerror}")
            return []

    def _candidates(
        self, query: LogQuery, job_files: Sequence[LogFileFound], notes: list[str], left_out: dict[str, LeftOut]
    ) -> list[LogFileFound]:
        files = [file for file in self._files if query.kernel and file.origin.source in KERNEL_SOURCES]
        written = self._written_since(job_files, query.since.timestamp())
        for file in job_files:
            missing = unknown_of_file(file.origin, query)
            if missing is None or file.path not in written:
                continue
            if missing:
                left_out[missing] = left_out.get(missing, LeftOut()) + LeftOut(files=1)
            else:
                files.append(file)
        files.sort(key=lambda file: -file.written_at)
        if len(files) > MOST_FILES:
            notes.append(f"of {len(files)} files on {self._node} only the {MOST_FILES} last written are searched")
        return files[:MOST_FILES]

    def _written_since(self, files: Sequence[LogFileFound], since: float) -> set[str]:
        """Return the paths of files written since ``since`` (Unix time), after another look."""
        written = {file.path for file in files if file.written_at >= since}
        others: dict[tuple[str, NamedBy | None], list[str]] = {}
        for file in files:
            if file.path not in written:
                directory, _, name = file.path.rpartition("/")
                others.setdefault((directory, file.named_by), []).append(name)
        until = time.monotonic() + OPEN_SECONDS
        for (directory, named_by), names in others.items():
            if time.monotonic() > until:
                break  # the other files keep the scan's time of the last write
            with suppress(OSError, LogRefused):
                every = self._node_files.facts(directory, names, named_by)
                facts_of = zip(names, every, strict=True)
                written |= {
                    f"{directory}/{name}" for name, facts in facts_of if facts and facts.written_ns / 1e9 >= since
                }
        return written

    def _open_files(
        self,
        files: Sequence[LogFileFound],
        line_filter: LineFilter,
        places: Places,
        budget: ReadBudget,
        stack: ExitStack,
        rotations: Rotations,
        unopened: list[str],
        unreadable: dict[str, str],
    ) -> Iterable[WantedLines]:
        """`unopened` takes a note on what is not opened in time, `unreadable` reasons by path or key."""
        until = time.monotonic() + OPEN_SECONDS
        # The launcher's log repeats lines of ranks that have their own files, in torchrun's folder ``ranks-<node>``.
        own_files = {(file.origin.job, file.origin.attempt) for file in files if "/ranks-" in file.path}
        seen: set[str] = set()
        for number, file in enumerate(files):
            if budget.is_stopped:
                return
            if number and time.monotonic() > until:
                unopened.append(
                    f"{len(files) - number} files on {self._node} are not searched: opening them takes too long"
                )
                return
            older = rotations.of(file.path, line_filter.query.since.timestamp(), file.named_by)
            parts = [OlderPart(file.path, False, file.written_at), *older]
            opened = [self._open_part(part, file, line_filter, budget, stack, unreadable) for part in parts]
            of_file = [lines for lines in opened if lines is not None]
            own_places = [places[lines.key] for lines in of_file if lines.key in places]
            for lines in of_file:
                # A compressed part without a place is new: earlier pages read it before its compression.
                is_read = bool(places) and lines.key not in places and isinstance(lines, PackedLines)
                if lines.key in seen or is_read:
                    continue
                seen.add(lines.key)
                lines.skips_ranks = (
                    file.origin.source == "launcher" and (file.origin.job, file.origin.attempt) in own_files
                )
                try:
                    _begin(lines, places, own_places)
                except OSError as error:
                    log.warning("cannot search a log", extra={"reason": error.strerror})
                    unreadable[file.path] = error.strerror or type(error).__name__
                    continue
                yield lines

    def _open_part(
        self,
        part: OlderPart,
        file: LogFileFound,
        line_filter: LineFilter,
        budget: ReadBudget,
        stack: ExitStack,
        unreadable: dict[str, str],
    ) -> FileLines | PackedLines | None:
        try:
            fd = self._node_files.open(part.path, file.named_by)
            stack.callback(os.close, fd)
            if part.is_packed:
                return PackedLines(fd, file.origin, line_filter, budget, self._zone)
            return FileLines(fd, file.origin, line_filter, budget, self._arrivals, self._zone)
        except FileNotFoundError:
            return None
        except OSError as error:
            unreadable[file.path] = error.strerror or type(error).__name__
            return None
        except LogRefused as error:
            if error.reason is UnreadReason.FORBIDDEN:
                unreadable[file.path] = "permission denied"
            return None


def _with_node_ranks(files: Sequence[LogFileFound]) -> list[LogFileFound]:
    """Complete node ranks if the attempt's other files state only one."""
    stated: dict[tuple[str | None, int | None], set[int]] = {}
    for file in files:
        if file.origin.node_rank is not None and file.origin.job is not None:
            stated.setdefault((file.origin.job, file.origin.attempt), set()).add(file.origin.node_rank)
    completed = []
    for file in files:
        of_attempt = stated.get((file.origin.job, file.origin.attempt), set())
        if file.origin.node_rank is None and len(of_attempt) == 1:
            file = structs.replace(file, origin=structs.replace(file.origin, node_rank=min(of_attempt)))
        completed.append(file)
    return completed


def _is_of_job(file: LogFileFound, query: LogQuery) -> bool:
    origin = file.origin
    if origin.source in KERNEL_SOURCES:
        return False
    return origin.job == query.job or (origin.pod is not None and origin.pod in query.pods)


def _begin(lines: FileLines | PackedLines, places: Places, own_places: Sequence[FilePlace]) -> None:
    """Start or continue a file. Raises OSError.

    A new file may be the copy that rotation makes before it truncates the original; read lines are then skipped.
    """
    own = places.get(lines.key)
    if places and isinstance(lines, FileLines) and (own is None or not lines.contains(own)):
        copied = [place for place in own_places if place.offset and place.mark and lines.contains(place)]
        if copied:
            lines.go_to(max(copied, key=lambda place: place.offset))
            return
    lines.begin(places)


def _merge(files: Sequence[WantedLines], most: int, unreadable: dict[str, str]) -> tuple[list[FoundLine], bool]:
    """Return the next lines by time, and whether lines that were read are left. `unreadable` takes reasons by key."""
    heads: list[tuple[datetime, int, FoundLine]] = []
    latest: dict[int, datetime] = {}

    def push(number: int) -> None:
        try:
            line = files[number].next()
        except OSError as error:
            log.warning("cannot continue reading a log", extra={"reason": error.strerror})
            unreadable[files[number].key] = error.strerror or type(error).__name__
            return
        if line is not None:
            latest[number] = max(line.at, latest.get(number, line.at))
            heapq.heappush(heads, (latest[number], number, line))

    for number in range(len(files)):
        push(number)
    lines: list[FoundLine] = []
    characters = 0
    while heads and len(lines) < most and characters < MOST_TEXT:
        # A file out of budget has unread lines, which may precede those of other files.
        waiting = {number for _, number, _ in heads}
        reached = [file.clock.latest for number, file in enumerate(files) if file.has_more and number not in waiting]
        if reached and heads[0][0] > min(reached):
            break
        _, number, line = heapq.heappop(heads)
        lines.append(line)
        characters += len(line.text) + 100  # for its other fields
        push(number)
    for _, number, _ in heads:  # read but not returned
        files[number].go_to(files[number].line_place)
    return lines, bool(heads)


def places_json(places: Places) -> str:
    return json.dumps(
        {
            key: [each.offset, each.is_skipping, "" if each.at == BEGINNING else written(each.at), each.mark]
            for key, each in places.items()
        }
    )


def places_of_json(text: str) -> dict[str, FilePlace]:
    """Raises ValueError if it is not from `places_json`."""
    try:
        members = json.loads(text)
        return {
            str(key): FilePlace(_offset(offset), bool(is_skipping), read_time(at) if at else BEGINNING, *map(int, mark))
            for key, (offset, is_skipping, at, *mark) in members.items()
        }
    except (TypeError, AttributeError, KeyError, OverflowError, RecursionError) as error:
        raise ValueError("the cursor is not from this agent") from error


def _offset(value: int) -> int:
    if 0 <= value < 2**63:  # as a file system has them
        return int(value)
    raise ValueError("the cursor is not from this agent")
