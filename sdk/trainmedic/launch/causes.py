"""Cause of an attempt's end, and the decision on another. Pure."""

from __future__ import annotations

import re
import signal
from dataclasses import dataclass, field
from typing import Collection, Mapping, Sequence

from trainmedic.job.ending import is_lost_peer

SAME_CAUSE = 3  # attempts in a row without progress, after which no other follows

_PREFIX = re.compile(r"^(?:\[[^\]]{1,80}\]:? ?)+")
_ERROR = re.compile(r"^((?:[A-Za-z_]\w*\.)*[A-Z]\w*(?:Error|Exception|Interrupt|Exit|Iteration|Failed))(?::|\s*$)")
_SHELL_WORDS = re.compile(r"^(Killed|Segmentation fault|Bus error|Aborted|Illegal instruction)\b")
_CHILD_FAILED = "ChildFailedError"
# Bounded digits: jobs can print such lines themselves.
_RANK = re.compile(r"^\s*rank\s*: (\d{1,9}) \(local_rank: (\d{1,9})\)")
_EXIT_CODE = re.compile(r"^\s*exitcode\s*: (-?\d{1,9}) \(pid: (\d{1,9})\)")
_ROOT_CAUSE = "Root Cause"
_ENDED_BY_TORCHRUN = re.compile(r"Sending process (\d{1,9}) closing signal|Closing process (\d{1,9}) via signal")
# Prefix of a line: local rank by torchrun's ``--tee``, and rank by PyTorch.
_RANK_PREFIX = re.compile(r"^(?:\[(?!rank\d)[A-Za-z_-]{1,40}(\d{1,6})\]:)? ?(?:\[rank(\d{1,6})\]:)?")
_TRACEBACK = "Traceback (most recent call last)"
_CHAINED = ("The above exception was the direct cause", "During handling of the above exception")
_SIGNALS_OF_SHELL = range(128 + 1, 128 + 32)
_LINES_OF_ERROR = 3  # its first line and the next two, searched for a lost peer


@dataclass(frozen=True)
class RankEnd:
    rank: int
    status: int  # exit code; negative for a signal
    local_rank: int | None = None
    pid: int | None = None


@dataclass(frozen=True)
class Cause:
    """Equal causes are the same failure."""

    status: int
    """Exit code of the first failed rank, else of the command; negative for a signal."""
    kind: str = ""
    """Kind of the last error, such as ``ValueError``, or ``hang``."""
    rank: int | None = None
    pid: int | None = field(default=None, compare=False)
    lost_peer: bool = field(default=False, compare=False)  # all failed ranks here lost another one

    def __str__(self) -> str:
        who = "the job" if self.rank is None else f"rank {self.rank}"
        if self.kind == HANG:
            return f"{who} hung"
        kind = f" ({self.kind})" if self.kind else ""
        if self.lost_peer:
            return f"{who} lost another rank{kind}"
        how = f"was ended by {signal_name(-self.status)}" if self.status < 0 else f"ended with exit code {self.status}"
        return f"{who} {how}{kind}"


HANG = "hang"  # kind


@dataclass(frozen=True)
class Reached:
    """Last step and checkpoint, -1 for none."""

    step: int = -1
    checkpoint: int = -1

    def further_of(self, other: Reached) -> Reached:
        return Reached(max(self.step, other.step), max(self.checkpoint, other.checkpoint))

    def is_beyond(self, other: Reached) -> bool:
        return self.checkpoint > other.checkpoint or self.step > other.step


@dataclass(frozen=True)
class AttemptRecord:
    number: int
    cause: Cause
    reached: Reached
    ranks: Sequence[RankEnd] = field(default=())  # failed ones, by torchrun's table


def signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


@dataclass(frozen=True)
class PrintedError:
    kind: str = ""
    is_victims: bool = False  # its traceback states a lost rank


def last_error(text: str) -> PrintedError:
    """Return the last error in an output; kind "" without one."""
    lines = [_PREFIX.sub("", line.rstrip()) for line in text.splitlines()]
    last, continues_chain = PrintedError(), False
    for number, line in enumerate(lines):
        if line.startswith(_CHAINED):
            continues_chain = True
        elif line.startswith(_TRACEBACK) and not continues_chain:
            last = PrintedError(last.kind)
        match = _ERROR.match(line) or _SHELL_WORDS.match(line)
        if match is not None and not match[1].endswith(_CHILD_FAILED):
            is_lost = is_lost_peer("\n".join(lines[number : number + _LINES_OF_ERROR]))
            last, continues_chain = PrintedError(match[1], is_lost or last.is_victims), False
    return last


