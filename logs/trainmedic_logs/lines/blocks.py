"""Blocks of lines: tracebacks, torchrun's failure table, two-line OOM kills."""

from __future__ import annotations

import re
from enum import StrEnum

MOST_LINES = 200


class BlockKind(StrEnum):
    TRACEBACK = "traceback"
    TABLE = "table"
    OOM_PAIR = "oom-pair"
    """Two-line OOM kill of kernels before 5.0."""


class Continuation(StrEnum):
    MORE = "more"
    LAST = "last"
    """The line belongs to the block and ends it."""
    NO = "no"


TRACEBACK = "Traceback (most recent call last):"
HEADING = TRACEBACK.removesuffix(":")
"""Heading, also in Rich's frame."""
ORIGINAL = f"Original {TRACEBACK}"
"""PyTorch's line before a loader process's traceback."""
# Lines before tracebacks of destructors, threads, logging calls and atexit functions.
_ANNOUNCEMENTS = (
    "Exception ignored ",
    "Exception in thread ",
    "--- Logging error ---",
    "Error in atexit._run_exitfuncs:",
)
OF_RANK = re.compile(rf"({re.escape(TRACEBACK)}) \(RANK (\d{{1,6}})\)\s*$")
"""Heading of a traceback that torch's distributed checkpoints quote, with its rank in their group."""
_GROUP = "Exception Group Traceback (most recent call last):"
# Begins a block without heading: in cut or filtered logs, and on syntax errors.
_FRAME = re.compile(r' {1,4}File "[^"]{1,400}", line \d{1,8}(?:, in \S.*)?$')
# Lines with a leading blank outside tracebacks: Megatron-LM's steps, tqdm bars, loggers' timestamps.
_REPORT = re.compile(
    r"[ \t]{1,12}(?:(?i:train|eval|val)(?:ing|uation)?[ /].{0,60}[:=] ?\d|\[?\d{4}[-/]\d\d[-/]\d\d[ T_"
    r"]|\[?\d\d:\d\d:\d\d\b|\d{1,3}%\||.{0,80}\d%\||\|.{0,60}\||\[? ?(?:[A-Za-z]{1,20} )?"
    r"(?i:iteration|iter|step|epoch|batch|episode|round|samples?)\b[\s:=/#\[(]{0,4}\d|(?i:samples?/sec))"
)
# Beginnings of lines before the exception: blanks, Rich's frame, loguru's mark.
_INSIDE = (" ", "\t", "│", "╰", "|", "+", "> File ")
# Lower edge of Rich's frame, whose width limits the lines of the message below it.
_EDGE = "╰─"
_TABLE_RULE = re.compile(r"[=*-]{20,}\s*$")
_TABLE_BEGIN = re.compile(r"Root Cause(?: \(first|:\s*$)|[=*]{20,}\s*$|\s{0,4}rank *: \d{1,6} \(local_rank: ")
_TABLE_TITLE = re.compile(
    r"(?:Root Cause(?: \(first observed failure\))?:|\s*\S.{0,200} FAILED\s*$|(?:Other )?Failures:\s*$)"
)
_TABLE_ROW = re.compile(
    r"\s*(?:time|host|rank|exitcode|error_file|traceback|msg) *: |\[\d{1,6}\]:\s*$"
    r"|\s*<NO_OTHER_FAILURES>\s*$|\s*<N/A>\s*$"
)
_EXCEPTION = re.compile(
    r"(?!(?:DEBUG|INFO|WARNING|WARN)\b)[A-Za-z_][\w.]{0,200}(?::|$)|\S{0,80}(?:Error|Exception|Interrupt|Exit)\b"
)
_SURE_EXCEPTION = re.compile(
    r"(?:\w{1,80}\.){0,8}[A-Z]\w{0,80}(?:Error|Exception|Exit|Interrupt|Failure|Timeout)(?::|$)"
)
_RAY_TASK_ERROR = re.compile(r"(?:\w{1,40}\.){0,4}RayTaskError\(\w{1,80}\): ")
_MESSAGE_DETAIL = re.compile(r"(?:RequestId|Time|ErrorCode|Content):\S")
_CHAIN = (
    "During handling of the above exception, another exception occurred:",
    "The above exception was the direct cause of the following exception:",
    ORIGINAL,
)
BEGINNINGS = (
    rb"Traceback \(most recent call last\)",
    rb" File \".*\", line \d",
    *(announced.encode() for announced in _ANNOUNCEMENTS),
    rb"Root Cause",
    rb"[=*]{20}",
    rb" \(local_rank: ",
    rb"or sacrifice child",
    rb"RayTaskError\(",
)
"""Byte patterns, one in every line that begins a block."""
_KILL = re.compile(r"Kill process \d{1,10} \(.{0,64}\) score \d{1,10} or sacrifice child")


