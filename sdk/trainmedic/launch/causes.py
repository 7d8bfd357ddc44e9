"""What an attempt of a job ended by, and whether another attempt is worth it. Pure functions."""

from __future__ import annotations

import re
import signal
from dataclasses import dataclass, field
from typing import Mapping, Sequence

SAME_CAUSE = 3
"""Attempts that end by the same cause without progress, after which there is none more."""

_PREFIX = re.compile(r"^(?:\[[^\]]{1,80}\]:? ?)+")
_ERROR = re.compile(r"^((?:[A-Za-z_]\w*\.)*[A-Z]\w*(?:Error|Exception|Interrupt|Exit|Iteration|Failed))(?::|\s*$)")
_WORDS = re.compile(r"^(Killed|Segmentation fault|Bus error|Aborted|Illegal instruction)\b")
_CHILD_FAILED = "ChildFailedError"
"""What torchrun ends by when a rank has failed: it says nothing of why."""
_RANK = re.compile(r"^\s*rank\s*: (\d+) \(local_rank: \d+\)")
_EXIT_CODE = re.compile(r"^\s*exitcode\s*: (-?\d+) \(pid: \d+\)")
_ROOT_CAUSE = "Root Cause"


@dataclass(frozen=True)
class RankEnd:
    """How a rank has ended."""

    rank: int
    status: int
    """Its exit code; less than 0 for a signal."""


@dataclass(frozen=True)
class Cause:
    """What an attempt has ended by. Two attempts with equal causes have failed alike."""

    status: int
    """The exit code of the rank that failed first, else of the launcher; less than 0 for a signal."""
    kind: str = ""
    """The kind of the last error that was printed, such as ``ValueError``; or ``hang``."""
    rank: int | None = None

    def __str__(self) -> str:
        who = "the job" if self.rank is None else f"rank {self.rank}"
        if self.kind == HANG:
            return f"{who} hung"
        how = f"was ended by {signal_name(-self.status)}" if self.status < 0 else f"ended with exit code {self.status}"
        return f"{who} {how}" + (f" ({self.kind})" if self.kind else "")


HANG = "hang"


@dataclass(frozen=True)
class Reached:
    """How far a job has come."""

    step: int = -1
    checkpoint: int = -1

    def further_of(self, other: Reached) -> Reached:
        return Reached(max(self.step, other.step), max(self.checkpoint, other.checkpoint))

    def is_beyond(self, other: Reached) -> bool:
        """Whether this is progress: a further checkpoint, or a further step."""
        return self.checkpoint > other.checkpoint or self.step > other.step


@dataclass(frozen=True)
class AttemptRecord:
    """An attempt that has failed."""

    number: int
    cause: Cause
    reached: Reached
    ranks: Sequence[RankEnd] = field(default=())


def signal_name(number: int) -> str:
    """Such as ``SIGKILL``."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def error_kind(text: str) -> str:
    """The kind of the last error in what a process has printed; empty where none is to be seen."""
    kind = ""
    for line in text.splitlines():
        bare = _PREFIX.sub("", line.rstrip())
        match = _ERROR.match(bare) or _WORDS.match(bare)
        if match is not None and not match[1].endswith(_CHILD_FAILED):
            kind = match[1]
    return kind


def rank_ends(text: str) -> list[RankEnd]:
    """The ranks that have failed by torchrun's own summary, the one that failed first at the beginning."""
    ends: list[RankEnd] = []
    first = 0
    rank: int | None = None
    for line in text.splitlines():
        bare = _PREFIX.sub("", line)
        if bare.startswith(_ROOT_CAUSE):
            first = len(ends)
        elif (match := _RANK.match(bare)) is not None:
            rank = int(match[1])
        elif (match := _EXIT_CODE.match(bare)) is not None and rank is not None:
            ends.append(RankEnd(rank, int(match[1])))
            rank = None
    return [*ends[first:], *ends[:first]]


def refusal(failed: Sequence[AttemptRecord], retries: int) -> str | None:
    """Why there is no further attempt after these, in a sentence; None where there is one.

    Progress, which is a further checkpoint or step than any attempt before has come to, begins the count anew.
    """
    if not failed:
        return None
    best = Reached()
    fruitless: list[AttemptRecord] = []
    for record in failed:
        if record.reached.is_beyond(best):
            fruitless = []
        fruitless.append(record)
        best = best.further_of(record.reached)
    last = failed[-1].cause
    alike = 0
    for record in reversed(fruitless):
        if record.cause != last:
            break
        alike += 1
    if alike >= SAME_CAUSE:
        return f"{last}: the same {alike} times in a row, without progress in between"
    if len(fruitless) > retries:
        times = "once" if len(fruitless) == 1 else f"{len(fruitless)} times"
        return f"{last}; it has failed {times} without progress, and --retries is {retries}"
    return None


def as_plain(record: AttemptRecord) -> Mapping[str, object]:
    """The record for ``attempts.jsonl``."""
    return {
        "attempt": record.number,
        "cause": str(record.cause),
        "status": record.cause.status,
        "error": record.cause.kind,
        "rank": record.cause.rank,
        "step": record.reached.step if record.reached.step >= 0 else None,
        "checkpoint": record.reached.checkpoint if record.reached.checkpoint >= 0 else None,
        "ranks": {str(end.rank): end.status for end in record.ranks},
    }