def error_kind(text: str) -> str:
    return last_error(text).kind


def rank_ends(text: str) -> list[RankEnd]:
    """Read torchrun's failure table, the root cause first."""
    ends: list[RankEnd] = []
    first = 0
    rank: tuple[int, int] | None = None
    for line in text.splitlines():
        bare = _PREFIX.sub("", line)
        if bare.startswith(_ROOT_CAUSE):
            first = len(ends)
        elif (match := _RANK.match(bare)) is not None:
            rank = int(match[1]), int(match[2])
        elif (match := _EXIT_CODE.match(bare)) is not None and rank is not None:
            ends.append(RankEnd(rank[0], int(match[1]), rank[1], int(match[2])))
            rank = None
    return [*ends[first:], *ends[:first]]


def lines_of(end: RankEnd, text: str) -> str | None:
    """Return the rank's lines; None if no line states a rank."""
    own: list[str] = []
    has_prefixes = False
    for line in text.splitlines():
        match = _RANK_PREFIX.match(line)
        local_rank, rank = (match[1], match[2]) if match is not None else (None, None)
        if local_rank is None and rank is None:
            continue
        has_prefixes = True
        is_own = rank == str(end.rank) if rank is not None else local_rank == str(end.local_rank)
        if is_own:
            own.append(line)
    return "\n".join(own) if has_prefixes else None


def cause_of(status: int, ends: Sequence[RankEnd], own: Mapping[int, str], printed: str, pid: int | None) -> Cause:
    """Return the cause of an attempt's end: torchrun's first rank that is no victim.

    `ends` are in torchrun's order, `own` is each rank's known output, `printed` the command's stderr. A rank that lost
    its peer may have the earliest error file.
    """
    if not ends:
        kind = "" if status < 0 or status in _SIGNALS_OF_SHELL else error_kind(printed)
        return Cause(status, kind or _shell_word(printed), pid=pid)
    stopped = {int(match[1] or match[2]) for match in _ENDED_BY_TORCHRUN.finditer(printed)}
    first, lost_peer = next((end for end in ends if not _is_victim(end, own, stopped)), ends[0]), False
    losers = [end for end in ends if last_error(own.get(end.rank, "")).is_victims]
    if losers and ((first in losers and _is_victim(first, own, stopped)) or first.pid in stopped):
        # Prefer a rank that ended by its error to one that torchrun ended.
        first, lost_peer = min(losers, key=lambda end: end.status < 0), True
    if first.status < 0 and not lost_peer:
        return Cause(first.status, rank=first.rank, pid=first.pid)
    return Cause(first.status, error_kind(own.get(first.rank, "")), first.rank, first.pid, lost_peer)


def _is_victim(end: RankEnd, own: Mapping[int, str], stopped: Collection[int]) -> bool:
    if end.pid in stopped:
        return True
    if end.status < 0:
        # A torchrun that does not list the processes it ends uses SIGTERM.
        return not stopped and -end.status == signal.SIGTERM
    return last_error(own.get(end.rank, "")).is_victims


def _shell_word(printed: str) -> str:
    last = printed.rstrip().rpartition("\n")[2]
    match = _SHELL_WORDS.match(_PREFIX.sub("", last))
    return match[1] if match is not None else ""


def has_progress(failed: Sequence[AttemptRecord]) -> bool:  # of the last attempt, beyond all before
    best = Reached()
    for record in failed[:-1]:
        best = best.further_of(record.reached)
    return bool(failed) and failed[-1].reached.is_beyond(best)


def refusal(failed: Sequence[AttemptRecord], retries: int) -> str | None:
    """Return why there is no further attempt, or None.

    Progress beyond all earlier attempts restarts the count.
    """
    if not failed:
        return None
    best = Reached()
    fruitless: list[AttemptRecord] = []  # from the last attempt with progress on
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
        times = "once" if len(fruitless) == 1 else f"{len(fruitless)} times without progress in between"
        return f"{last}; it has failed {times}, and --retries is {retries}"
    return None


def as_plain(record: AttemptRecord, node: str) -> Mapping[str, object]:
    return {
        "attempt": record.number,
        "cause": str(record.cause),
        "status": record.cause.status,
        "error": record.cause.kind,
        "rank": record.cause.rank,
        "node": node,
        "pid": record.cause.pid,
        "step": record.reached.step if record.reached.step >= 0 else None,
        "checkpoint": record.reached.checkpoint if record.reached.checkpoint >= 0 else None,
        "ranks": {str(end.rank): end.status for end in record.ranks},
    }
