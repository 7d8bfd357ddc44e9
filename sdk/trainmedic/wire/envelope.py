"""Wire format between the server and jobs and agents.

A command is a stream entry with the field ``command``, a reply one of ``trainmedic:replies`` with ``reply`` (JSON,
UTF-8). Standard library only.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, field
from datetime import datetime, timezone
from typing import Any, Mapping

from trainmedic.wire.ids import new_id as new_id
from trainmedic.wire.reading import read_json, read_object, without_nul
from trainmedic.wire.signing import job_identity, node_identity
from trainmedic.wire.signing import sign as sign  # public: programs that write commands import it from here
from trainmedic.wire.steady_time import utc_now as utc_now

VERSION = 1
REPLIES = "trainmedic:replies"
CONSUMER_GROUP = "trainmedic"

ACCEPTED = "accepted"
APPLIED = "applied"
REJECTED = "rejected"
UNSUPPORTED = "unsupported"
FAILED = "failed"
EXPIRED = "expired"
_IDENTIFIER = re.compile(r"^[!-~]{1,128}\Z")
STATUSES = frozenset({ACCEPTED, APPLIED, REJECTED, UNSUPPORTED, FAILED, EXPIRED})
FINAL = STATUSES - {ACCEPTED}
_REASONS = ("reason", "error", "message")  # members in which other programs state a reason
_LONGEST_NAME = 253  # characters of a job or node; a reply with a longer name counts as without one
_MOST_RANKS = 1_000_000  # a reply with a higher rank is refused; a higher number of ranks counts as unknown

_encode = json.JSONEncoder(separators=(",", ":")).encode


def job_commands(job: str) -> str:
    return f"trainmedic:commands:job:{job}"


def node_commands(node: str) -> str:
    return f"trainmedic:commands:node:{node}"


def job_presence(job: str) -> str:
    return f"trainmedic:job:{job}"


def agent_presence(node: str) -> str:
    return f"trainmedic:agent:{node}"


class EnvelopeError(ValueError):
    """A message is not a well-formed envelope."""


@dataclass(frozen=True)
class Command:
    """An action sent to a node agent or a training job.

    No receiver applies it after ``expires_at`` (UTC). ``undo_of``: the ID of the command to revert.
    """

    id: str
    action: str
    target: Mapping[str, Any]
    params: Mapping[str, Any]
    run_id: str
    playbook: str
    reason: str
    issued_at: datetime
    expires_at: datetime
    undo_of: str | None = None
    v: int = VERSION

    def encode(self) -> bytes:
        fields: dict[str, Any] = {
            "v": self.v,
            "id": self.id,
            "action": self.action,
            "target": dict(self.target),
            "params": dict(self.params),
            "run_id": self.run_id,
            "playbook": self.playbook,
            "reason": self.reason,
            "issued_at": write_time(self.issued_at),
            "expires_at": write_time(self.expires_at),
        }
        if self.undo_of is not None:
            fields["undo_of"] = self.undo_of
        return _encode(fields).encode()

    @classmethod
    def decode(cls, raw: bytes) -> Command:
        """Decode; ignore extra fields. Raises EnvelopeError, naming the field."""
        fields = _object(raw, "command")
        if fields.get("v") != VERSION:
            raise EnvelopeError(f"command: v is {fields.get('v')!r}; this version reads {VERSION}")
        undo_of = fields.get("undo_of")
        return cls(
            id=_identifier(fields, "id"),
            action=_member(fields, "action", str),
            target=_member(fields, "target", dict),
            params=_member(fields, "params", dict),
            run_id=_member(fields, "run_id", str),
            playbook=_member(fields, "playbook", str),
            reason=_member(fields, "reason", str),
            issued_at=read_time(_member(fields, "issued_at", str)),
            expires_at=read_time(_member(fields, "expires_at", str)),
            undo_of=None if undo_of is None else _identifier(fields, "undo_of"),
        )


@dataclass(frozen=True)
class Reply:
    """Answer of a job's rank, or of an agent (rank None), to a command."""

    command_id: str
    sender: str
    status: str
    rank: int | None = None
    output: Mapping[str, Any] = field(default_factory=dict)
    at: datetime = field(default_factory=lambda: utc_now())
    job: str | None = None
    node: str | None = None
    ranks: int | None = None  # number of ranks that answer the command
    is_to_genuine: bool = True
    """False for a forged command, whose ID may be copied."""

    @property
    def identity(self) -> str | None:
        if self.job is not None:
            return job_identity(self.job)
        return node_identity(self.node) if self.node is not None else None

    @property
    def is_final(self) -> bool:
        return self.status in FINAL

    def encode(self) -> bytes:
        fields: dict[str, Any] = {
            "command_id": self.command_id,
            "from": self.sender,
            "rank": self.rank,
            "status": self.status,
            "output": dict(self.output),
            "at": write_time(self.at),
        }
        fields |= {name: value for name, value in (("job", self.job), ("node", self.node)) if value is not None}
        if self.ranks is not None:
            fields["ranks"] = self.ranks
        if not self.is_to_genuine:
            fields["genuine"] = False
        return _encode(fields).encode()

    @classmethod
    def decode(cls, raw: bytes) -> Reply:
        """Raises EnvelopeError, naming the field."""
        return cls._of(_object(raw, "reply"))

    @classmethod
    def of_entry(cls, fields: Mapping[bytes, bytes]) -> Reply:
        """Return the reply in a stream entry: JSON in one field, or unsigned with one field per member.

        Raises EnvelopeError.
        """
        if is_in_several_fields(fields):
            return cls._of({_text(name): _flat_member(name, value) for name, value in fields.items()})
        return cls.decode(body_of(fields, b"reply"))

    @classmethod
    def _of(cls, fields: Mapping[str, Any]) -> Reply:
        """Validate only command ID, status and rank: a refused reply would lose the outcome."""
        status = _member(fields, "status", str).strip().lower()
        if status not in STATUSES:
            raise EnvelopeError(f"reply: status is {status!r}; it must be one of {', '.join(sorted(STATUSES))}")
        return cls(
            command_id=_identifier(fields, "command_id"),
            sender=without_nul(str(fields.get("from") or "")),
            status=status,
            rank=_rank(fields.get("rank")),
            output=_output(fields, status),
            at=_time_or_now(fields.get("at")),
            job=_name(fields.get("job")),
            node=_name(fields.get("node")),
            ranks=_count(fields.get("ranks")),
            is_to_genuine=fields.get("genuine") is not False,
        )


