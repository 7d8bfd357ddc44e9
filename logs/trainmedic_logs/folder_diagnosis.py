# Diagnosis of a folder of logs and dumps, for `trainmedic diagnose --dir`. Blocks, and needs no server.
from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import suppress
from datetime import datetime
from itertools import islice
from pathlib import Path
from typing import Any

from msgspec import Struct
from msgspec.structs import replace

from trainmedic.errors import ConfigurationError
from trainmedic_logs.diagnosis import clock_guess, exits, merged_attempts, reported_end, wording
from trainmedic_logs.diagnosis.collecting import Collector
from trainmedic_logs.diagnosis.exits import LAUNCHER, Exit
from trainmedic_logs.diagnosis.facts import Earlier
from trainmedic_logs.diagnosis.flight_recorder import missing_ranks
from trainmedic_logs.diagnosis.judge import diagnose
from trainmedic_logs.diagnosis.reported_end import ReportedEnd
from trainmedic_logs.diagnosis.verdict import Verdict
from trainmedic_logs.domain.log_sources import KERNEL_SOURCES
from trainmedic_logs.files import dump_reader, log_folder
from trainmedic_logs.files.log_folder import FolderFile, Kind
from trainmedic_logs.files.reading_limits import LimitKind, ReadingLimits
from trainmedic_logs.lines.rule import RuleSet

_LARGEST_DOCUMENT = 1024 * 1024  # bytes of an error, sources or exit status file, and of an attempt's record
_MOST_MERGED = 8  # attempts diagnosed if files hold several
_MOST_NAMED = 5  # unread files in an error
_DATED_LINES, _DATED_FILES = 200, 64  # searched for a year


class AttemptVerdict(Struct, frozen=True):
    job: str | None
    attempt: int | None
    """None if attempts cannot be distinguished."""
    verdict: Verdict


class FolderDiagnosis(Struct, frozen=True):
    attempts: tuple[AttemptVerdict, ...]
    """Newest last."""
    files_read: int
    left_out: dict[str, str]
    """Reasons by unread file."""
    read_in_part: dict[str, int]
    """Skipped leading bytes by file."""
    limit_reached: LimitKind | None = None


def diagnose_folder(
    directory: Path, rule_set: RuleSet, job: str | None = None, limits: ReadingLimits | None = None
) -> FolderDiagnosis:
    """Return verdicts, within `limits`. Raises ConfigurationError for nothing to read, or several jobs."""
    limits = limits or ReadingLimits()
    try:
        folder = log_folder.classify_files(directory, limits)
    except OSError as error:
        raise ConfigurationError(f"{error.filename or directory}: {error.strerror or error}") from error
    jobs = sorted({file.origin.job for file in folder.files if file.origin.job})
    if len(jobs) > 1 and job not in jobs:
        there = f"there are logs of {wording.shortened(jobs)}"
        asked = "pass the name of the job" if job is None else f"none of {job}"
        raise ConfigurationError(f"{directory}: {there}; {asked}")
    files = [file for file in folder.files if not job or file.origin.job in (job, None)]
    if not files and limits.reached is not None:
        raise ConfigurationError(f"{directory}: {limits.text_of(limits.reached)} before a file was read")
    if not files:
        unread = "".join(f"; not read: {name}: {why}" for name, why in islice(folder.left_out.items(), _MOST_NAMED))
        raise ConfigurationError(f"{directory}: no logs or dumps found{unread}")
    left_out = dict(folder.left_out)
    verdicts: list[AttemptVerdict] = []
    for number, parts in _divide_into_attempts(files, left_out, limits):
        earlier = [Earlier(each.attempt or 0, each.verdict.fingerprint) for each in verdicts]
        verdict = _diagnose_attempt(number, parts, rule_set, earlier, left_out, limits)
        verdicts.append(AttemptVerdict(job or (jobs[0] if jobs else None), number, verdict))
    read = [file for file in files if file.origin.stream not in left_out]
    in_part = _read_in_part(read, limits)
    return FolderDiagnosis(tuple(verdicts), len(read), left_out, in_part, limits.reached)


