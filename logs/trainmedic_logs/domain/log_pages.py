"""Compressed JSON in agent replies: pages of lines, and Slurm's documents."""

from __future__ import annotations

import base64
import json
import zlib
from collections.abc import Mapping, Sequence
from typing import Any

MOST_PACKED = 56_000
"""Characters; a reply has 64 KiB."""
PIECE = 4000  # characters of one text; replies cut texts at 4,096
_LARGEST = 16 * 1024 * 1024


def packed(page: Mapping[str, Any]) -> list[str]:
    return packed_bytes(json.dumps(page, separators=(",", ":")).encode())


def packed_bytes(raw: bytes) -> list[str]:
    """Pack a JSON object."""
    text = base64.b64encode(zlib.compress(raw, 6)).decode()
    return [text[begin : begin + PIECE] for begin in range(0, len(text), PIECE)]


def fits(pieces: Sequence[str]) -> bool:
    return sum(map(len, pieces)) <= MOST_PACKED


def unpacked(pieces: object, largest: int = _LARGEST) -> dict[str, Any]:
    """Return the object. `largest`: bytes of its JSON. Raises ValueError."""
    if not isinstance(pieces, list | tuple) or not all(isinstance(piece, str) for piece in pieces):
        raise ValueError("not a compressed JSON object")
    try:
        decompress = zlib.decompressobj()
        raw = decompress.decompress(base64.b64decode("".join(pieces), validate=True), largest)
        page = json.loads(raw)
    except (ValueError, zlib.error, RecursionError) as error:
        raise ValueError("not valid compressed JSON") from error
    if not isinstance(page, dict) or decompress.unconsumed_tail:
        raise ValueError("not a compressed JSON object")
    return page