def is_in_several_fields(fields: Mapping[bytes, bytes]) -> bool:
    return b"command_id" in fields and b"reply" not in fields


def body_of(fields: Mapping[bytes, bytes], name: bytes) -> bytes:
    """Return the JSON in the field `name`, else the only JSON object. Raises EnvelopeError."""
    if name in fields:
        return fields[name]
    objects = [value for value in fields.values() if value.lstrip()[:1] == b"{"]
    if len(objects) != 1:
        raise EnvelopeError(f"the entry has no field {name.decode()!r}")
    return objects[0]


def write_time(value: datetime) -> str:
    """Format as RFC 3339 in UTC with microseconds: ``2026-01-31T12:00:00.000000Z``."""
    return value.astimezone(timezone.utc).replace(tzinfo=None).isoformat(timespec="microseconds") + "Z"


def read_time(text: str) -> datetime:
    """Parse an RFC 3339 time to UTC. Raises EnvelopeError."""
    try:
        value = datetime.fromisoformat(text[:-1] + "+00:00" if text.endswith(("Z", "z")) else text)
    except ValueError as error:
        raise EnvelopeError(f"{text!r} is not an RFC 3339 time") from error
    if value.tzinfo is None:
        raise EnvelopeError(f"{text!r} has no time zone")
    try:
        return value.astimezone(timezone.utc)
    except OverflowError as error:
        raise EnvelopeError(f"{text!r} is out of range in UTC") from error


def _object(raw: bytes, name: str) -> dict[str, Any]:
    try:
        return read_object(raw)
    except ValueError as error:
        raise EnvelopeError(f"{name}: {error if str(error) == 'not a JSON object' else 'not JSON'}") from error


def _flat_member(name: bytes, value: bytes) -> Any:
    if name == b"output":
        try:
            return read_json(value)
        except ValueError:
            pass
    return _text(value)


def _rank(value: Any) -> int | None:
    if isinstance(value, str):
        if value.strip().lower() in ("", "none", "null"):
            return None
        if re.fullmatch(r"\s*\d{1,9}\s*", value, re.ASCII):
            value = int(value)
    if value is not None and (isinstance(value, bool) or not isinstance(value, int) or abs(value) > _MOST_RANKS):
        raise EnvelopeError(f"reply: rank is not a whole number of at most {_MOST_RANKS}")
    return value


def _output(fields: Mapping[str, Any], status: str) -> dict[str, Any]:
    value = fields.get("output")
    output = dict(value) if isinstance(value, dict) else {} if value in (None, "") else {"value": value}
    if status in FINAL - {APPLIED} and "reason" not in output:
        texts = [*(fields.get(name) for name in _REASONS), *(output.get(name) for name in (*_REASONS, "value"))]
        reason = next((text for text in texts if isinstance(text, str) and text), None)
        if reason is not None:
            output["reason"] = reason
    cleaned: dict[str, Any] = without_nul(output)
    return cleaned


def _time_or_now(value: Any) -> datetime:
    try:
        return read_time(value) if isinstance(value, str) else utc_now()
    except EnvelopeError:
        return utc_now()


def _count(value: Any) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) and 0 < value <= _MOST_RANKS else None


def _name(value: Any) -> str | None:
    return value if isinstance(value, str) and 0 < len(value) <= _LONGEST_NAME else None


def _text(value: bytes) -> str:
    return value.decode(errors="replace")


def _member(fields: Mapping[str, Any], name: str, kind: type) -> Any:
    value = fields.get(name)
    if not isinstance(value, kind):
        raise EnvelopeError(f"{name} is missing or not {'an object' if kind is dict else 'a string'}")
    return value


def _identifier(fields: Mapping[str, Any], name: str) -> str:
    """Return an ID: printable ASCII without spaces, at most 128 characters."""
    value: str = _member(fields, name, str)
    if not _IDENTIFIER.match(value):
        raise EnvelopeError(f"{name} is not an id")
    return value
