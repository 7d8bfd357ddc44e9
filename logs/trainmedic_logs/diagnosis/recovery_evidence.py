"""Evidence that a training continued: later steps, or minutes of ordinary lines."""

from __future__ import annotations

import re
from collections import Counter, defaultdict, deque
from collections.abc import Iterable, Set
from datetime import datetime, timedelta
from math import isfinite
from typing import NamedTuple

from msgspec import Struct, field

from trainmedic_logs.domain.finding import CauseClass, Finding, Role
from trainmedic_logs.lines.blocks import HEADING
from trainmedic_logs.lines.line import Line
from trainmedic_logs.lines.progress import ProgressReader

# Steps after a finding that prove survival. After a rank's failure, others complete at most their current step.
_SURVIVED_STEPS = 3
# Ordinary lines without a rank that count as one of the rank with the finding.
_UNRANKED_LINES = 3
# Ordinary lines over so long a time prove survival: an ending process prints for seconds.
_SURVIVAL_TIME = timedelta(seconds=120)
# Lines of an ending process.
_ENDING = re.compile(
    r"(?i)^\s|^$|^\W+$|\.(?:cpp|cc|cu|hpp):\d+|\bframe #\d|traceback|exception|error|warn|nccl|site-packages|torch[./]"
    r"|^\W*\[\d+\]:|exitcode|failed|failures|root cause|^wandb:|srun:|slurm|terminat|abort|kill|signal"
    r"|\[0x[0-9a-f]{4,16}\]\s*$|^(?:current )?thread 0x"
    # Continuation lines of PyTorch's messages.
    r"|^cuda kernel errors might|^for debugging consider|^compile with .torch_use_cuda|^search for .cuda"
    r"|^of the allocated memory|^including non-pytorch|^if reserved|^see documentation|^process \d+ has"
    # Continuation lines of Ray's memory messages.
    r"|^consider provisioning|^refer to the documentation|^to (?:adjust|disable|see) |^top \d+ memory|^pid\s+mem\b"
    r"|^\d+\s+[\d.]+ ?gb\s"
    r"|^making sure all .forward|^if you already have done|^parameter indices which|^in addition, you can set"
)

# Steps after which numbers count as recovered.
_FINITE_STEPS = 10
# Words before a traceback of a program that skips what failed.
_ANNOUNCED_SKIP = re.compile(
    r"(?i)\b(?:skip(?:s|ped|ping)?|ignor(?:es|ed|ing)|dropp(?:ed|ing))\b.{0,60}"
    r"\b(?:bad|broken|corrupt\w*|sample|batch|file|shard|record|row|item|example|image|video|entry|document|error|it)\b"
    r"|\b(?:sample|batch|file|shard|record|row|item|example|image|video|entry|document)\b.{0,60}\b(?:skipp|ignor|dropp)"
    r"|\b(?:skipping|ignoring(?: it)?|falling back)\W*$"
)
# Words of a loss scaler that skipped a step.
_SKIPPED_STEP = re.compile(
    r"(?i)\b(?:overflow\w*|skip(?:s|ped|ping)?)\b.{0,80}\b(?:steps?|loss scale|scaler|updates?)\b"
    r"|\b(?:steps?|updates?)\b.{0,40}\bskipp"
)
# Words of a program that handled a full GPU by a smaller batch.
_SMALLER_BATCH = re.compile(
    r"(?i)\bbatch[ _]?size \d+ failed, trying|\bdecreasing batch[ _]?size to\b"
    r"|\b(?:micro)?batch[ _]?size (?:will be |was |is )?(?:decreased|reduced|lowered|halved)\b"
    r"|\b(?:retrying|trying|continuing) (?:again )?with (?:a |the )?(?:smaller |lower |reduced )?(?:micro)?[ _-]?batch"
    r"|\battempting to recover from OOM\b|\bran out of memory, (?:retrying|skipping) batch\b"
)
_SUGGESTS = re.compile(r"(?i)\b(?:consider|please|should|can|could|may|might|need|if|try(?! again)|automatically)\b")
_RAISED = re.compile(r"[\w.]{0,80}(?:Error|Exception): ")
# Lines kept, because a block is recognised only some lines after its start.
_RECENT = 16

# A stream and one of its ranks.
_RankStream = tuple[str, int | None]


class _PlainLine(NamedTuple):
    line: Line
    is_timed: bool
    is_step: bool  # it reports a step in the trainer's format


