"""Text from outside, made harmless to whoever is shown it: a person at a terminal, or a spreadsheet.

Alerts, jobs and agents choose much of what is shown. Characters that steer a terminal (escape sequences, of which
U+009B begins one too), that reverse the direction of text or that cannot be seen are written by their number. Who calls
it: the command line in every format, and the server for CSV and JSON.
"""

from __future__ import annotations

import json
import re
import unicodedata
from typing import Any

# Cc and Cf: control characters, and those that have an effect and no form. Zl and Zp: Unicode's own line ends.
# Cs: halves of surrogate pairs, which cannot be written at all.
_HIDDEN = frozenset({"Cc", "Cf", "Zl", "Zp", "Cs"})
_MAYBE_HIDDEN = re.compile(r"[^ -~]")
# The full-width forms count as well in some spreadsheets.
_FORMULA = ("=", "+", "-", "@", "＝", "＋", "－", "＠")


def visible(text: str, keep: str = "") -> str:
    """`text` with hidden characters as ``\\\\x1b`` or ``\\\\u202e``, but for those in `keep`."""
    return _MAYBE_HIDDEN.sub(lambda match: match[0] if match[0] in keep else _as_python(match[0]), text)


def csv_cell(value: Any) -> str:
    """The text of a cell: an apostrophe keeps a spreadsheet from running it as a formula, and nothing in it is hidden.

    Lists and mappings are JSON, true and false are words, and None is nothing.
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
    """`value` as JSON that can be read: hidden characters are escaped, which changes nothing of the data.

    `options` are those of `json.dumps`.
    """
    written = json.dumps(value, ensure_ascii=False, **options)
    # A line break stands between members only; within a text JSON has escaped it.
    return _MAYBE_HIDDEN.sub(lambda match: match[0] if match[0] == "\n" else _as_json(match[0]), written)


def json_bytes(value: Any) -> bytes:
    """`value` as JSON in ASCII and in one line."""
    # DEL is a control character too, and the only one in ASCII that JSON does not escape.
    return json.dumps(value, allow_nan=False, separators=(",", ":")).replace("\x7f", "\\u007f").encode()


def _is_hidden(character: str) -> bool:
    return unicodedata.category(character) in _HIDDEN


def _as_python(character: str) -> str:
    return repr(character)[1:-1] if _is_hidden(character) else character


def _as_json(character: str) -> str:
    if not _is_hidden(character):
        return character
    return json.dumps(character)[1:-1].replace("\x7f", "\\u007f")
