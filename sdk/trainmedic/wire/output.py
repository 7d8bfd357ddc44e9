"""Conversion of a reply's output to bounded JSON."""

from __future__ import annotations

import json
import math
from typing import Any, Mapping

LARGEST_REPLY = 64 * 1024  # bytes of a reply's JSON
_LARGEST_OUTPUT = LARGEST_REPLY - 1024
_DEEPEST = 8
_LONGEST_TEXT = 4096
_MOST_MEMBERS = 1000
_INT_BOUND = 10**300  # the first that `wire.reading` does not read


def plain(output: Mapping[str, Any]) -> dict[str, Any]:
    """Return plain JSON: any library's numbers as numbers, unknown types as text."""
    return {str(name)[:_LONGEST_TEXT]: _plain(value, 1) for name, value in list(output.items())[:_MOST_MEMBERS]}


def fitting(output: Mapping[str, Any]) -> Mapping[str, Any]:
    # A note replaces a too large output.
    size = len(json.dumps(output))
    return output if size <= _LARGEST_OUTPUT else too_large(size)


def too_large(size: int) -> Mapping[str, Any]:
    return {"reason": f"the output of {size} bytes is too large to be kept"}


def _plain(value: Any, depth: int) -> Any:
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, int):
        return int(value) if abs(value) < _INT_BOUND else "a whole number that is too long"
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else str(value)
    if isinstance(value, str):
        return str(value)[:_LONGEST_TEXT]
    if depth < _DEEPEST and isinstance(value, Mapping):
        return {str(name): _plain(member, depth + 1) for name, member in list(value.items())[:_MOST_MEMBERS]}
    if depth < _DEEPEST and isinstance(value, (list, tuple, set, frozenset)):
        return [_plain(member, depth + 1) for member in list(value)[:_MOST_MEMBERS]]
    item = getattr(value, "item", None)  # a tensor or array with one element
    if callable(item):
        try:
            return _plain(item(), _DEEPEST)
        except (TypeError, ValueError, RuntimeError):
            pass
    return str(value)[:_LONGEST_TEXT]
