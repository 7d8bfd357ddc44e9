"""Flight recorder dumps of this node's jobs, reported as one finding per attempt with a digest line per rank.

Jobs write these files, so they are opened like logs and parsed by a confined process. Different threads call
`take_scan` and `read`.
"""

from __future__ import annotations

import hashlib
import os
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from typing import Protocol

from trainmedic_agent.log_opening.node_files import LogRefused, NodeFiles
from trainmedic_agent.log_opening.own_files import OwnFiles
from trainmedic_agent.log_reading.budgets import BudgetOwner, FairTurns, HourlyBudget
from trainmedic_agent.log_reading.cut_record import CutRecord
from trainmedic_agent.log_reading.discovery import Scan
from trainmedic_agent.log_reading.scan_units import FoundFile
from trainmedic_core.target import Target, TargetKind
from trainmedic_logs.diagnosis.flight_recorder import digest
from trainmedic_logs.diagnosis.flight_recorder.dump import Dump
from trainmedic_logs.domain.finding import MOST_AROUND, CauseClass, Excerpt, Finding, Origin, Role
from trainmedic_logs.domain.finding_codec import RANK_LIMIT, write_ranks
from trainmedic_logs.domain.log_cuts import CutKind
from trainmedic_logs.errors import DumpError

MOST_RANKS = 2 * MOST_AROUND  # ranks per attempt and node
MOST_BYTES = 8 * 1024 * 1024  # 3,000 entries with call stacks
OLDEST = timedelta(hours=1)  # age up to which a dump is read
SECONDS_OF_JOB = 120.0  # per hour; 64 dumps of 5 MB take about 20 s
BYTES_OF_JOB = 1024**3  # bytes per hour
DUMPS_OF_JOB = 4 * MOST_RANKS  # dumps of a job's newest attempts
_NO_BUDGET = "the hourly budget for dumps of this job is used up"
_AT_ONCE = 4  # dumps per call of `read`
_LOOK_SECONDS = 1.0  # pause between calls of `read`

_Mark = tuple[int, int, int]  # inode, size and last write, which identify a file's content
# Parses dumps, given as rank and content. A str is the reason why one cannot be read.
ReadDumps = Callable[[Sequence[tuple[int, bytes]]], Sequence[Dump | str]]


class TakesFindings(Protocol):
    """See `RuleRunner`."""

    @property
    def can_take(self) -> bool: ...
    def report(self, finding: Finding, excerpt: Excerpt, owner: BudgetOwner) -> None: ...
    def store_due(self) -> None: ...


