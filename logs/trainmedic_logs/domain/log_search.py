"""Log search queries and results.

A result is one physical line, masked and without prefixes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime, timedelta
from enum import StrEnum
from typing import Any, Self

from msgspec import Struct, field

READ = "logs.read"
WITHDRAW = "logs.withdraw"
"""Cancels a `READ`."""
MOST_PODS = 1000
TIME = "time"
"""Attribute in `left_out_notes`."""
LONGEST_GREP = 1000
_MOST_SECONDS = 1e15  # of an error; a number of hundreds of digits has no float


class LogLevel(StrEnum):
    DEBUG = "debug"
    INFO = "info"
    WARNING = "warning"
    ERROR = "error"

    @property
    def at_least(self) -> frozenset[LogLevel]:
        levels = list(LogLevel)
        return frozenset(levels[levels.index(self) :])


class TimeKnownBy(StrEnum):
    LINE = "line"
    """Stated with a zone."""
    NODE_ZONE = "node_zone"
    """Stated without a zone; the node's zone applies."""
    ARRIVAL_ZONE = "arrival_zone"
    """Stated without a zone; arrival times show it."""
    ARRIVAL = "arrival"
    """Not stated; latest arrival time."""
    NEIGHBOURS = "neighbours"
    """Not stated; bounded by neighbouring lines."""
    FILE = "file"
    """Not stated; last write of the file."""


class LeftOut(Struct, frozen=True):
    """Files and lines excluded for a missing attribute."""

    files: int = 0
    lines: int = 0
    since: datetime | None = None
    """Earliest possible time."""

    def __add__(self, other: LeftOut) -> LeftOut:
        begins = [each for each in (self.since, other.since) if each is not None]
        return LeftOut(self.files + other.files, self.lines + other.lines, min(begins, default=None))

    def to_json(self) -> dict[str, Any]:
        since = {"since": written(self.since)} if self.since is not None else {}
        return {"files": self.files, "lines": self.lines, **since}

    @classmethod
    def of_json(cls, members: Mapping[str, Any]) -> Self:
        """Raises ValueError."""
        since = members.get("since")
        return cls(
            _number(members, "files") or 0,
            _number(members, "lines") or 0,
            read_time(since) if since is not None else None,
        )


LATEST_ARRIVAL = timedelta(seconds=15)
"""Maximum delay of a line."""


class LogQuery(Struct, frozen=True):
    """None and "" mean no condition; lines with an unknown attribute do not meet one."""

    job: str
    since: datetime
    """Inclusive, UTC."""
    until: datetime | None = None
    """Exclusive."""
    attempt: int | None = None
    rank: int | None = None
    node_rank: int | None = None
    node: str | None = None  # not sent to agents: only this node's is asked
    grep: str = ""
    level: LogLevel | None = None  # at least
    kernel: bool = False  # also kernel lines
    pods: Sequence[str] = field(default=())
    """The job's: container logs state pods, not jobs."""
    local_rank: int | None = None
    is_search: bool = False
    """All nodes were asked; only those with the job's files answer."""

    def is_over(self, now: datetime) -> bool:
        """Return whether no more results can arrive."""
        return self.until is not None and now >= self.until + LATEST_ARRIVAL

    def to_wire(self) -> dict[str, Any]:
        members = {
            "job": self.job,
            "since": written(self.since),
            "until": written(self.until) if self.until is not None else None,
            "attempt": self.attempt,
            "rank": self.rank,
            "node_rank": self.node_rank,
            "grep": self.grep or None,
            "level": self.level,
            "kernel": self.kernel or None,
            "pods": list(self.pods[:MOST_PODS]) or None,
            "local_rank": self.local_rank,
            "is_search": self.is_search or None,
        }
        return {name: value for name, value in members.items() if value is not None}

    @classmethod
    def of_wire(cls, params: Mapping[str, Any]) -> Self:
        """Raises ValueError with the reason."""
        job, grep, pods = params.get("job"), params.get("grep", ""), params.get("pods", ())
        if not isinstance(job, str) or not job or not isinstance(grep, str) or len(grep) > LONGEST_GREP:
            raise ValueError("the query needs a job, and its grep is a text of at most 1,000 characters")
        if not isinstance(pods, list | tuple) or not all(isinstance(pod, str) for pod in pods):
            raise ValueError("the query's pods are no names")
        until, level = params.get("until"), params.get("level")
        return cls(
            job=job,
            since=read_time(params.get("since")),
            until=read_time(until) if until is not None else None,
            attempt=_number(params, "attempt"),
            rank=_number(params, "rank"),
            node_rank=_number(params, "node_rank"),
            grep=grep,
            level=LogLevel(level) if level is not None else None,
            kernel=params.get("kernel") is True,
            pods=tuple(pods[:MOST_PODS]),
            local_rank=_number(params, "local_rank"),
            is_search=params.get("is_search") is True,
        )


