"""What is asked of the logs of a job, and the lines that answer it. Pure values, and their form as JSON.

A line that was found is one physical line, masked, without the prefixes of those who passed it on. It is for people,
and for programs that count; rules see blocks of lines (``logs.line``).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from enum import StrEnum
from typing import Any, Self

from msgspec import Struct, field

MOST_PODS = 1000
LONGEST_GREP = 1000


class LogLevel(StrEnum):
    """How bad a line says it is."""

    DEBUG = "debug"
    INFO = "info"
    WARNING = "warning"
    ERROR = "error"

    @property
    def at_least(self) -> frozenset[LogLevel]:
        """This one and those that are worse."""
        levels = list(LogLevel)
        return frozenset(levels[levels.index(self) :])


class LogQuery(Struct, frozen=True):
    """Which lines are wanted. None, and an empty text, is no condition."""

    job: str
    since: datetime
    """Lines from then on; aware UTC."""
    until: datetime | None = None
    """Lines until then, that moment left out."""
    attempt: int | None = None
    rank: int | None = None
    node_rank: int | None = None
    node: str | None = None
    grep: str = ""
    """A regular expression of RE2 that is somewhere in the line."""
    level: LogLevel | None = None
    """Lines of this level, and of worse ones."""
    kernel: bool = False
    """Also what the kernels of the job's nodes have said."""
    pods: Sequence[str] = field(default=())
    """The job's pods, ``namespace/name``, whose containers know nothing of its name."""

    def to_wire(self) -> dict[str, Any]:
        """For a command to an agent. ``node`` is who is asked, and is left out."""
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
        }
        return {name: value for name, value in members.items() if value is not None}

    @classmethod
    def of_wire(cls, params: Mapping[str, Any]) -> Self:
        """Raises ValueError, which says what is wrong."""
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
        )


class FoundLine(Struct, frozen=True):
    """A line that answers a query."""

    at: datetime
    """Aware UTC."""
    text: str
    node: str
    source: str
    """``training``, ``launcher``, ``kernel`` or another, as in `domain.finding.Origin`."""
    level: LogLevel = LogLevel.INFO
    job: str | None = None
    attempt: int | None = None
    rank: int | None = None
    is_sure: bool = True
    """Whether the line says its time itself. Else it is that of the last line before it in its file which does, or of
    the file."""

    def to_json(self) -> dict[str, Any]:
        """For the API and for an agent's answer: without what is not known."""
        members = {
            "at": written(self.at),
            "node": self.node,
            "source": self.source,
            "level": self.level,
            "job": self.job,
            "attempt": self.attempt,
            "rank": self.rank,
            "clock": None if self.is_sure else "guessed",
            "line": self.text,
        }
        return {name: value for name, value in members.items() if value is not None}

    @classmethod
    def of_json(cls, members: Mapping[str, Any]) -> Self:
        """Raises ValueError where this is no line."""
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
            is_sure=members.get("clock") != "guessed",
        )


def left_out(most: int, last: datetime) -> str:
    """The note that says that more than `most` lines answer, of which those until `last` are shown."""
    more = "1 line answers" if most == 1 else f"{most} lines answer"
    return f"more than {more}; those after {written(last)} are not shown"


def written(at: datetime) -> str:
    """A time as ISO 8601 in UTC, with microseconds."""
    return at.astimezone(UTC).isoformat(timespec="microseconds").replace("+00:00", "Z")


def read_time(value: object) -> datetime:
    """Raises ValueError where it is no time with a zone."""
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


def _number(members: Mapping[str, Any], name: str) -> int | None:
    value = members.get(name)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < 1_000_000_000:
        raise ValueError(f"{name} is not a whole number")
    return value
