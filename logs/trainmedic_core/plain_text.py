"""Escaping of control, bidirectional and invisible characters for terminals and spreadsheets."""

from __future__ import annotations

import json
import re
import unicodedata
from typing import Any

# Cc and Cf: control and format characters. Zl and Zp: Unicode line ends. Cs: half surrogate pairs, which cannot be
# encoded.
_HIDDEN = frozenset({"Cc", "Cf", "Zl", "Zp", "Cs"})
_MAYBE_HIDDEN = re.compile(r"[^ -~]")
# Some spreadsheets accept full-width forms too.
_FORMULA = ("=", "+", "-", "@", "＝", "＋", "－", "＠")


def visible(text: str, keep: str = "") -> str:
    r"""Escape hidden characters, except `keep`, as ``\x1b`` or ``\u202e``."""
    return _MAYBE_HIDDEN.sub(lambda match: match[0] if match[0] in keep else _as_python(match[0]), text)


def csv_cell(value: Any) -> str:
    """Return a cell's text; an apostrophe stops spreadsheets from running it as a formula.

    None is empty; other values, except text, are JSON.
    """
    match value:
        case None:
            return ""
        case str():
            text = visible(value, keep="\n\t")
            return f"'{text}" if text.startswith(("\n", "\t")) or text.lstrip().startswith(_FORMULA) else text
        case _:
            return json_text(value, sort_keys=True)


def json_text(value: Any, **options: Any) -> str:
    written = json.dumps(value, ensure_ascii=False, **options)
    # JSON escapes line breaks within texts; the others separate members.
    return _MAYBE_HIDDEN.sub(lambda match: match[0] if match[0] == "\n" else _as_json(match[0]), written)


def json_bytes(value: Any) -> bytes:
    # DEL is the only ASCII control character that JSON does not escape.
    return json.dumps(value, allow_nan=False, separators=(",", ":")).replace("\x7f", "\\u007f").encode()


def _is_hidden(character: str) -> bool:
    return unicodedata.category(character) in _HIDDEN


def _as_python(character: str) -> str:
    return repr(character)[1:-1] if _is_hidden(character) else character


def _as_json(character: str) -> str:
    if not _is_hidden(character):
        return character
    return json.dumps(character)[1:-1].replace("\x7f", "\\u007f")
