"""Content of presences, neither parsed nor stored again if unchanged."""

from __future__ import annotations

import hashlib
import threading
from collections import OrderedDict
from collections.abc import Mapping
from typing import Any, NamedTuple

from trainmedic.wire.reading import read_object
from trainmedic.wire.writer import LARGEST_PRESENCE

# The writer puts the time last. Only that differs if nothing else has changed.
_TIME_BEGINS = b', "at": "'
_TIME_ENDS = b'"}'
_LONGEST_TIME = 64
_MOST_BYTES = 128 * 1024 * 1024  # Five times the texts of 12,500 agents and 2,000 jobs of 50 ranks.


class _Content(NamedTuple):
    digest: bytes
    details: Mapping[str, Any]
    size: int


class PresenceTexts:
    def __init__(self, most: int) -> None:
        self._most = most
        self._contents: OrderedDict[str, _Content] = OrderedDict()
        self._bytes = 0
        self._lock = threading.Lock()

    def details(self, key: str, raw: bytes) -> Mapping[str, Any]:
        """Parse `raw`. Reuse members that have not changed since the key's last content."""
        with self._lock:
            before = self._contents.get(key)
        body, at = _without_time(raw)
        body_digest = digest(body)
        if before is not None and at is not None and body_digest == before.digest:
            details: Mapping[str, Any] = {**before.details, "at": at}
        else:
            details = read(raw)
            if before is not None:
                details = {name: _reused(before.details.get(name), value) for name, value in details.items()}
        # Without a readable time, the empty digest equals no later one.
        self._remember(key, _Content(body_digest if at is not None else b"", details, len(raw)))
        return details

    def _remember(self, key: str, content: _Content) -> None:
        with self._lock:
            before = self._contents.pop(key, None)
            self._bytes += content.size - (before.size if before is not None else 0)
            self._contents[key] = content
            while len(self._contents) > self._most or self._bytes > _MOST_BYTES:
                self._bytes -= self._contents.popitem(last=False)[1].size


def read(raw: bytes) -> dict[str, Any]:
    """Return an empty object if the text has none or is too large."""
    if len(raw) > LARGEST_PRESENCE:
        return {}
    try:
        return read_object(raw)
    except ValueError:
        return {}


def digest(raw: bytes) -> bytes:
    return hashlib.blake2b(raw, digest_size=16).digest()


def _without_time(raw: bytes) -> tuple[bytes, str | None]:
    begins_at = raw.rfind(_TIME_BEGINS)
    at = raw[begins_at + len(_TIME_BEGINS) : -len(_TIME_ENDS)]
    if begins_at < 0 or not raw.endswith(_TIME_ENDS) or len(at) > _LONGEST_TIME or b'"' in at or b"\\" in at:
        return raw, None
    return raw[:begins_at], at.decode("ascii", "replace")


def _reused(before: Any, value: Any) -> Any:
    return before if isinstance(value, list | dict) and before == value else value
