"""Unsolicited notices to the server, by a job or its launcher: signed entries of the stream of replies."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from datetime import datetime

from trainmedic.wire import envelope
from trainmedic.wire.envelope import EnvelopeError
from trainmedic.wire.reading import read_object, without_nul

FIELD = b"notice"
ENDED = "job_ended"
FAILED = "job_failed"  # a process failed, or with a launcher an attempt
RESTARTED = "job_restarted"
GONE = "job_gone"  # no further attempt follows
KINDS = frozenset({ENDED, FAILED, RESTARTED, GONE})
LONGEST_REASON = 500  # characters
NAME = re.compile(r"^[^\s\x00-\x1f\x7f\ud800-\udfff]{1,253}\Z")
_MOST_NUMBER = 1_000_000_000  # a higher optional number counts as absent
_LONGEST_WORD = 253  # characters of `node` and `error`
_INSTANCE = re.compile(r"^[0-9a-f-]{36}\Z")


def launcher_presence(launcher: str) -> str:
    return f"trainmedic:launcher:{launcher}"


def launcher_commands(launcher: str) -> str:
    return f"trainmedic:commands:launcher:{launcher}"


def launcher_name(job: str, node: str) -> str:
    """Node names contain no slash."""
    return f"{job}/{node}"


def job_of_launcher(launcher: str) -> str:
    return launcher.rpartition("/")[0]


@dataclass(frozen=True)
class Notice:
    job: str
    kind: str
    instance: str  # ID of the sending process
    number: int  # from 1 within the instance
    at: datetime
    attempt: int | None = None  # From 1; None if no launcher counts
    reason: str = ""  # For people, never with the training's output
    node: str = ""  # The launcher's; this and the following may be empty
    status: int | None = None
    """Exit code of the first failed process; negative for a signal."""
    rank: int | None = None
    pid: int | None = None
    error: str = ""
    """Kind of its last error, such as ``ValueError``, or ``hang``."""
    restarts: bool = False  # Another attempt follows; only in ``job_failed``

    def encode(self) -> bytes:
        fields: dict[str, object] = {
            "job": self.job,
            "kind": self.kind,
            "instance": self.instance,
            "number": self.number,
            "at": envelope.write_time(self.at),
            "reason": self.reason[:LONGEST_REASON],
        }
        more = {
            "attempt": self.attempt,
            "node": self.node[:_LONGEST_WORD] or None,
            "status": self.status,
            "rank": self.rank,
            "pid": self.pid,
            "error": self.error[:_LONGEST_WORD] or None,
            "restarts": self.restarts or None,
        }
        fields |= {name: value for name, value in more.items() if value is not None}
        return json.dumps(fields, separators=(",", ":")).encode()

    @classmethod
    def decode(cls, raw: bytes) -> Notice:
        """Raises EnvelopeError, naming the field."""
        try:
            fields = read_object(raw)
        except ValueError as error:
            raise EnvelopeError("notice: not a JSON object") from error
        job, kind, instance = (fields.get(name) for name in ("job", "kind", "instance"))
        if not isinstance(job, str) or not NAME.match(job):
            raise EnvelopeError("notice: job is not a name")
        if not isinstance(kind, str) or kind not in KINDS:
            raise EnvelopeError(f"notice: kind is not one of {', '.join(sorted(KINDS))}")
        if not isinstance(instance, str) or not _INSTANCE.match(instance):
            raise EnvelopeError("notice: instance is not an id")
        number = _count(fields.get("number"))
        if number is None:
            raise EnvelopeError("notice: number is not a whole number from 1 on")
        reason = fields.get("reason")
        return cls(
            job=job,
            kind=kind,
            instance=instance,
            number=number,
            at=envelope.read_time(str(fields.get("at"))),
            attempt=_count(fields.get("attempt")),
            reason=str(without_nul(reason))[:LONGEST_REASON] if isinstance(reason, str) else "",
            node=_name(fields.get("node")),
            status=_whole(fields.get("status")),
            rank=_whole(fields.get("rank"), least=0),
            pid=_count(fields.get("pid")),
            error=_name(fields.get("error")),
            restarts=fields.get("restarts") is True,
        )


def _count(value: object) -> int | None:
    return _whole(value, least=1)


def _whole(value: object, least: int = -_MOST_NUMBER) -> int | None:
    is_whole = isinstance(value, int) and not isinstance(value, bool) and least <= value <= _MOST_NUMBER
    return value if is_whole and isinstance(value, int) else None


def _name(value: object) -> str:
    return value if isinstance(value, str) and NAME.match(value) else ""