class DumpReading:
    def __init__(
        self,
        findings: TakesFindings,
        read: ReadDumps,
        now: Callable[[], datetime],
        cuts: CutRecord | None = None,
        monotonic: Callable[[], float] = time.monotonic,
        files: NodeFiles = OwnFiles(),
    ) -> None:
        self._files = files
        self._findings = findings
        self._read = read
        self._now = now
        self._cuts = cuts or CutRecord()
        self._monotonic = monotonic
        self._turns = FairTurns(monotonic)
        self._seconds = HourlyBudget(SECONDS_OF_JOB, monotonic)
        self._size = HourlyBudget(BYTES_OF_JOB, monotonic)
        self._found: tuple[FoundFile, ...] = ()
        self._first_seen: dict[str, tuple[_Mark, datetime]] = {}  # mark and time, by path
        self._last_marks: dict[str, _Mark] = {}  # at the last look, by path
        self._lines: dict[str, tuple[_Mark, str]] = {}  # mark when read, and digest line, by path

    def take_scan(self, scan: Scan) -> None:
        self._found = scan.dumps

    def read(self) -> float:
        """Report some new dumps; return the seconds until the next call."""
        if not self._findings.can_take:
            return _LOOK_SECONDS
        current = self._current()
        # A dump that changed since the last look is still being written.
        marks = {file.path: _mark(file) for files in current.values() for file in files}
        settled = {path for path, mark in marks.items() if self._last_marks.get(path) == mark}
        self._last_marks = marks
        self._lines = {path: line for path, line in self._lines.items() if path in marks}
        waiting: dict[BudgetOwner, list[tuple[str, FoundFile]]] = {}
        for directory, files in current.items():
            for file in files:
                if file.path in settled and not self._is_known(file):
                    waiting.setdefault(file.owner, []).append((directory, file))
        changed, has_more = self._read_in_turn(waiting)
        for directory in dict.fromkeys(changed):
            self._report(directory, [file for file in current[directory] if file.path in self._lines])
        if changed:
            self._findings.store_due()
        return 0.0 if has_more else _LOOK_SECONDS

    def _current(self) -> dict[str, list[FoundFile]]:
        """Return recent dumps of the newest attempts, by directory."""
        now = self._now()
        self._first_seen = {file.path: self._first_sight(file, now) for file in self._found}
        by_attempt: dict[str, list[FoundFile]] = {}
        for file in self._found:
            # Jobs can set modification times, so a future time counts from when it was first seen.
            if now - min(_written(file), self._first_seen[file.path][1]) <= OLDEST:
                by_attempt.setdefault(os.path.dirname(file.path), []).append(file)  # noqa: PTH120
        current: dict[str, list[FoundFile]] = {}
        counts, left_out = Counter[BudgetOwner](), Counter[BudgetOwner]()
        for directory, files in sorted(by_attempt.items(), key=lambda item: -(_attempt(item[1][0]) or 0)):
            owner, first = files[0].owner, sorted(files, key=_rank)[:MOST_RANKS]
            if counts[owner] + len(first) <= DUMPS_OF_JOB:
                current[directory] = first
            left_out[owner] += len(files) - len(current.get(directory, ()))
            counts[owner] += len(first)
        for owner, count in left_out.items():
            self._cuts.set_count(owner, CutKind.DUMPS, count)
        return current

    def _first_sight(self, file: FoundFile, now: datetime) -> tuple[_Mark, datetime]:
        seen = self._first_seen.get(file.path)
        return seen if seen is not None and seen[0][0] == file.inode else (_mark(file), now)

    def _read_in_turn(self, waiting: Mapping[BudgetOwner, Sequence[tuple[str, FoundFile]]]) -> tuple[list[str], bool]:
        """Read some dumps, and refuse those without budget; return the directories of both, and whether more wait.

        Refusals do not count towards `_AT_ONCE`: further calls for them would each write to the disk.
        """
        directories: list[str] = []
        count = 0
        for owner, (directory, file) in self._turns.turns(waiting):
            if count == _AT_ONCE:
                return directories, True
            began = self._monotonic()
            has_budget = self._seconds.has_left(owner) and self._size.has_left(owner)
            self._digest(file, None if has_budget else _NO_BUDGET)
            if has_budget:
                self._seconds.spend(owner, self._monotonic() - began)
                self._size.spend(owner, min(file.size, MOST_BYTES))
                count += 1
            else:
                self._cuts.add(owner, CutKind.DUMPS)
            directories.append(directory)
        return directories, False

    def _is_known(self, file: FoundFile) -> bool:
        return file.path in self._lines and self._lines[file.path][0] == _mark(file)

    def _digest(self, file: FoundFile, refusal: str | None) -> None:
        try:
            if refusal is not None:
                raise DumpError(refusal)
            (dump,) = self._read([(_rank(file), self._bytes(file))])
            if isinstance(dump, str):
                raise DumpError(dump)
            line = digest.write(dump, _attempt(file))
        except (OSError, LogRefused, DumpError) as error:
            line = digest.write_refused(_rank(file), _attempt(file), str(error))
        self._lines[file.path] = (_mark(file), line)

    def _bytes(self, found: FoundFile) -> bytes:
        """Raises OSError, LogRefused, DumpError."""
        with os.fdopen(self._files.open(found.path, found.named_by), "rb") as file:
            raw = file.read(MOST_BYTES + 1)
        if len(raw) > MOST_BYTES:
            raise DumpError(f"it has more than {MOST_BYTES:,} bytes, the agent's limit")
        return raw

    def _report(self, directory: str, files: Sequence[FoundFile]) -> None:
        origin = files[0].origin
        if origin is None or origin.job is None:
            return
        ranks = frozenset(_rank(file) for file in files)
        lines = tuple(self._lines[file.path][1] for file in files)
        attempt = f"{origin.node}\0{directory}"
        finding = Finding(
            id=hashlib.sha256(attempt.encode(errors="backslashreplace")).hexdigest()[:32],
            rule=digest.RULE,
            role=Role.CONFIRMATION,
            cause=CauseClass.HANG,
            target=Target(TargetKind.JOB, job=origin.job),
            origin=Origin(digest.SOURCE, origin.node, origin.job, origin.attempt, stream=directory),
            first_at=min(map(_written, files)),
            last_at=max(map(_written, files)),
            line=f"flight recorders have written what ranks {write_ranks(ranks)} were doing",
            ranks=ranks,
            count=len(files),
        )
        # Excerpts have at most `MOST_AROUND` lines on each side of a line, here one in the middle.
        self._findings.report(finding, Excerpt(lines, min(MOST_AROUND, len(lines) - 1)), files[0].owner)


def _rank(file: FoundFile) -> int:
    rank = file.origin.rank if file.origin is not None else None
    return min(rank or 0, RANK_LIMIT - 1)  # readers of findings refuse larger ones


def _attempt(file: FoundFile) -> int | None:
    return file.origin.attempt if file.origin is not None else None


def _written(file: FoundFile) -> datetime:
    return datetime(1970, 1, 1, tzinfo=UTC) + timedelta(microseconds=file.written_ns // 1000)


def _mark(file: FoundFile) -> _Mark:
    return file.inode, file.size, file.written_ns
