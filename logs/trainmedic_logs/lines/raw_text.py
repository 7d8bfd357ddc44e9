"""Decoding of physical lines without colours, redraws and control characters, in linear time."""

from __future__ import annotations

import codecs
import re

from trainmedic_logs.lines.line import LONGEST

_ESCAPE = re.compile(
    rb"\x1b(?:\[[0-?]{0,64}[ -/]{0,8}[@-~]|\][^\x07\x1b]{0,512}(?:\x07|\x1b\\)?"
    rb"|[PX^_][^\x1b]{0,512}(?:\x1b\\)?|[ -/]?[0-~])?"
)
_PROGRESS_BAR = re.compile(
    rb"\d%\||\d(?:it|s|B|batch|step|example)s?/s|\ds/(?:it|batch|step)|\?it/s|\d/\d{1,12} \[[=>.]"
)
_CONTROLS = bytes(byte for byte in (*range(32), 127) if byte not in b"\t\n")
# Earlier states of a redrawn line that are read. `progress` counts a bar after several growing states.
_MOST_BARS = 12
# Pieces read from a line's end.
_MOST_REDRAWS = 8


def text_of(raw: bytes, longest: int = LONGEST) -> tuple[str, bool]:
    """Return a line's text of at most `longest` bytes, and whether it was cut."""
    if not has_controls(raw) and len(raw) <= longest and raw.isascii():
        return raw.decode("ascii"), False  # fast path for nearly all lines
    shown, is_cut = _cleaned(raw, longest)
    if len(shown) > longest:
        return shown[:longest].decode("utf-8", "ignore" if _is_utf8(shown) else "replace"), True
    return shown.decode("utf-8", "replace"), is_cut


def has_controls(raw: bytes) -> bool:
    return len(raw.translate(None, _CONTROLS)) < len(raw)


def shown_of(raw: bytes) -> bytes:
    """Return the bytes as a terminal would show them."""
    return _cleaned(raw, LONGEST)[0] if has_controls(raw) else raw


def _cleaned(raw: bytes, longest: int) -> tuple[bytes, bool]:
    is_cut = False
    if b"\0" in raw:
        raw = _of_utf16(raw[: 4 * longest])
    if b"\r" in raw:
        raw = _last_redraws(raw)
    if len(raw) > longest * 2:  # escapes may take half
        raw, is_cut = raw[: longest * 2], True
    if b"\x1b" in raw:
        raw = _ESCAPE.sub(b"", raw)
    return raw.removeprefix(codecs.BOM_UTF8).translate(None, _CONTROLS), is_cut


def _of_utf16(raw: bytes) -> bytes:
    # Splitting at line feed bytes leaves half a character at one end of each line.
    body = raw.removeprefix(codecs.BOM_UTF16_LE).removeprefix(codecs.BOM_UTF16_BE)
    if len(body) % 2:
        body = body[1:] if body[0] == 0 else body[:-1]
    # Text that is mostly ASCII: most high bytes are zero, and few low ones.
    for codec, high, low in (("utf-16-le", body[1::2], body[::2]), ("utf-16-be", body[::2], body[1::2])):
        if high.count(0) * 2 > len(high) and low.count(0) * 8 < len(low):
            return body.decode(codec, "replace").encode("utf-8", "replace")
    return raw


def _is_utf8(raw: bytes) -> bool:
    try:
        raw.decode()
    except UnicodeDecodeError:
        return False
    return True


def earlier_bars(raw: bytes) -> list[bytes]:
    """Return a line's overwritten progress bar states: a whole epoch may stand in one line."""
    if b"\r" not in raw:
        return []
    pieces = [piece for piece in raw.rstrip(b"\r").rsplit(b"\r", _MOST_BARS)[-_MOST_BARS:] if piece.strip()]
    return [piece for piece in pieces[:-1] if len(piece) <= 1024 and _PROGRESS_BAR.search(piece)]


def _last_redraws(raw: bytes) -> bytes:
    pieces = [piece for piece in raw.rstrip(b"\r").rsplit(b"\r", _MOST_REDRAWS)[-_MOST_REDRAWS:] if piece.strip()]
    if not pieces:
        return b""
    texts = [piece for piece in pieces[:-1] if not _PROGRESS_BAR.search(piece[:1024])]
    return b" ".join([*texts, pieces[-1]])
