"""What an agent leaves out when it reads the logs of a job, because a budget of the job or of its user is used up.

The agent reports cuts in its presence, at most `MOST_REPORTED`. The server and the command line read them from there.
A presence is not trusted: `cuts_in` skips what has another form.
"""

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
    """A budget of log reading."""

    FILES = "files"
    """Log files that are not followed. The count is the present number."""
    ENTRIES = "entries"
    """Scans that ended before they had seen every entry of the job's directories."""
    JOBS = "jobs"
    """Job directories of one user that are not scanned. The count is the present number."""
    SECONDS = "seconds"
    """Scans of the job that were shortened or postponed, because they take too long."""
    LINES = "lines"
    """Lines that were read and not shown to the rules."""
    FINDINGS = "findings"
    """Findings that were not reported."""
    DUMPS = "dumps"
    """Flight recorder dumps that were not read."""


class LogCut(Struct, frozen=True):
    """What one budget has left out."""

    node: str
    job: str | None
    """Name of the job's directory or pod. None if the cut is about a user."""
    uid: int | None
    """Owner of the directory or file."""
    what: CutKind
    count: int
    since: datetime
    """First cut of this kind without a pause of ten minutes, UTC."""

    def plain(self) -> dict[str, Any]:
        """Return the members for a presence. The node is not among them."""
        return {
            "job": self.job,
            "uid": self.uid,
            "what": self.what.value,
            "count": self.count,
            "since": round(self.since.timestamp()),
        }


def cuts_in(node: str, details: Mapping[str, Any]) -> Iterator[LogCut]:
    """Yield the cuts that a presence reports. Agents before this field report none."""
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