def _read_in_part(files: Sequence[FolderFile], limits: ReadingLimits) -> dict[str, int]:
    in_part: dict[str, int] = {}
    for file in files:
        with suppress(OSError):  # it may be deleted by now
            if file.kind is Kind.LINES and (unread := log_folder.unread_bytes(file, limits)):
                in_part[file.origin.stream] = unread
    return in_part


class _Part(Struct, frozen=True):
    """A file's lines of one attempt."""

    file: FolderFile
    limits: ReadingLimits
    first: int = 0  # number of its first line, from 0
    beyond: int | None = None  # number of the line after its last; None: up to the end of the file

    def lines(self) -> Iterator[bytes]:
        return islice(log_folder.lines_of(self.file, self.limits), self.first, self.beyond)

    def document(self) -> bytes:
        raw = bytearray()
        for line in log_folder.lines_of(self.file, self.limits):
            raw += line + b"\n"
            if len(raw) > _LARGEST_DOCUMENT:
                break
        return bytes(raw.removesuffix(b"\n")[:_LARGEST_DOCUMENT])


def _divide_into_attempts(
    files: Sequence[FolderFile], left_out: dict[str, str], limits: ReadingLimits
) -> list[tuple[int | None, list[_Part]]]:
    """Return attempts, the newest last. Adds unreadable files to `left_out`."""
    numbers = sorted({file.origin.attempt for file in files if file.origin.attempt is not None})
    if numbers:
        return [
            (number, [_Part(file, limits) for file in files if _belongs_to(file, number, numbers)])
            for number in numbers
        ]
    begins = {file.path: _beginnings(file, left_out, limits) for file in files if _may_hold_several_attempts(file)}
    count = 1 + max((len(each) for each in begins.values()), default=0)
    if count == 1:
        return [(None, [_Part(file, limits) for file in files])]
    # The newest attempt is the last one of each file.
    return [
        (
            count - back,
            [part for file in files if (part := _part_of_attempt(file, begins.get(file.path), back, limits))],
        )
        for back in reversed(range(min(count, _MOST_MERGED)))
    ]


def _may_hold_several_attempts(file: FolderFile) -> bool:
    return file.kind is Kind.LINES and file.origin.source not in KERNEL_SOURCES


def _beginnings(file: FolderFile, left_out: dict[str, str], limits: ReadingLimits) -> list[int]:
    try:
        return merged_attempts.beginnings(log_folder.lines_of(file, limits))
    except OSError as error:
        left_out[file.origin.stream] = error.strerror or str(error)
        return []


def _part_of_attempt(file: FolderFile, begins: Sequence[int] | None, back: int, limits: ReadingLimits) -> _Part | None:
    """Return the file's part in the attempt `back` before the newest."""
    # Undivided logs and sources count for each attempt; other files belong to the newest.
    if begins is None:
        return _Part(file, limits) if file.kind in (Kind.LINES, Kind.SOURCES) or not back else None
    edges = [0, *begins, None]
    place = len(begins) - back
    return _Part(file, limits, edges[place] or 0, edges[place + 1]) if place >= 0 else None


def _belongs_to(file: FolderFile, attempt: int | None, attempts: Sequence[int]) -> bool:
    # Kernel logs and the launcher's records count for all attempts, others of unknown attempts for the newest.
    if file.kind is Kind.ATTEMPTS:
        return True
    if file.origin.attempt is not None:
        return file.origin.attempt == attempt
    return file.origin.source in KERNEL_SOURCES or attempt == attempts[-1]


def _diagnose_attempt(
    attempt: int | None,
    parts: Sequence[_Part],
    rule_set: RuleSet,
    earlier: Sequence[Earlier],
    left_out: dict[str, str],
    limits: ReadingLimits,
) -> Verdict:
    collector, files = Collector(rule_set), [part.file for part in parts]
    reports: list[ReportedEnd] = []
    latest = _latest_year_stated(parts)
    # A rank's identity must be known before its lines.
    for part in sorted(parts, key=lambda part: part.file.kind is not Kind.SOURCES):
        try:
            if part.file.kind is Kind.ATTEMPTS:
                reports.extend(_reports_of(part, attempt))
            else:
                _take(part, collector, latest)
        except OSError as error:
            left_out[part.file.origin.stream] = error.strerror or str(error)
    dumps, refused = dump_reader.read_files([file.path for file in files if file.kind is Kind.DUMP], limits)
    names = {file.path: file.origin.stream for file in files}
    reading = missing_ranks.read_together(dumps) if dumps else None
    refused_dumps = {names[path]: reason for path, reason in refused.items()}
    for ended in filter(None, (report.exit for report in reports)):
        collector.add_exit(ended)
    more = reported_end.facts_of(reports[-1]) if reports else {}
    if reports:  # the file's time is that of the newest attempt, not of this one
        more["reported"] = replace(reports[-1].evidence, at=None)
    return diagnose(collector.facts(recorder=reading, refused_dumps=refused_dumps, earlier=earlier, **more))


