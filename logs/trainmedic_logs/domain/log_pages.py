"""Compressed pages of lines in agent replies."""

from __future__ import annotations

import base64
import json
import zlib
from collections.abc import Mapping, Sequence
from typing import Any

MOST_PACKED = 56_000
"""Characters; a reply has 64 KiB."""
_PIECE = 4000
_LARGEST = 16 * 1024 * 1024


def packed(page: Mapping[str, Any]) -> list[str]:
    raw = zlib.compress(json.dumps(page, separators=(",", ":")).encode(), 6)
    text = base64.b64encode(raw).decode()
    return [text[begin : begin + _PIECE] for begin in range(0, len(text), _PIECE)]


def fits(pieces: Sequence[str]) -> bool:
    return sum(map(len, pieces)) <= MOST_PACKED


def unpacked(pieces: object) -> dict[str, Any]:
    """Raises ValueError for invalid pages."""
    if not isinstance(pieces, list | tuple) or not all(isinstance(piece, str) for piece in pieces):
        raise ValueError("it is no page of lines")
    try:
        decompress = zlib.decompressobj()
        raw = decompress.decompress(base64.b64decode("".join(pieces), validate=True), _LARGEST)
        page = json.loads(raw)
    except (ValueError, zlib.error, RecursionError) as error:
        raise ValueError("the page of lines cannot be unpacked") from error
    if not isinstance(page, dict) or decompress.unconsumed_tail:
        raise ValueError("it is no page of lines")
    return page
