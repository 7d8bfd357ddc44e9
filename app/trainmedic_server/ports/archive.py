"""Where old runs are kept before the run store deletes them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any, Protocol

from msgspec import Struct


class ArchivedRun(Struct, frozen=True):
    """A run as a line of the archive."""

    id: str
    created_at: datetime
    last_event: int
    """The ``seq`` of its newest event, 0 where it has none: a run that has another one by now was changed since."""
    line: str
    """All that the store knows of it, as one JSON object without a line break."""

    @classmethod
    def of(cls, run_id: str, document: Mapping[str, Any], line: str) -> ArchivedRun:
        """Return the run of a document of the archive, which is written as `line`. Raises ValueError."""
        created_at = document["run"]["created_at"]
        moment = created_at if isinstance(created_at, datetime) else datetime.fromisoformat(created_at)
        return cls(run_id, moment, max((event["seq"] for event in document["events"]), default=0), line)


class RunArchive(Protocol):
    """Keeps runs for good. Blocks."""

    def last(self) -> Sequence[ArchivedRun]:
        """Return the runs of the last `write`, empty where there was none. Raises ArchiveUnavailable."""
        ...

    def write(self, archived: Sequence[ArchivedRun]) -> None:
        """Keep these runs, all or none; they are durable and were read back when this returns. Raises
        ArchiveUnavailable."""
        ...