class RecoveryEvidence(Struct):
    """Collector of `Facts.outlived`, `followed` and `excused`."""

    outlived: set[str] = field(default_factory=set)
    followed: Counter[str] = field(default_factory=Counter)
    # Times of roots that the rank may survive.
    _unconfirmed: dict[_RankStream, dict[str, datetime]] = field(default_factory=lambda: defaultdict(dict))
    # Cascades, which only steps disprove: a timed-out rank may print ordinary lines.
    _timeouts: dict[_RankStream, set[str]] = field(default_factory=lambda: defaultdict(set))
    # Steps of the stream since a finding.
    _steps_since: dict[str, Counter[str]] = field(default_factory=lambda: defaultdict(Counter))
    # Times of findings of wrong numbers, by stream.
    _bad_numbers: dict[str, dict[str, datetime]] = field(default_factory=dict)
    excused: set[str] = field(default_factory=set)
    _full_gpus: dict[_RankStream, set[str]] = field(default_factory=dict)  # findings
    _finite_steps: Counter[str] = field(default_factory=Counter)  # since a finding of wrong numbers
    _unranked_lines: Counter[str] = field(default_factory=Counter)
    _chapters: Counter[_RankStream] = field(default_factory=Counter)
    _recent: dict[str, deque[_PlainLine]] = field(default_factory=dict)  # last lines of each stream

    def chapter(self, line: Line) -> int:
        """Return a number that grows when the line's rank recovers. Equal lines are then new findings."""
        return self._chapters[line.origin.stream, line.origin.rank]

    def is_waiting(self, stream: str) -> bool:
        """Return whether steps may disprove a finding."""
        return bool(self._steps_since.get(stream) or self._bad_numbers.get(stream))

    def pop_outlived(self) -> set[str]:
        """Return and forget the outlived findings."""
        outlived, self.outlived = self.outlived, set()
        for each in outlived:
            self.followed.pop(each, None)
            self._unranked_lines.pop(each, None)
        return outlived

    def take_findings(self, line: Line, findings: list[Finding]) -> None:
        if not findings:
            return
        recent = self._recent.get(line.origin.stream, ())
        for finding in findings:
            if finding.role is Role.ROOT and finding.cause is CauseClass.NUMERICS:
                self._bad_numbers.setdefault(line.origin.stream, {})[finding.id] = line.at
            elif finding.role is Role.CASCADE:
                self._timeouts[line.origin.stream, line.origin.rank].add(finding.id)
                self._steps_since[line.origin.stream][finding.id] = 0
            elif finding.role is Role.ROOT:
                if finding.cause is CauseClass.GPU_MEMORY:
                    self._full_gpus.setdefault((line.origin.stream, line.origin.rank), set()).add(finding.id)
                self._unconfirmed[line.origin.stream, line.origin.rank][finding.id] = line.at
                self._steps_since[line.origin.stream][finding.id] = 0
        announced = _announcement(line, recent)
        self.excused.update(each.id for each in findings if _is_excused(each, announced))
        # Later lines may have been read before the block was recognised.
        ids, reader = {finding.id for finding in findings}, ProgressReader()
        for later, is_timed, is_step in recent:
            if later.place > line.place:
                is_in_words = later.record is None or later.has_words
                counts_steps = is_in_words and reader.step_of(later.text) is not None
                self._take(later, is_timed, is_step or counts_steps, ids)

    def take_completion(self, stream: str, rank: int | None = None) -> None:
        """Take the completion of a training, or of one rank: its earlier findings ended nothing."""
        ids = set(self._steps_since.get(stream, ()))
        if rank is not None:
            ids &= {*self._unconfirmed.get((stream, rank), ()), *self._timeouts.get((stream, rank), ())}
        self._mark_outlived(stream, ids)

    def take_plain_line(self, line: Line, *, is_timed: bool, is_step: bool = False) -> None:
        recent = self._recent.setdefault(line.origin.stream, deque(maxlen=_RECENT))
        recent.append(_PlainLine(line, is_timed, is_step))
        if (bad_numbers := self._bad_numbers.get(line.origin.stream)) and _SKIPPED_STEP.search(line.text[:400]):
            self.excused.update(bad_numbers)
        self._take(line, is_timed, is_step)

    def _take(self, line: Line, is_timed: bool, is_step: bool, only: Set[str] | None = None) -> None:
        """Count the line for earlier findings, or those in `only`."""
        stream = line.origin.stream
        owner = (stream, line.origin.rank)
        if (full := self._full_gpus.get(owner)) and _is_smaller_batch(line.text[:400]):
            handled = full if only is None else full & only
            self._full_gpus[owner] = full - handled
            self._mark_outlived(stream, handled)
        # A step in words counts only once its format has repeated: error messages may contain one.
        if is_step or (line.record and not line.has_words and line.record.get("event") == "step"):
            if waiting := self._steps_since.get(stream):
                waiting.update(waiting.keys() if only is None else waiting.keys() & only)
                self._mark_outlived(stream, {each for each, steps in waiting.items() if steps >= _SURVIVED_STEPS})
            self._take_loss(line, only)
            return
        has_no_rank = line.origin.rank is None
        unconfirmed = self._unconfirmed.get((stream, line.origin.rank))
        # Fast path: mostly nothing is open.
        if not (unconfirmed or (has_no_rank and self._steps_since.get(stream))) or _ENDING.search(line.text[:400]):
            return
        if has_no_rank:
            self._count_unranked_line(stream, only)
        if not unconfirmed:
            return
        self.followed.update(unconfirmed.keys() if only is None else unconfirmed.keys() & only)
        if is_timed:
            self._mark_outlived(stream, {each for each, at in unconfirmed.items() if line.at - at >= _SURVIVAL_TIME})

    def _take_loss(self, line: Line, only: Set[str] | None) -> None:
        record = line.record or {}
        loss, norm = record.get("loss"), record.get("grad_norm")
        if isinstance(norm, float) and not isfinite(norm):
            return
        bad_numbers = self._bad_numbers.get(line.origin.stream)
        if bad_numbers and isinstance(loss, float) and isfinite(loss):
            counted = bad_numbers.keys() if only is None else bad_numbers.keys() & only
            self.followed.update(counted)  # a finite step shows that the training continued
            self._finite_steps.update(counted)
            over = {
                each
                for each, at in bad_numbers.items()
                if line.at - at >= _SURVIVAL_TIME or self._finite_steps[each] >= _FINITE_STEPS
            }
            self.outlived |= over
            if over:
                self._chapters[line.origin.stream, line.origin.rank] += 1
            for each in over:
                del bad_numbers[each]

    def _count_unranked_line(self, stream: str, only: Set[str] | None) -> None:
        """Count several lines that state no rank as one of the failed rank."""
        for (name, rank), unconfirmed in self._unconfirmed.items():
            if name != stream or rank is None:
                continue
            for each in unconfirmed.keys() if only is None else unconfirmed.keys() & only:
                self._unranked_lines[each] += 1
                if self._unranked_lines[each] == _UNRANKED_LINES:
                    self.followed[each] += 1

    def _mark_outlived(self, stream: str, ids: set[str]) -> None:
        if not ids:
            return
        self.outlived |= ids
        for each in ids:
            self._steps_since[stream].pop(each, None)
        for key, unconfirmed in self._unconfirmed.items():
            if key[0] == stream and ids & unconfirmed.keys():
                self._chapters[key] += 1  # equal lines are new findings from now on
                for each in ids & unconfirmed.keys():
                    del unconfirmed[each]
        for key, waits in self._timeouts.items():
            if key[0] == stream and ids & waits:
                self._chapters[key] += 1
                waits -= ids


def _is_smaller_batch(text: str) -> bool:
    return bool(_SMALLER_BATCH.search(text)) and not _SUGGESTS.search(text)


def _is_excused(finding: Finding, announced: str) -> bool:
    if finding.cause is CauseClass.NUMERICS:
        return not _RAISED.match(finding.line) and bool(_SKIPPED_STEP.search(announced))
    return bool(finding.fields.get("exception") and _ANNOUNCED_SKIP.search(announced))


def _announcement(line: Line, recent: Iterable[_PlainLine]) -> str:
    """Return the rank's line before, and the words before a traceback."""
    plain = [each.line for each in recent]
    before = [each for each in plain if each.place < line.place and each.origin.rank == line.origin.rank]
    last = before[-1].text[:400] if before and line.number - before[-1].number <= 1 else ""
    first = line.text[:400].splitlines()[0] if line.text else ""
    return f"{last}\n{first.partition(HEADING)[0]}"
