"""From the bytes of one physical line to text: no colours, no redrawn progress bars, nothing that is not UTF-8.

All of it takes time in proportion to the bytes that it looks at, and of a line that is longer than rules see it looks
at no more than it keeps.
"""

from __future__ import annotations

import codecs
import re

from trainmedic_logs.lines.line import LONGEST

_ESCAPE = re.compile(
    rb"\x1b(?:\[[0-?]{0,64}[ -/]{0,8}[@-~]|\][^\x07\x1b]{0,512}(?:\x07|\x1b\\)?"
    rb"|[PX^_][^\x1b]{0,512}(?:\x1b\\)?|[ -/]?[0-~])?"
)
_PROGRESS = re.compile(rb"\d%\||\d(?:it|s|B|batch|step|example)s?/s|\ds/(?:it|batch|step)|\?it/s|\d/\d{1,12} \[[=>.]")
_CONTROLS = bytes(byte for byte in (*range(32), 127) if byte not in b"\t\n")
_BARS = 12
"""Earlier states of a progress bar in one line that are read. A form has to grow some times before it counts."""
_REDRAWN = 8
"""Pieces of a line with carriage returns that are looked at, from its end."""


def text_of(raw: bytes, longest: int = LONGEST) -> tuple[str, bool]:
    """Return the text of a line without its line feed, and whether a part of it was left out, for it has more than
    `longest` bytes."""
    if not has_controls(raw) and len(raw) <= longest and raw.isascii():
        return raw.decode("ascii"), False  # as nearly every line is
    shown, is_cut = _cut(raw, longest)
    if len(shown) > longest:
        return shown[:longest].decode("utf-8", "ignore" if _is_utf8(shown) else "replace"), True
    return shown.decode("utf-8", "replace"), is_cut


def has_controls(raw: bytes) -> bool:
    """Whether there is anything in it that no person would see, but for tabs and line feeds."""
    return len(raw.translate(None, _CONTROLS)) < len(raw)


def shown_of(raw: bytes) -> bytes:
    """The bytes of the text of a line, of which some are no UTF-8; as far as rules see it, and no less than that."""
    return _cut(raw, LONGEST)[0] if has_controls(raw) else raw


def _cut(raw: bytes, longest: int) -> tuple[bytes, bool]:
    is_cut = False
    if b"\0" in raw:
        raw = _of_utf16(raw[: 4 * longest])
    if b"\r" in raw:
        raw = _shown(raw)
    if len(raw) > longest * 2:
        raw, is_cut = raw[: longest * 2], True
    if b"\x1b" in raw:
        raw = _ESCAPE.sub(b"", raw)
    return raw.removeprefix(codecs.BOM_UTF8).translate(None, _CONTROLS), is_cut


def _of_utf16(raw: bytes) -> bytes:
    """Return a line of a file of UTF-16 as UTF-8; every other as it is.

    Such a file is cut at the byte of the line feed, of which a half is then left at one end of each line.
    """
    body = raw.removeprefix(codecs.BOM_UTF16_LE).removeprefix(codecs.BOM_UTF16_BE)
    if len(body) % 2:
        body = body[1:] if body[0] == 0 else body[:-1]
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
    """Return the states of a progress bar that a line was written over with, without what it shows at last.

    A whole epoch of steps may stand in one line, which shows the last step alone.
    """
    if b"\r" not in raw:
        return []
    pieces = [piece for piece in raw.rstrip(b"\r").rsplit(b"\r", _BARS)[-_BARS:] if piece.strip()]
    return [piece for piece in pieces[:-1] if len(piece) <= 1024 and _PROGRESS.search(piece)]


def _shown(raw: bytes) -> bytes:
    """Return what a terminal would show of a line that was written over itself: its last piece, after those before it
    that are no progress bar."""
    pieces = [piece for piece in raw.rstrip(b"\r").rsplit(b"\r", _REDRAWN)[-_REDRAWN:] if piece.strip()]
    if not pieces:
        return b""
    told = [piece for piece in pieces[:-1] if not _PROGRESS.search(piece[:1024])]
    return b" ".join([*told, pieces[-1]])
