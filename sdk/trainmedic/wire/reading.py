"""Parser for untrusted JSON.

Violations (depth, non-finite numbers, integers of over 300 digits, invalid Unicode) are replaced, because a refused
reply would lose a command's outcome.
"""

from __future__ import annotations

import json
import math
import re
from typing import Any, Callable

DEEPEST = 24  # nested levels; a note replaces deeper parts
_LONGEST_INT = 300  # digits, which fit floating point: a reader may convert them
_STRINGS_AND_BRACKETS = re.compile(r'"(?:[^"\\]|\\.)*"?|[\[\]{}]', re.DOTALL)
_LEFT_OUT = '"nested too deeply"'


def read_object(raw: bytes) -> dict[str, Any]:
    value = read_json(raw)
    if not isinstance(value, dict):
        raise ValueError("not a JSON object")
    return value


def read_json(raw: bytes) -> Any:
    """Raises ValueError unless it is JSON."""
    text = raw.decode("utf-8", "replace")
    try:
        value = _parse(text)
        is_plain = not _is_deep(value)
    except (ValueError, RecursionError):
        is_plain = False  # malformed, perhaps only in a part that is too deep, or very deep
    if not is_plain:
        value = _parse(_without_depths(text))
    # Only escapes can still contain lone surrogates, which databases reject. Python makes them of file names that are
    # not UTF-8 (PEP 383).
    return _each_text(value, _without_surrogates) if "\\u" in text else value


def _parse(text: str) -> Any:
    return json.loads(text, parse_int=_read_int, parse_float=_read_float, parse_constant=str)


def _is_deep(value: Any) -> bool:
    level = [value]
    for _ in range(DEEPEST + 1):
        level = [
            member
            for outer in level
            if isinstance(outer, (dict, list))
            for member in (outer.values() if isinstance(outer, dict) else outer)
            if isinstance(member, (dict, list))
        ]
        if not level:
            return False
    return True


def without_nul(value: Any) -> Any:
    """Replace NUL characters, which PostgreSQL rejects."""
    return _each_text(value, _with_nul_replaced)


def _without_depths(text: str) -> str:
    kept: list[str] = []
    depth = copied = 0
    for token in _STRINGS_AND_BRACKETS.finditer(text):
        if token[0] in "[{":
            depth += 1
            if depth == DEEPEST + 1:
                kept += [text[copied : token.start()], _LEFT_OUT]
                copied = len(text)  # unless the part ends and sets it
        elif token[0] in "]}":
            if depth == DEEPEST + 1:
                copied = token.end()
            depth -= 1
    return "".join([*kept, text[copied:]])


def _read_int(text: str) -> int | str:
    digits = len(text.lstrip("-"))
    return int(text) if digits <= _LONGEST_INT else f"a whole number of {digits} digits"


def _read_float(digits: str) -> float | str:
    number = float(digits)
    return number if math.isfinite(number) else digits[:_LONGEST_INT]


def _without_surrogates(text: str) -> str:
    return text.encode("utf-8", "replace").decode()


def _with_nul_replaced(text: str) -> str:
    return text.replace("\0", "\N{REPLACEMENT CHARACTER}")


def _each_text(value: Any, change: Callable[[str], str]) -> Any:
    if isinstance(value, str):
        return change(value)
    if isinstance(value, dict):
        return {change(name): _each_text(member, change) for name, member in value.items()}
    return [_each_text(member, change) for member in value] if isinstance(value, list) else value
