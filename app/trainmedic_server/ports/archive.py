"""Permanent storage of runs in numbered files. Blocking.

An archive that ends before file `at_least` is wrong, such as the directory under an unmounted volume, and is
neither read nor written.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any, Protocol

from msgspec import Struct


class ArchivedRun(Struct, frozen=True):
    id: str
    created_at: datetime
    last_event: int
    """``seq`` of its newest event, 0 if none. If the store has a newer one, the run changed later."""
    line: str  # JSON document, without line feed.

    @classmethod
    def of(cls, run_id: str, document: Mapping[str, Any], line: str) -> ArchivedRun:
        """Raises ValueError, KeyError or TypeError if invalid."""
        created_at = document["run"]["created_at"]
        moment = created_at if isinstance(created_at, datetime) else datetime.fromisoformat(created_at)
        return cls(run_id, moment, max((event["seq"] for event in document["events"]), default=0), line)


class RunArchive(Protocol):
    @property
    def name(self) -> str:
        """Identifies the archive, also after a restart."""
        ...

    def last(self, at_least: int) -> tuple[int, Sequence[ArchivedRun]]:
        """Return the newest file's number and runs (0 and none in a new archive). Raises ArchiveUnavailable."""
        ...

    def write(self, archived: Sequence[ArchivedRun], at_least: int) -> int:
        """Write all or none, durable and verified; return their file's number. Raises ArchiveUnavailable."""
        ...
