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
    """Keeps runs for good, in files that are numbered as they were written. Blocks.

    Who writes says how far the archive was when he saw it last: one that is not so far is not the one that he knows,
    such as what lies beneath a volume that is away, and is neither read nor written.
    """

    @property
    def name(self) -> str:
        """What tells it from other archives, also after a restart."""
        ...

    def last(self, at_least: int) -> tuple[int, Sequence[ArchivedRun]]:
        """Return the number of the newest file, which is at least `at_least`, and its runs, of which a new archive has
        none. Raises ArchiveUnavailable."""
        ...

    def write(self, archived: Sequence[ArchivedRun], at_least: int) -> int:
        """Keep these runs, all or none, and return the number of their file; they are durable and were read back when
        this returns. Raises ArchiveUnavailable, also where the newest file's number is less than `at_least`."""
        ...
