"""Collection of an attempt's facts from streams in any order."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime, timedelta
from typing import Any

from msgspec.structs import replace

from trainmedic_logs.diagnosis import clock_guess, exits
from trainmedic_logs.diagnosis.collectives import CollectiveLines
from trainmedic_logs.diagnosis.exits import Exit
from trainmedic_logs.diagnosis.facts import Facts
from trainmedic_logs.diagnosis.own_times import OwnTimes
from trainmedic_logs.diagnosis.rank_seen import RankSeen
from trainmedic_logs.diagnosis.recovery_evidence import RecoveryEvidence
from trainmedic_logs.diagnosis.slow import RankStep
from trainmedic_logs.domain.finding import (
    LARGEST_NUMBER,
    RANK_LIMIT,
    CauseClass,
    Finding,
    Origin,
    Role,
    TimeSource,
)
from trainmedic_logs.domain.log_sources import KERNEL_SOURCES, TEXT_SOURCES
from trainmedic_logs.lines import raw_text
from trainmedic_logs.lines.assembly import LineAssembler
from trainmedic_logs.lines.blocks import TRACEBACK
from trainmedic_logs.lines.line import Line
from trainmedic_logs.lines.matcher import LineMatch
from trainmedic_logs.lines.progress import ProgressReader
from trainmedic_logs.lines.rule import RuleSet
from trainmedic_logs.lines.tracker import FindingTracker

# Rows of torchrun's failure table, and the exception below a traceback in it.
_TABLE_LINE = re.compile(r"\W*(?:\[\d+\]:\s*$|(?:time|host|rank|exitcode|error_file|traceback|msg)\s*:)")
_EXCEPTION_ROW = re.compile(
    r" {2,4}(?:\w{1,80}\.){0,8}[A-Z]\w{0,80}(?:Error|Exception|Exit|Interrupt|Failure|Timeout)(?::|$)"
)
# A cheap filter: every line that `exits.launcher_line` reads has one of these.
_EXIT_LINE = re.compile(
    r"exitcode:|exits with return code|srun: error:|exited on signal|CalledProcessError|exits successfully"
    r"|successfully finished|`Trainer\.fit` stopped|raining (?:is done|completed)|train metrics|done training"
    r"|Exit Code:|terminated with (?:(?:exit )?code|signal)|\"exitCode\"|(?:crashed|exited|exit|finished) with \w"
    r"|Exited (?:with|by) |Exit[_ ][Ss]tatus|\(exit code |Job failed: |\]Process completed|terminated by signal"
    r"|Main process exited|make(?:\[\d+\])?: \*|Successfully completed\."
)
_LINE_GAP = timedelta(microseconds=1)  # between lines without times, to keep their order
_MOST_EXITS = 100_000
# Until a finding, only one of 8 lines is examined for a step number, which is slow.
_STEP_SAMPLE = 8
# New findings between cleanups, and findings above which a cleanup keeps only the newest (half of this number).
_MOST_NEW, _MOST_FINDINGS = 2_000, 50_000
# Lines in the kernel's log that programs wrote, by name in syslog and journal formats, else by facility. OOM daemons
# count as the kernel.
_PROGRAM_LINE = re.compile(
    rb"(?:(?:<\d{1,3}>)?\d? ?(?:[A-Z][a-z]{2} [ \d]\d \d\d:\d\d:\d\d(?:\.\d+)?|\d{4}-\d\d-\d\dT[\d:.+Z-]{8,24}) "
    rb"[\w.-]{1,255} (?!kernel(?:\[\d+\])?[: ]|(?:earlyoom|systemd-oomd)\[\d+\]: )[A-Za-z_][\w./()@-]*(?:\[\d+\])?: "
    rb"|(?:user|mail|daemon|auth|syslog|local\d) {0,3}:[a-z]{3,6} {0,3}:"
    rb"|<(?:[89]|\d{2,3})>\[|(?:[89]|\d{2,4}),\d+,\d+,)"
)
_OTHER_RANK = re.compile(rb"\[rank(\d{1,5})\]:")
_MOST_TABLE_LINES, _LONGEST_TABLE_LINE = 50_000, 300
# Sources whose rules match a line, by the line's own source.
_SOURCES_OF = {
    **{source: (source, *(other for other in TEXT_SOURCES if other != source)) for source in TEXT_SOURCES},
    **{source: (source,) for source in KERNEL_SOURCES},
}


class Collector:
    def __init__(self, rule_set: RuleSet) -> None:
        """Raises ValueError or Malformed for an invalid rule."""
        self._tracker = FindingTracker(rule_set)
        self._findings: dict[str, Finding] = {}
        self._kept_at_cleanup = 0  # findings after the last cleanup
        self._exits: list[Exit] = []
        self._tables: dict[Origin, list[str]] = {}
        self._ranks: dict[int, RankSeen] = {}
        self._kernel_read: set[str] = set()
        self._last_step_at: datetime | None = None
        self._world_size: int | None = None
        self._first_at: datetime | None = None  # first job line with a time
        self._began_at: datetime | None = None
        self._streams_without_rank: set[str] = set()
        self._recovery = RecoveryEvidence()
        self._used_nccl = False
        self._own_times: dict[str, OwnTimes] = defaultdict(OwnTimes)
        self._collectives = CollectiveLines()
        self._progress: dict[tuple[str, int | None], ProgressReader] = defaultdict(ProgressReader)

    def read_stream(self, origin: Origin, raw: Iterable[bytes], written: datetime) -> None:
        """Read a file's lines. `written`: its modification time, for missing years and lines before the first time."""
        if origin.source == "kernel":
            self._kernel_read.add(origin.node)
        elif origin.rank is not None:
            self.note_rank(origin.rank, was_read=True)
        # A rank's file may also hold lines of other ranks, marked as such.
        assemblers = {origin.rank: LineAssembler(origin)}
        # `place`: byte offset. `follows_time`: a time was read in this line or before it.
        last, place, follows_time = written, 0, False
        for physical in raw:
            if origin.source == "kernel" and _PROGRAM_LINE.match(physical):
                place += len(physical) + 1
                continue
            # A line without a time gets that of the previous line.
            guessed = clock_guess.of_line(physical, written)
            follows_time = follows_time or guessed is not None
            last = guessed or last + _LINE_GAP
            rank = _marked_rank(physical) if origin.rank is not None else None
            rank = origin.rank if rank is None else rank
            if rank not in assemblers:
                assemblers[rank] = LineAssembler(replace(origin, rank=rank, local_rank=None))
            for part in (*raw_text.earlier_bars(physical), physical):
                for line in assemblers[rank].feed(part, last, place):
                    self._take(line, follows_time)
            place += len(physical) + 1  # with its line feed
        for line in (line for assembler in assemblers.values() for line in assembler.finish()):
            self._take(line, follows_time)
        for finding in [*self._tracker.tick(last), *self._tracker.changed()]:
            self._keep(finding)

    def add_line(self, line: Line) -> None:
        self._take(line, follows_time=True)

    def add_exit(self, ended: Exit) -> None:
        self._exits.append(ended)

    def note_rank(self, rank: int, **known: Any) -> None:
        """Set attributes of the rank's `RankSeen`."""
        seen = self._ranks.setdefault(rank, RankSeen())
        for name, value in known.items():
            setattr(seen, name, value)

    def note_world_size(self, size: int) -> None:
        self._world_size = max(size, self._world_size or 0)

    def facts(self, **more: Any) -> Facts:  # `more`: fields from other sources
        tables = [ended for origin, lines in self._tables.items() for ended in _exits_of_table(origin, lines)]
        return Facts(
            findings=sorted(self._findings.values(), key=lambda finding: finding.first_at),
            exits=self._ruled(_without_repeats(tables, self._exits)),
            ranks={rank: seen.facts() for rank, seen in sorted(self._ranks.items())},
            world_size=self._world_size,
            logs_without_rank=tuple(sorted(self._streams_without_rank)),
            kernel_read=frozenset(self._kernel_read),
            last_step_at=self._last_step_at,
            steps=self._steps(),
            throughput_drop=next((drop for own in self._own_times.values() if (drop := own.throughput_drop())), None),
            loss_rise=next((own.rise for own in self._own_times.values() if own.rise), None),
            began_at=self._began_at,
            outlived=frozenset(self._recovery.outlived),
            used_nccl=self._used_nccl,
            collectives=self._collectives,
            followed=dict(self._recovery.followed),
            excused=frozenset(self._recovery.excused),
            **more,
        )

    # Set the cause that an exact log rule gives for the words of an exit.
    def _ruled(self, ends: list[Exit]) -> list[Exit]:
        causes = {said: self._cause_by_rule(said) for said in {e.said for e in ends if e.said and e.signal is None}}
        return [replace(ended, ruled=causes.get(ended.said)) for ended in ends]

    def _cause_by_rule(self, said: str) -> CauseClass | None:
        line = Line(Origin("launcher"), datetime.min, said)
        for source in TEXT_SOURCES:
            match = self._tracker.matcher.match(line, source)
            if match.rule is not None and not match.rule.is_general:
                return match.cause if match.role is Role.ROOT else CauseClass.UNKNOWN
        return None

    def _steps(self) -> dict[int, RankStep]:
        """Return the ranks' own step parts, else those of the first log that has any, as rank 0."""
        by_rank = {rank: seen.rank_step() for rank, seen in sorted(self._ranks.items()) if seen.parts}
        own = [step for times in self._own_times.values() if (step := times.median_step()) is not None]
        return by_rank or dict(enumerate(own[:1]))

    def _take(self, line: Line, follows_time: bool) -> None:
        has_time = follows_time or line.time_source is TimeSource.LINE
        error = clock_guess.ERROR if has_time else clock_guess.UNKNOWN
        found = self._match(line)
        if line.origin.source not in KERNEL_SOURCES:
            step = self._step_of(line) if not found else None
            self._take_job_line(line, has_time, step)
            self._note_beginning(line, has_time, is_fault=bool(found))
            self._recovery.take_findings(line, found)
            if not found:
                self._recovery.take_plain_line(line, is_timed=has_time, is_step=step is not None)
        for finding in found:
            self._keep(finding, error)

    def _keep(self, finding: Finding, error: float = 0.0) -> None:
        before = self._findings.get(finding.id)
        known = before.clock_error if before else 0.0
        self._findings[finding.id] = replace(finding, clock_error=max(known, error, finding.clock_error))
        if len(self._findings) - self._kept_at_cleanup > _MOST_NEW:
            self._drop_old_findings()

    def _drop_old_findings(self) -> None:
        for each in self._recovery.pop_outlived():
            self._findings.pop(each, None)
        if len(self._findings) > _MOST_FINDINGS:
            newest = sorted(self._findings.values(), key=lambda finding: finding.last_at)[-_MOST_FINDINGS // 2 :]
            self._findings = {finding.id: finding for finding in newest}
        self._kept_at_cleanup = len(self._findings)

    def _match(self, line: Line) -> list[Finding]:
        # One file may mix training, launcher and Slurm lines. The first source with a match counts.
        sources = _SOURCES_OF.get(line.origin.source) or (line.origin.source, *TEXT_SOURCES)
        if self._tracker.matcher.is_quiet(line, sources):
            return []
        for source in sources:
            match = self._tracker.matcher.match(line, source)
            if match.rule is not None or match.ended:
                return self._tracker.take(self._as_source(line, source, match), match)
            if match.refused:  # a record that ends or restarts counts in a row
                if self._tracker.counts_rows:
                    self._tracker.take(self._as_source(line, source, match), match)
                break
        return []

    def _as_source(self, line: Line, source: str, match: LineMatch) -> Line:
        """Return the line as one of `source`, in a stream per rank, so that each gets its own finding."""
        origin, chapter = line.origin, self._recovery.chapter(line)
        is_shared = origin.rank is not None or chapter
        generation = f"rank {origin.rank} {chapter}" if is_shared else origin.generation
        return _in_own_stream(line._replace(origin=replace(origin, source=source, generation=generation)), match)

    def _note_beginning(self, line: Line, has_time: bool, is_fault: bool) -> None:
        if has_time and (self._first_at is None or line.at < self._first_at):
            self._first_at = line.at
            self._began_at = None if is_fault else line.at

    def _step_of(self, line: Line) -> int | None:
        has_form = line.record is None or line.has_words
        if not has_form or line.origin.source in KERNEL_SOURCES or "\n" in line.text:
            return None
        # While no finding waits for a step, a sample of lines suffices.
        if line.number % _STEP_SAMPLE and not self._recovery.is_waiting(line.origin.stream):
            return None
        return self._progress[line.origin.stream, line.origin.rank].step_of(line.text)

    def _take_job_line(self, line: Line, has_time: bool, learned_step: int | None) -> None:
        self._used_nccl = self._used_nccl or "NCCL" in line.text or "nccl" in line.text
        self._collectives.take(line.text, line.at if has_time else None)
        record = line.record or {}
        if record.get("event") == "step":
            self._own_times[line.origin.stream].step_record(record, line.text, has_words=line.has_words)
        rank = line.origin.rank if line.origin.rank is not None else _natural_number(record.get("rank"), RANK_LIMIT)
        seen = None
        if rank is None and line.origin.source != "launcher":
            self._streams_without_rank.add(line.origin.stream)
        elif rank is not None:
            seen = self._ranks.get(rank) or self._ranks.setdefault(rank, RankSeen())
            seen.note_line(line.at)
            seen.was_read = True
            seen.note_node(line.origin.node, record.get("node"))
        if record.get("event") == "end" and not record.get("reason"):  # without a reason, it completed
            self._exits.append(Exit("training", code=0, rank=rank, node=line.origin.node))
            self._recovery.take_completion(line.origin.stream, rank)
        step = _natural_number(record.get("step"), LARGEST_NUMBER)
        # A step in words counts only once its format has repeated.
        is_step_record = record.get("event") == "step" and step is not None and not line.has_words
        # Lines without a time have only their place, which `RecoveryEvidence` uses.
        if has_time and (is_step_record or learned_step is not None):
            self._last_step_at = max(line.at, self._last_step_at or line.at)
            step = learned_step if step is None else step
            if seen and step is not None:
                seen.note_step(step, line.at)
                seen.note_parts(record)
        if not record or line.has_words:
            for text in line.text.splitlines() if "\n" in line.text else (line.text,):
                self._take_launcher_text(text, line)

    def _take_launcher_text(self, text: str, line: Line) -> None:
        row = text[:_LONGEST_TABLE_LINE]
        rows = self._tables.get(line.origin, []) if self._tables else []
        is_of_table = _TABLE_LINE.match(row) or _is_table_heading(row) or _is_exception_row(row, rows)
        if is_of_table and len(rows) < _MOST_TABLE_LINES:
            rows.append(row)
            self._tables[line.origin] = rows
        if _EXIT_LINE.search(text) and len(self._exits) < _MOST_EXITS:
            ends = exits.launcher_line(text, line.origin.node)
            at = line.at if line.time_source is TimeSource.LINE else None
            self._exits += [_with_place(ended, line.origin, at) for ended in ends]
            # One process's end says nothing about the others.
            if any(ended.code == 0 and ended.rank is None and ended.pid is None for ended in ends):
                self._recovery.take_completion(line.origin.stream)


def _in_own_stream(line: Line, match: LineMatch) -> Line:
    """Give a kernel line a stream of its minute and process, for its own finding, unless the rule counts lines or has
    ends.
    """
    rule = match.rule
    if line.origin.source not in KERNEL_SOURCES or rule is None or rule.ends or rule.count or rule.lasting:
        return line
    generation = f"{line.origin.generation} {line.at:%Y%m%d%H%M} {match.fields.get('pid', '')}"
    return line._replace(origin=replace(line.origin, generation=generation))


def _is_table_heading(text: str) -> bool:
    return ("Root Cause" in text or "Failures" in text) and text.rstrip().endswith(":")


def _is_exception_row(row: str, rows: Sequence[str]) -> bool:
    return bool(rows) and bool(_EXCEPTION_ROW.match(row)) and rows[-1].rstrip().endswith(TRACEBACK)


def _marked_rank(physical: bytes) -> int | None:
    found = _OTHER_RANK.match(physical)
    return int(found[1]) if found else None


def _natural_number(value: Any, limit: int) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) and 0 <= value < limit else None


def _exits_of_table(origin: Origin, lines: list[str]) -> list[Exit]:
    return [_with_place(ended, origin, ended.at) for ended in exits.torchrun_table("\n".join(lines), origin.node)]


def _with_place(ended: Exit, origin: Origin, at: datetime | None) -> Exit:
    # A training can print any node's name.
    by_launcher = origin.source == "launcher" and origin.rank is None and ended.reporter == "torchrun"
    return replace(ended, at=at, is_node_sure=by_launcher or (bool(origin.node) and ended.node == origin.node))


def _without_repeats(tables: list[Exit], others: list[Exit]) -> list[Exit]:
    """Merge exits; prefer torchrun's tables, which state the rank."""
    in_tables: Mapping[tuple[str, int | None], Exit] = {(ended.node, ended.pid): ended for ended in tables}
    pids = {pid for _, pid in in_tables}
    kept = list(in_tables.values())
    has_ranks = any(ended.rank is not None for ended in kept)
    for ended in others:
        if ended.reporter == "torchrun" and ended.pid in pids:
            continue
        # With a launcher under srun, a task number is not a rank.
        kept.append(replace(ended, rank=None) if ended.reporter == "slurm" and has_ranks else ended)
    return list(dict.fromkeys(kept))
