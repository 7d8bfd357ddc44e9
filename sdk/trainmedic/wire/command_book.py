"""Rules by which a receiver applies each command at most once and answers it."""

from __future__ import annotations

import enum
import json
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, Callable, Mapping

from trainmedic.wire import envelope
from trainmedic.wire.reading import read_object

MOST_WAITING = 1000  # commands that wait in one receiver
LARGEST_RECORD = 1024 * 1024  # bytes; a larger record loses its outputs

RankOutcome = tuple[str, Mapping[str, Any]]


@dataclass(frozen=True)
class CommandRecord:
    status: str
    output: Mapping[str, Any] = field(default_factory=dict)
    ranks: Mapping[int, RankOutcome] = field(default_factory=dict)
    at: datetime = field(default_factory=lambda: envelope.utc_now(), compare=False)
    """Time of acceptance or end; for a record from Redis, of its reading."""
    is_ours: bool = True  # True if this process entered the command
    is_cut: bool = False  # without outputs
    is_forged: bool = False
    """True for a wrongly signed record: the outcome is unknown."""

    @property
    def is_final(self) -> bool:
        return self.status in envelope.FINAL

    def of_rank(self, rank: int) -> RankOutcome:
        return self.ranks.get(rank, (self.status, self.output))

    def cut(self) -> CommandRecord:
        ranks: dict[int, RankOutcome] = {
            rank: (status, {}) for rank, (status, _) in self.ranks.items() if status != self.status
        }
        return CommandRecord(self.status, {}, ranks, is_cut=True)

    def encode(self, owner: str) -> bytes:
        """Return Redis's value. `owner`: instance ID of the entering process."""
        fields: dict[str, Any] = {"by": owner, "status": self.status, "output": dict(self.output)}
        if self.ranks:
            fields["ranks"] = {str(rank): [status, dict(output)] for rank, (status, output) in self.ranks.items()}
        raw = json.dumps(fields).encode()
        return raw if len(raw) <= LARGEST_RECORD or self.is_cut else self.cut().encode(owner)

    @classmethod
    def decode(cls, raw: bytes, owner: str) -> CommandRecord:
        """Return the record, as seen by the process `owner`. An unreadable one counts as accepted by another."""
        try:
            fields = read_object(raw)
            status, output = fields["status"], fields["output"]
            ranks: dict[int, RankOutcome] = {
                int(rank): (rank_status, dict(rank_output))
                for rank, (rank_status, rank_output) in fields.get("ranks", {}).items()
            }
            statuses = {status, *(rank_status for rank_status, _ in ranks.values())}
            if statuses <= envelope.STATUSES and isinstance(output, dict):
                return cls(status, output, ranks, is_ours=str(fields["by"]) == owner)
        except (ValueError, KeyError, TypeError, AttributeError):
            pass
        return cls(envelope.ACCEPTED, is_ours=False)


def ended(status: str, reason: str) -> CommandRecord:
    return CommandRecord(status, {"reason": reason})


REVOKED = ended(envelope.REJECTED, "its undo came before it was applied")  # Blocks a command whose undo arrived first

_TIME = "%Y-%m-%d %H:%M:%SZ"


class Do(enum.Enum):
    CARRY_OUT = enum.auto()
    ANSWER = enum.auto()
    CLOSE = enum.auto()  # answer, and record the outcome
    WAIT = enum.auto()  # The repeat extends the command's time
    TAKE_OVER = enum.auto()  # an earlier process entered it, and did not answer
    DROP = enum.auto()  # Send no answer: the record is forged


@dataclass(frozen=True)
class CommandDecision:
    what: Do
    outcome: CommandRecord | None = None


def turn_away(status: str, reason: str) -> CommandDecision:
    return CommandDecision(Do.ANSWER, ended(status, reason))


def admit(
    command: envelope.Command,
    record: CommandRecord | None,
    now: datetime,
    refusal: Callable[[], CommandDecision | None],
    claim: Callable[[], CommandRecord | None],
) -> CommandDecision:
    """Decide on a genuine command, and enter it.

    ``refusal`` returns a new command's refusal. ``claim`` enters it durably, or returns an existing record.
    """
    if record is None:
        if now >= command.expires_at:
            reason = (
                f"by this machine's clock it arrived at {now:{_TIME}}, after its expiry at {command.expires_at:{_TIME}}"
            )
            return turn_away(envelope.EXPIRED, reason)
        refused = refusal()
        if refused is not None:
            return refused
        record = claim()
    if record is None:
        return CommandDecision(Do.CARRY_OUT)
    if record.is_forged:
        return CommandDecision(Do.DROP)
    if record.is_final:
        return CommandDecision(Do.ANSWER, record)
    return CommandDecision(Do.WAIT if record.is_ours else Do.TAKE_OVER)


class CommandEffect(enum.Enum):
    POSSIBLE = enum.auto()  # applied, or perhaps in part before it failed
    NONE = enum.auto()
    OPEN = enum.auto()  # the command is not finished
    UNKNOWN = enum.auto()  # records may have been lost


def effect_of(record: CommandRecord | None, is_covered: Callable[[], bool], of_failed: CommandEffect) -> CommandEffect:
    """Return the effect that a command may have left.

    ``is_covered`` returns whether the receiver would have a record. ``of_failed`` is the effect after ``failed``.
    """
    if record is None:
        return CommandEffect.NONE if is_covered() else CommandEffect.UNKNOWN
    if not record.is_final:
        return CommandEffect.OPEN
    return {envelope.APPLIED: CommandEffect.POSSIBLE, envelope.FAILED: of_failed}.get(record.status, CommandEffect.NONE)
