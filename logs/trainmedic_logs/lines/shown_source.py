"""Program source and variables in a traceback, which rules ignore."""

from __future__ import annotations

import re

_CALL = re.compile(r'(?P<margin>[ |+]*)(?:> )?File ".{1,400}", line \d')
_ONE_LINE = re.compile(r"\s*│ (?:[ ❱]+\d+ │|[│╭╰])")


def without_source(text: str) -> str:
    """Replace the source lines that a traceback shows by blanks, to keep offsets."""
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
            margin = None  # next call, or the exception
        is_shown = (margin is not None and call is None) or line.lstrip().startswith("│")
        kept.append(" " * len(line) if is_shown else line)
    return "\n".join(kept)


def last_shown(text: str) -> str:
    """Return the source below the last call, or ""."""
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
