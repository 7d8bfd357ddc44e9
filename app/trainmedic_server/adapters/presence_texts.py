"""What presences say, read from their text; what one says again is neither read again nor kept twice.

Who calls it: ``redis_presence_judge``, once it knows that a text is genuine.
"""

from __future__ import annotations

import hashlib
import threading
from collections import OrderedDict
from collections.abc import Mapping
from typing import Any, NamedTuple

from trainmedic.wire.reading import read_object
from trainmedic.wire.writer import LARGEST_PRESENCE

_TIME_BEGINS = b', "at": "'
_TIME_ENDS = b'"}'
_LONGEST_TIME = 64
_MOST_BYTES = 128 * 1024 * 1024
"""Of all texts together whose meaning is remembered: five times those of 12,500 agents and 2,000 jobs of 50 ranks."""


class _Said(NamedTuple):
    """What the last text under a key has said."""

    digest: bytes
    """Of the text up to its time."""
    details: Mapping[str, Any]
    size: int


class PresenceTexts:
    """Remembers what was last read under each of at most `most` keys. May be used by several threads."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._said: OrderedDict[str, _Said] = OrderedDict()
        self._bytes = 0
        self._lock = threading.Lock()

    def details(self, key: str, raw: bytes) -> Mapping[str, Any]:
        """What the text says; nothing where it is no object, or too large. Parts that are as before are the same
        objects as before."""
        with self._lock:
            before = self._said.get(key)
        body, at = _without_time(raw)
        body_digest = digest(body)
        if before is not None and at is not None and body_digest == before.digest:
            details: Mapping[str, Any] = {**before.details, "at": at}
        else:
            details = read(raw)
            if before is not None:
                details = {name: _same(before.details.get(name), value) for name, value in details.items()}
        self._remember(key, _Said(body_digest if at is not None else b"", details, len(raw)))
        return details

    def _remember(self, key: str, said: _Said) -> None:
        with self._lock:
            before = self._said.pop(key, None)
            self._bytes += said.size - (before.size if before is not None else 0)
            self._said[key] = said
            while len(self._said) > self._most or self._bytes > _MOST_BYTES:
                self._bytes -= self._said.popitem(last=False)[1].size


def read(raw: bytes) -> dict[str, Any]:
    """The object that a text is; empty where it is none, or too large."""
    if len(raw) > LARGEST_PRESENCE:
        return {}
    try:
        return read_object(raw)
    except ValueError:
        return {}


def digest(raw: bytes) -> bytes:
    return hashlib.blake2b(raw, digest_size=16).digest()


def _without_time(raw: bytes) -> tuple[bytes, str | None]:
    """The text up to its time, and the time; None where it does not end with one, as agents and jobs write it.

    Two texts that are the same up to there say the same but for the time: it is text without a quotation mark in it,
    and after it the object ends.
    """
    begins_at = raw.rfind(_TIME_BEGINS)
    at = raw[begins_at + len(_TIME_BEGINS) : -len(_TIME_ENDS)]
    if begins_at < 0 or not raw.endswith(_TIME_ENDS) or len(at) > _LONGEST_TIME or b'"' in at or b"\\" in at:
        return raw, None
    return raw[:begins_at], at.decode("ascii", "replace")


def _same(before: Any, value: Any) -> Any:
    """`before` where it is the same as `value`, of those that are large."""
    return before if isinstance(value, list | dict) and before == value else value