def kind_of(text: str) -> BlockKind | None:
    """Return the kind of block that a line begins or continues."""
    if text.startswith((TRACEBACK, "  + " + _GROUP, *_ANNOUNCEMENTS)) or (
        TRACEBACK in text and text.rstrip().endswith(TRACEBACK)
    ):
        return BlockKind.TRACEBACK
    if "RayTaskError(" in text and _RAY_TASK_ERROR.match(text):
        return BlockKind.TRACEBACK
    if text[:1] == " " and '", line ' in text and _FRAME.match(text):
        return BlockKind.TRACEBACK
    if text[:1] in "=*Rr " and _TABLE_BEGIN.match(text):
        return BlockKind.TABLE
    if "or sacrifice child" in text and _KILL.search(text):
        return BlockKind.OOM_PAIR
    return None


def continues(kind: BlockKind, lines: list[str], text: str) -> Continuation:
    match kind:
        case BlockKind.TRACEBACK:
            return _continues_traceback(lines, text)
        case BlockKind.TABLE:
            return _continues_table(lines, text)
        case BlockKind.OOM_PAIR:
            return Continuation.LAST if text.startswith("Killed process ") else Continuation.NO


def _continues_traceback(lines: list[str], text: str) -> Continuation:
    if _is_report(text) and (has_ended(lines) or _is_report(lines[-1])):
        return Continuation.NO
    if text.startswith(_INSIDE) or not text:
        return Continuation.MORE
    if text.startswith(_CHAIN):
        return Continuation.MORE
    if text.startswith(TRACEBACK):
        # After an exception, without a chaining line, it belongs to another process.
        return Continuation.NO if has_ended(lines) else Continuation.MORE
    if _continues_wrapped_message(lines, text):
        return Continuation.MORE
    if has_ended(lines) or lines[-1].startswith(_ANNOUNCEMENTS):
        return Continuation.MORE if _MESSAGE_DETAIL.match(text) else Continuation.NO
    # A line at the margin ends a traceback with its exception. Without a heading, it may just be the place of a
    # warning.
    exception = _SURE_EXCEPTION if lines[0].lstrip().startswith("File ") else _EXCEPTION
    return Continuation.MORE if exception.match(text) else Continuation.NO


def _is_report(text: str) -> bool:
    return text[:1] in (" ", "\t") and _REPORT.match(text) is not None


def has_ended(lines: list[str]) -> bool:
    """Return whether a traceback's lines contain its exception."""
    for line in reversed(lines):
        if line.startswith(_CHAIN) or line.startswith(TRACEBACK):
            return False
        if line.strip() and not line.startswith(_INSIDE):
            return len(lines) > 1 and line is not lines[0] and not _RAY_TASK_ERROR.match(line)
    return False


def _continues_wrapped_message(lines: list[str], text: str) -> bool:
    """Return whether Rich wrapped the message: its next word does not fit."""
    if not has_ended(lines):
        return False
    width = next((len(line.rstrip()) for line in reversed(lines) if line.startswith(_EDGE)), None)
    return width is not None and len(lines[-1].rstrip()) + 1 + len(text.partition(" ")[0]) > width


def unwrapped(lines: list[str]) -> list[str]:
    """Join messages that Rich wrapped."""
    joined: list[str] = []
    for line in lines:
        if joined and _is_at_margin(joined[-1]) and _is_at_margin(line):
            joined[-1] = f"{joined[-1].rstrip()} {line}"
        else:
            joined.append(line)
    return joined


def _is_at_margin(line: str) -> bool:
    return bool(line) and not line.startswith((*_INSIDE, *_CHAIN, TRACEBACK, *_ANNOUNCEMENTS))


def _continues_table(lines: list[str], text: str) -> Continuation:
    if _TABLE_ROW.match(text):
        return Continuation.MORE
    if _TABLE_RULE.match(text):
        is_end = text[0] in "=*" and len(lines) > 1 and any("rank" in line for line in lines)
        return Continuation.LAST if is_end else Continuation.MORE
    return Continuation.MORE if _TABLE_TITLE.match(text) else Continuation.NO