class FoundLine(Struct, frozen=True):
    at: datetime
    text: str
    node: str
    source: str
    level: LogLevel = LogLevel.INFO
    job: str | None = None
    attempt: int | None = None
    rank: int | None = None
    local_rank: int | None = None
    known_by: TimeKnownBy = TimeKnownBy.LINE
    time_error: float | None = None
    """Seconds; None if stated or unknown."""

    @property
    def is_sure(self) -> bool:
        # The time is stated, not guessed.
        return self.known_by in (TimeKnownBy.LINE, TimeKnownBy.NODE_ZONE, TimeKnownBy.ARRIVAL_ZONE)

    def to_json(self) -> dict[str, Any]:
        members = {
            "at": written(self.at),
            "node": self.node,
            "source": self.source,
            "level": self.level,
            "job": self.job,
            "attempt": self.attempt,
            "rank": self.rank,
            "local_rank": self.local_rank,
            "time_source": None if self.known_by is TimeKnownBy.LINE else self.known_by,
            "time_error": self.time_error,
            "clock": None if self.is_sure else "guessed",
            "line": self.text,
        }
        return {name: value for name, value in members.items() if value is not None}

    @classmethod
    def of_json(cls, members: Mapping[str, Any]) -> Self:
        """Raises ValueError."""
        text, node, source, job = (members.get(name) for name in ("line", "node", "source", "job"))
        if not isinstance(text, str) or not isinstance(node, str) or not isinstance(source, str):
            raise ValueError("it has no line, node or source")
        return cls(
            at=read_time(members.get("at")),
            text=text,
            node=node,
            source=source,
            level=LogLevel(members.get("level", LogLevel.INFO)),
            job=job if isinstance(job, str) else None,
            attempt=_number(members, "attempt"),
            rank=_number(members, "rank"),
            local_rank=_number(members, "local_rank"),
            known_by=_known_by(members),
            time_error=_seconds(members.get("time_error")),
        )


def left_out(most: int, last: datetime) -> str:
    """Return the note on a result cut after `most` lines."""
    more = "1 line answers" if most == 1 else f"{most} lines answer"
    return f"more than {more}; those after {written(last)} are not shown"


def left_out_notes(left_out: Mapping[str, LeftOut]) -> list[str]:
    """Return a note per attribute."""
    return [_left_out_note(name, each) for name, each in sorted(left_out.items()) if each.files or each.lines]


def _left_out_note(name: str, counted: LeftOut) -> str:
    counts = ((counted.files, "file"), (counted.lines, "line"))
    parts = [f"{count} {noun}{'' if count == 1 else 's'}" for count, noun in counts if count]
    is_one = counted.files + counted.lines == 1
    subject, verb, are = " and ".join(parts), "states" if is_one else "state", "is" if is_one else "are"
    if name != TIME:
        return f"{subject} {verb} no {name.replace('_', ' ')} and {are} left out"
    since = f"; since {written(counted.since)} includes {'it' if is_one else 'them'}" if counted.since else ""
    return (
        f"{subject} {verb} no time and may have been written outside of the window, before the agent looked at the "
        f"file; {'it is' if is_one else 'they are'} left out{since}"
    )


def written(at: datetime) -> str:
    return at.astimezone(UTC).isoformat(timespec="microseconds").replace("+00:00", "Z")


def read_time(value: object) -> datetime:
    """Raises ValueError without a zone."""
    try:
        at = datetime.fromisoformat(value) if isinstance(value, str) else None
    except ValueError as error:
        raise ValueError(f"{value!r} is no time") from error
    if at is None or at.tzinfo is None:
        raise ValueError(f"{value!r} is no time with a zone")
    try:
        return at.astimezone(UTC)
    except OverflowError as error:
        raise ValueError(f"{value!r} is no time") from error


def _known_by(members: Mapping[str, Any]) -> TimeKnownBy:
    # Without a time source, "clock" still marks a guess.
    usual = TimeKnownBy.NEIGHBOURS if members.get("clock") == "guessed" else TimeKnownBy.LINE
    return TimeKnownBy(members.get("time_source", usual))


def _seconds(value: object) -> float | None:
    if not isinstance(value, int | float) or isinstance(value, bool) or not 0 <= value < _MOST_SECONDS:
        return None
    return float(value)


def _number(members: Mapping[str, Any], name: str) -> int | None:
    value = members.get(name)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < 1_000_000_000:
        raise ValueError(f"{name} is not a whole number")
    return value
