"""The shape of a line: what stays the same when another rank, at another time, prints it again.

Two attempts of one job print lines of one shape for one reason. Numbers, addresses, paths and what is quoted are left
out; words stay.
"""

from __future__ import annotations

import hashlib
import re

_PARTS = (
    (re.compile(r"\b[0-9a-fA-F]{8}(?:-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}\b"), "<id>"),
    (re.compile(r"0x[0-9a-fA-F]+"), "<n>"),
    (re.compile(r"(?:/[\w.@%+=:-]+){2,}/?"), "<path>"),
    (re.compile(r"\b[0-9a-fA-F]{12,64}\b"), "<id>"),
    (re.compile(r"[-+]?\d[\d.,:eE+-]*"), "<n>"),
    (re.compile(r"\s+"), " "),
)
_LONGEST = 1024


def shape_of(text: str) -> str:
    """Return the line without what differs from one printing to the next."""
    text = text[:_LONGEST]
    for pattern, instead in _PARTS:
        text = pattern.sub(instead, text)
    return text.strip()


def hash_of(text: str) -> str:
    """Return 16 hexadecimal digits, the same for lines of one shape."""
    return hashlib.sha256(shape_of(text).encode(errors="replace")).hexdigest()[:16]