def _latest_year_stated(parts: Sequence[_Part]) -> datetime | None:
    """Return the latest time with a year at the beginnings of logs, else kernel logs."""
    # If the files were copied later, it completes the years of lines without one (`clock_guess.copied`).
    logs = [part for part in parts if part.file.kind is Kind.LINES and part.file.path.suffix != ".gz"]
    ordered = sorted(logs, key=lambda part: part.file.origin.source in KERNEL_SOURCES)
    latest: datetime | None = None
    for part in ordered[:_DATED_FILES]:
        if latest and part.file.origin.source in KERNEL_SOURCES:
            break
        with suppress(OSError):  # reported where it is read
            for raw in islice(part.lines(), _DATED_LINES):
                if (at := clock_guess.with_year(raw)) and at <= part.file.written and (not latest or at > latest):
                    latest = at
    return latest


def _take(part: _Part, collector: Collector, latest: datetime | None) -> None:
    file = part.file
    match file.kind:
        case Kind.LINES:
            collector.read_stream(file.origin, part.lines(), clock_guess.copied(file.written, latest))
        case Kind.ERROR:
            _take_error(part, collector)
        case Kind.SOURCES:
            _take_sources(part, collector)
        case Kind.ENDED:
            code = _exit_code_of(part)
            if code == 0:
                collector.add_exit(Exit(LAUNCHER, code=0, node=file.origin.node, line="exit code 0"))
        case Kind.ATTEMPTS | Kind.DUMP:
            pass  # read by the caller


def _take_error(part: _Part, collector: Collector) -> None:
    raw, file = part.document(), part.file
    origin = file.origin
    ended = exits.error_file(raw, rank=origin.rank, local_rank=origin.local_rank, node=origin.node)
    if ended is None:
        return
    collector.add_exit(replace(ended, is_node_sure=bool(origin.node)))
    written: datetime = ended.at or file.written
    stack = exits.call_stack(raw)
    collector.read_stream(replace(origin, source="training"), stack.encode(errors="replace").split(b"\n"), written)


def _reports_of(part: _Part, attempt: int | None) -> Iterator[ReportedEnd]:
    file = part.file
    for raw in part.lines():
        with suppress(ValueError, KeyError, TypeError, AttributeError, RecursionError):
            row: Any = json.loads(raw[:_LARGEST_DOCUMENT])
            if row["attempt"] == attempt and isinstance(row["status"], int):
                members = {**row, "reason": row.get("cause")}
                yield reported_end.of_members(file.origin.job or "", file.written, members, is_failure=True)


def _exit_code_of(part: _Part) -> int | None:
    try:
        record: Any = json.loads(part.document())
        return record["status"] if isinstance(record["status"], int) else None
    except (ValueError, KeyError, TypeError, RecursionError):
        return None


def _take_sources(part: _Part, collector: Collector) -> None:
    try:
        said: Any = json.loads(part.document())
        rank = said["rank"]
    except (ValueError, KeyError, TypeError, RecursionError):
        return
    if not isinstance(rank, int) or not 0 <= rank < 10**6:
        return
    gpus, known = said.get("gpus"), {}
    if isinstance(said.get("node"), str):
        known["node"] = said["node"]
    if isinstance(said.get("pid"), int):
        known["pid"] = said["pid"]
    if isinstance(gpus, list) and len(gpus) == 1 and isinstance(gpus[0], str):
        known["gpu"] = gpus[0]
    collector.note_rank(rank, **known)
    if isinstance(said.get("world_size"), int) and 0 < said["world_size"] < 10**6:
        collector.note_world_size(said["world_size"])
