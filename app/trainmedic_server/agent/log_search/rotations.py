"""The older parts of a log file that rotation has renamed, copied or compressed in the same directory."""

from __future__ import annotations

import os
import re
import stat
from typing import NamedTuple

from trainmedic_server.agent.log_reading.log_files import open_way

MOST_OLDER = 16
"""Older parts of one file that are searched, the newest ones."""
_OLDER = re.compile(r"(?:\.\d{1,3}|[.-]\d{8}(?:-?\d{1,6})?|[.-]\d{4}-\d\d-\d\d[\w.:-]{0,16}?)(?P<packed>\.gz)?\Z")
_MOST_ENTRIES = 20_000


class OlderPart(NamedTuple):
    """One older part."""

    path: str
    is_packed: bool
    """True if gzip has compressed it."""
    written_at: float
    """Unix time."""


class Rotations:
    """Finder of older parts. It lists each directory once, so each answer needs a new one."""

    def __init__(self) -> None:
        self._names: dict[str, list[str]] = {}

    def of(self, path: str, since: float) -> list[OlderPart]:
        """Return the older parts of the file at `path` that were written after `since`, newest first."""
        directory, _, name = path.rpartition("/")
        parts: list[OlderPart] = []
        for other in self._listed(directory):
            match = _OLDER.match(other, len(name)) if other.startswith(name) else None
            if match is None:
                continue
            try:
                facts = os.stat(f"{directory}/{other}", follow_symlinks=False)  # noqa: PTH116
            except OSError:
                continue
            if stat.S_ISREG(facts.st_mode) and facts.st_mtime >= since:
                parts.append(OlderPart(f"{directory}/{other}", match["packed"] is not None, facts.st_mtime))
        return sorted(parts, key=lambda part: -part.written_at)[:MOST_OLDER]

    def _listed(self, directory: str) -> list[str]:
        if directory not in self._names:
            try:
                fd = open_way(directory)
            except OSError:
                self._names[directory] = []
                return []
            try:
                names = [name for name in os.listdir(fd) if _OLDER.search(name)]  # noqa: PTH208 - of a descriptor
            except OSError:
                names = []
            finally:
                os.close(fd)
            self._names[directory] = names[:_MOST_ENTRIES]
        return self._names[directory]
