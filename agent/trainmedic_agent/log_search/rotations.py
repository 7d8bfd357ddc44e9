"""Older parts of a log, renamed, copied or compressed by rotation."""

from __future__ import annotations

import re
import stat
import time
from collections.abc import Sequence
from typing import NamedTuple

from trainmedic_agent.log_opening.node_files import FileFacts, LogRefused, NamedBy, NodeFiles

MOST_OLDER = 16  # parts of a file, newest first
_OLDER = re.compile(r"(?:\.\d{1,3}|[.-]\d{8}(?:-?\d{1,6})?|[.-]\d{4}-\d\d-\d\d[\w.:-]{0,16}?)(?P<packed>\.gz)?\Z")
_MOST_LISTED = 200_000  # entries of a directory
_MOST_KEPT = 20_000  # of those, names of older parts


class OlderPart(NamedTuple):
    path: str
    is_packed: bool
    written_at: float
    """Unix time."""


class Rotations:
    def __init__(self, files: NodeFiles, seconds: float) -> None:
        """List no further directory after `seconds`."""
        self._files = files
        self._until = time.monotonic() + seconds
        self.left_out = 0  # files whose directory was not listed
        self._names: dict[tuple[str, NamedBy | None], list[str]] = {}  # of older parts, by directory and namer

    def of(self, path: str, since: float, named_by: NamedBy | None = None) -> list[OlderPart]:
        """Return older parts written at `since` or later, in Unix time."""
        directory, _, name = path.rpartition("/")
        if (directory, named_by) not in self._names and time.monotonic() > self._until:
            self.left_out += 1
            return []
        matches = {
            other: match
            for other in self._listed(directory, named_by)
            if other.startswith(name) and (match := _OLDER.match(other, len(name))) is not None
        }
        parts: list[OlderPart] = []
        for other, facts in zip(matches, self._facts(directory, list(matches), named_by), strict=True):
            if facts is not None and stat.S_ISREG(facts.mode) and facts.written_ns / 1e9 >= since:
                is_packed = matches[other]["packed"] is not None
                parts.append(OlderPart(f"{directory}/{other}", is_packed, facts.written_ns / 1e9))
        return sorted(parts, key=lambda part: -part.written_at)[:MOST_OLDER]

    def _facts(self, directory: str, names: Sequence[str], named_by: NamedBy | None) -> Sequence[FileFacts | None]:
        if not names:
            return ()
        try:
            return self._files.facts(directory, names, named_by)
        except (OSError, LogRefused):
            return [None] * len(names)

    def _listed(self, directory: str, named_by: NamedBy | None) -> Sequence[str]:
        key = (directory, named_by)
        if key not in self._names:
            try:
                entries = self._files.listing(directory, _MOST_LISTED, named_by).entries
            except (OSError, LogRefused):
                entries = ()
            names = [entry.name for entry in entries if _OLDER.search(entry.name)]
            self._names[key] = names[:_MOST_KEPT]
        return self._names[key]
