from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from trainmedic_core.plain_text import json_text, visible

# API names that are clearer in other words.
_WORDS = {
    "awaiting_approval": "asks",
    "not_started": "held back",
    "target_unknown": "no target",
    "target_ambiguous": "target unclear",
    "concurrency_limited": "too many at once",
    "rate_limited": "too many lately",
    "observe_only": "observes only",
}


def words(name: object) -> str:
    """Format an API name: ``target_busy`` as ``target busy``."""
    text = str(name)
    return _WORDS.get(text, text.replace("_", " "))


def plain(value: object) -> str:
    """Return a value on one line, control characters escaped."""
    if value is None:
        return "-"
    return visible(str(value).replace("\n", " ⏎ "))


def count(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"


def some(parts: Sequence[str], most: int, separator: str = "; ") -> str:
    """Join the first `most`, and count the others."""
    left = len(parts) - most
    more = f"{separator if separator == '; ' else ' '}and {left} more" if left > 0 else ""
    return separator.join(parts[:most]) + more


def how_often(number: int) -> str:
    return "once" if number == 1 else f"{number} times"


def few(names: Sequence[str], most: int = 8, noun: str = "") -> str:
    """Join the first names and the number of others: ``a, b and 3 more``."""
    left = len(names) - most
    more = f" and {count(left, f'more {noun}') if noun else f'{left} more'}" if left > 0 else ""
    return ", ".join(map(plain, names[:most])) + more


def cut(text: str, size: int) -> str:
    return text if len(text) <= size else f"{text[: size - 1]}…"


def data(values: Mapping[str, Any]) -> str:
    """Format as ``percent=80 reason="too hot"``, without empty values."""
    return _pairs({name: value for name, value in values.items() if value not in ("", {}, [])})


def call(action: object, params: Mapping[str, Any] | None, note: object = None) -> str:
    """Format an action: ``job.scale_lr factor=0.5 (only if …)``."""
    return f"{plain(action)} {_pairs(params or {})}".rstrip() + (f"  ({plain(note)})" if note else "")


def _pairs(values: Mapping[str, Any]) -> str:
    return " ".join(f"{plain(name)}={_value(value)}" for name, value in values.items() if value is not None)


def _value(value: Any) -> str:
    if isinstance(value, str):
        shown = plain(value)
        return json.dumps(shown, ensure_ascii=False) if " " in shown or not shown else shown
    return plain(json_text(value, default=str))
