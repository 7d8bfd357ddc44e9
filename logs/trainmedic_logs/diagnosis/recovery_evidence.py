"""Evidence that the training continued: later steps, or minutes of ordinary lines."""

from __future__ import annotations

import re
from collections import Counter, defaultdict, deque
from collections.abc import Iterable, Set
from datetime import datetime, timedelta
from math import isfinite

from msgspec import Struct, field

from trainmedic_logs.domain.finding import CauseClass, Finding, Role
from trainmedic_logs.lines.blocks import HEADING
from trainmedic_logs.lines.line import Line
from trainmedic_logs.lines.progress import ProgressReader

_STEPS = 3
"""In a stream of several ranks, others complete at most their current step."""
_WHILE = timedelta(seconds=120)
"""An ending process prints for seconds."""
_ENDING = re.compile(
    r"(?i)^\s|^$|^\W+$|\.(?:cpp|cc|cu|hpp):\d+|^\W*frame #|traceback|exception|error|warn|nccl|site-packages|torch[./]"
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
"""Lines of an ending process."""

_WELL_AGAIN = 10
_EXCUSED = re.compile(
    r"(?i)\b(?:skip(?:s|ped|ping)?|ignor(?:es|ed|ing)|dropp(?:ed|ing))\b.{0,60}"
    r"\b(?:bad|broken|corrupt\w*|sample|batch|file|shard|record|row|item|example|image|video|entry|document|error|it)\b"
    r"|\b(?:sample|batch|file|shard|record|row|item|example|image|video|entry|document)\b.{0,60}\b(?:skipp|ignor|dropp)"
    r"|\b(?:skipping|ignoring(?: it)?|falling back)\W*$"
)
"""Words before a traceback that a program survives."""
_LEFT_OUT = re.compile(
    r"(?i)\b(?:overflow\w*|skip(?:s|ped|ping)?)\b.{0,80}\b(?:steps?|loss scale|scaler|updates?)\b"
    r"|\b(?:steps?|updates?)\b.{0,40}\bskipp"
)
"""Words of a loss scaler that skipped a step."""
_RAISED = re.compile(r"[\w.]{0,80}(?:Error|Exception): ")
_RECENT = 16
"""A block is recognised some lines after its start."""

_Voice = tuple[str, int | None]


class RecoveryEvidence(Struct):
    """Findings that the training survived. A voice is a stream and one of its ranks."""

    outlived: set[str] = field(default_factory=set)
    """As in `Facts`."""
    followed: Counter[str] = field(default_factory=Counter)
    _open: dict[_Voice, dict[str, datetime]] = field(default_factory=lambda: defaultdict(dict))
    _waits: dict[_Voice, set[str]] = field(default_factory=lambda: defaultdict(set))
    """Findings that only steps disprove: a timed-out rank may print ordinary lines."""
    _steps: dict[str, Counter[str]] = field(default_factory=lambda: defaultdict(Counter))
    _unwell: dict[str, dict[str, datetime]] = field(default_factory=dict)
    excused: set[str] = field(default_factory=set)
    _well: Counter[str] = field(default_factory=Counter)
    """Finite steps since a finding."""
    _loose: Counter[str] = field(default_factory=Counter)
    _chapters: Counter[_Voice] = field(default_factory=Counter)
    _recent: dict[str, deque[tuple[Line, bool, bool]]] = field(default_factory=dict)

    def chapter(self, line: Line) -> int:
        """Return the chapter of the line's rank.

        Proof of recovery begins a new one, in which equal lines are new findings.
        """
        return self._chapters[line.origin.stream, line.origin.rank]

    def is_waiting(self, stream: str) -> bool:
        return bool(self._steps.get(stream) or self._unwell.get(stream))

    def forgotten(self) -> set[str]:
        gone, self.outlived = self.outlived, set()
        for each in gone:
            self.followed.pop(each, None)
            self._loose.pop(each, None)
        return gone

    def found(self, line: Line, findings: list[Finding]) -> None:
        for finding in findings:
            if finding.role is Role.ROOT and finding.cause is CauseClass.NUMERICS:
                self._unwell.setdefault(line.origin.stream, {})[finding.id] = line.at
            elif finding.role is Role.CASCADE:
                self._waits[line.origin.stream, line.origin.rank].add(finding.id)
                self._steps[line.origin.stream][finding.id] = 0
            elif finding.role is Role.ROOT:
                self._open[line.origin.stream, line.origin.rank][finding.id] = line.at
                self._steps[line.origin.stream][finding.id] = 0
        if findings:
            announced = _announcement(line, self._recent.get(line.origin.stream, ()))
            self.excused.update(each.id for each in findings if _is_excused(each, announced))
        ids, reader = {finding.id for finding in findings}, ProgressReader()
        for later, is_timed, is_step in self._recent.get(line.origin.stream, ()) if findings else ():
            if later.place > line.place:
                has_grown = (later.record is None or later.has_words) and reader.step_of(later.text) is not None
                self._take(later, is_timed, is_step or has_grown, ids)

    def finished(self, stream: str) -> None:
        """Take a training's completion: earlier findings ended nothing."""
        self._went_on(stream, set(self._steps.get(stream, ())))

    def plain(self, line: Line, *, is_timed: bool, is_step: bool = False) -> None:
        """Take a line without a finding. `is_step`: it reports a step in the trainer's format."""
        self._recent.setdefault(line.origin.stream, deque(maxlen=_RECENT)).append((line, is_timed, is_step))
        if (unwell := self._unwell.get(line.origin.stream)) and _LEFT_OUT.search(line.text[:400]):
            self.excused.update(unwell)
        self._take(line, is_timed, is_step)

    def _take(self, line: Line, is_timed: bool, is_step: bool, only: Set[str] | None = None) -> None:
        stream = line.origin.stream
        # A step in words counts only once its format has repeated: error messages may contain one.
        if is_step or (line.record and not line.has_words and line.record.get("event") == "step"):
            if waiting := self._steps.get(stream):
                waiting.update(waiting.keys() if only is None else waiting.keys() & only)
                self._went_on(stream, {each for each, steps in waiting.items() if steps >= _STEPS})
            self._take_loss(line)
            return
        is_nobodys = line.origin.rank is None
        open_ = self._open.get((stream, line.origin.rank))
        # Fast path: mostly nothing is open.
        if not (open_ or (is_nobodys and self._steps.get(stream))) or _ENDING.search(line.text[:400]):
            return
        if is_nobodys:
            self._took_nobodys(stream)
        if not open_:
            return
        self.followed.update(open_.keys() if only is None else open_.keys() & only)
        if is_timed:
            self._went_on(stream, {each for each, at in open_.items() if line.at - at >= _WHILE})

    def _take_loss(self, line: Line) -> None:
        loss, norm = (line.record.get(name) if line.record else None for name in ("loss", "grad_norm"))
        if isinstance(norm, float) and not isfinite(norm):
            return
        unwell = self._unwell.get(line.origin.stream)
        if unwell and isinstance(loss, float) and isfinite(loss):
            self.followed.update(unwell.keys())  # a finite step shows that the training continued
            self._well.update(unwell.keys())
            over = {each for each, at in unwell.items() if line.at - at >= _WHILE or self._well[each] >= _WELL_AGAIN}
            self.outlived |= over
            self._chapters[line.origin.stream, line.origin.rank] += bool(over)
            for each in over:
                del unwell[each]

    def _took_nobodys(self, stream: str) -> None:
        for (name, rank), open_ in self._open.items():
            for each in open_ if name == stream and rank is not None else ():
                self._loose[each] += 1
                if self._loose[each] == _STEPS:
                    self.followed[each] += 1

    def _went_on(self, stream: str, ids: set[str]) -> None:
        if not ids:
            return
        self.outlived |= ids
        for each in ids:
            self._steps[stream].pop(each, None)
        for voice, open_ in self._open.items():
            if voice[0] == stream and ids & open_.keys():
                self._chapters[voice] += 1
                for each in ids & open_.keys():
                    del open_[each]
        for voice, waits in self._waits.items():
            if voice[0] == stream and ids & waits:
                self._chapters[voice] += 1
                waits -= ids


def _is_excused(finding: Finding, announced: str) -> bool:
    if finding.cause is CauseClass.NUMERICS:
        return not _RAISED.match(finding.line) and bool(_LEFT_OUT.search(announced))
    return bool(finding.fields.get("exception") and _EXCUSED.search(announced))


def _announcement(line: Line, recent: Iterable[tuple[Line, bool, bool]]) -> str:
    before = [each for each, _, _ in recent if each.place < line.place and each.origin.rank == line.origin.rank]
    last = before[-1].text[:400] if before and line.number - before[-1].number <= 1 else ""
    first = line.text[:400].splitlines()[0] if line.text else ""
    return f"{last}\n{first.partition(HEADING)[0]}"
