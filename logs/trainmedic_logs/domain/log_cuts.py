"""Log data that agents omitted for their budgets, as their untrusted presences state."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from datetime import UTC, datetime
from enum import StrEnum
from itertools import islice
from typing import Any

from msgspec import Struct

MOST_REPORTED = 32
LONGEST_JOB = 253
_LARGEST_UID = 2**32 - 1
_LARGEST_COUNT = 2**53 - 1


class CutKind(StrEnum):
    FILES = "files"
    """Log files not followed; a current number."""
    ENTRIES = "entries"
    """Scans that ended before a directory's last entry."""
    JOBS = "jobs"
    """Job directories that are not scanned; a current number."""
    SECONDS = "seconds"
    """Scans that took too long."""
    LINES = "lines"
    """Lines read but not matched."""
    FINDINGS = "findings"
    DUMPS = "dumps"


class LogCut(Struct, frozen=True):
    node: str
    job: str | None
    """Name from a directory, pod or file, or a directory's path; None if the cut concerns a user or the node."""
    uid: int | None  # owner of the data; None for a directory's path, and for the node's own logs
    what: CutKind
    count: int
    since: datetime
    """First cut after 10 min without any, UTC."""

    def plain(self) -> dict[str, Any]:
        return {
            "job": self.job,
            "uid": self.uid,
            "what": self.what.value,
            "count": self.count,
            "since": round(self.since.timestamp()),
        }


def cuts_in(node: str, details: Mapping[str, Any]) -> Iterator[LogCut]:
    """Yield a presence's valid cuts."""
    logs = details.get("logs")
    reported = logs.get("cuts") if isinstance(logs, Mapping) else None
    for each in islice(reported if isinstance(reported, list) else (), MOST_REPORTED):
        if isinstance(each, Mapping) and (cut := _cut(node, each)) is not None:
            yield cut


def _cut(node: str, each: Mapping[str, Any]) -> LogCut | None:
    job, uid, count = each.get("job"), each.get("uid"), each.get("count")
    if job is not None and not (isinstance(job, str) and 0 < len(job) <= LONGEST_JOB):
        return None
    if uid is not None and not _is_whole(uid, _LARGEST_UID):
        return None
    if not isinstance(count, int) or not _is_whole(count, _LARGEST_COUNT) or not count:
        return None
    try:
        what, since = CutKind(each["what"]), datetime.fromtimestamp(each["since"], UTC)
    except (KeyError, TypeError, ValueError, OverflowError, OSError):
        return None
    return LogCut(node, job, uid, what, count, since)


def _is_whole(value: object, largest: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= largest
