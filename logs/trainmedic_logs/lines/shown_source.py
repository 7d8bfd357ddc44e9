"""What a traceback shows of the program: its source, and what its names stood for. There may stand any words, such as
those of another error that the program knows, and they say nothing of what has happened.

Who calls it: ``matcher``, so that rules look past it. Who is shown the lines of a finding is shown them all.
"""

from __future__ import annotations

import re

_CALL = re.compile(r'(?P<margin>[ |+]*)(?:> )?File ".{1,400}", line \d')
_ONE_LINE = re.compile(r"\s*│ (?:[ ❱]+\d+ │|[│╭╰])")
"""Of a frame that Rich drew, whose beginning is not known: a line of the source, with its number, or of variables."""


def without_source(text: str) -> str:
    """Return a line, or the lines of a traceback, with blanks for each character that is shown of the program."""
    if "\n" not in text:
        return " " * len(text) if "│" in text[:200] and _ONE_LINE.match(text) else text
    if "│" not in text and '", line ' not in text:
        return text
    kept: list[str] = []
    margin: int | None = None
    for line in text.split("\n"):
        call, begins_at = _CALL.match(line), len(line) - len(line.lstrip(" |"))
        if call is not None:
            margin = len(call["margin"])
        elif margin is not None and begins_at <= margin:
            margin = None  # the next call, or the exception
        is_shown = (margin is not None and call is None) or line.lstrip().startswith("│")
        kept.append(" " * len(line) if is_shown else line)
    return "\n".join(kept)


def last_shown(text: str) -> str:
    """Return the source that a traceback shows below its last call. Empty if it shows none."""
    shown: list[str] = []
    margin: int | None = None
    for line in text.split("\n"):
        call, begins_at = _CALL.match(line), len(line) - len(line.lstrip(" |"))
        if call is not None:
            shown, margin = [], len(call["margin"])
        elif margin is not None and begins_at > margin:
            shown.append(line.strip())
        else:
            margin = None
    return "\n".join(line for line in shown if line.strip("~^ "))
