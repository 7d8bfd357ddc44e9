"""The rules by which a receiver of commands does each of them at most once, and answers each.

`admit` says what is done with a command that has come, by the record that the receiver keeps of it; `effect_of` says
whether an undo finds something to take back. Neither knows a clock, Redis or a disk: the caller hands these in.

Who calls it: a training job (``trainmedic.job.queue``), which keeps its records in Redis (``command_memory``), and
the node agent, which keeps them in SQLite.
"""

from __future__ import annotations

import enum
import json
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, Callable, Mapping

from trainmedic.wire import envelope
from trainmedic.wire.reading import read_object

MOST_WAITING = 1000
"""How many commands wait in one receiver at most."""
LARGEST_RECORD = 1024 * 1024
"""Bytes of a record in Redis. A larger one is kept without its outputs."""

RankOutcome = tuple[str, Mapping[str, Any]]
"""Status and output of one rank."""


@dataclass(frozen=True)
class CommandRecord:
    """What a receiver remembers of a command."""

    status: str
    """The status of its reply; ``accepted`` while it is not answered."""
    output: Mapping[str, Any] = field(default_factory=dict)
    ranks: Mapping[int, RankOutcome] = field(default_factory=dict)
    """The outcomes of ranks that differ from ``status`` and ``output``."""
    at: datetime = field(default_factory=lambda: envelope.utc_now(), compare=False)
    """When it was accepted or ended. What is kept in Redis does not say it: there it is when the record was read."""
    is_ours: bool = True
    """Whether this process entered it, or has taken over what an earlier one entered."""
    is_cut: bool = False
    """Whether outputs were left out."""
    is_forged: bool = False
    """Whether somebody without the signing key wrote it: what became of the command is not known."""

    @property
    def is_final(self) -> bool:
        return self.status in envelope.FINAL

    def of_rank(self, rank: int) -> RankOutcome:
        return self.ranks.get(rank, (self.status, self.output))

    def cut(self) -> CommandRecord:
        """The same without outputs."""
        ranks: dict[int, RankOutcome] = {
            rank: (status, {}) for rank, (status, _) in self.ranks.items() if status != self.status
        }
        return CommandRecord(self.status, {}, ranks, is_cut=True)

    def encode(self, owner: str) -> bytes:
        """The record as it stands in Redis, entered by the process with the instance id `owner`."""
        fields: dict[str, Any] = {"by": owner, "status": self.status, "output": dict(self.output)}
        if self.ranks:
            fields["ranks"] = {str(rank): [status, dict(output)] for rank, (status, output) in self.ranks.items()}
        raw = json.dumps(fields).encode()
        return raw if len(raw) <= LARGEST_RECORD or self.is_cut else self.cut().encode(owner)

    @classmethod
    def decode(cls, raw: bytes, owner: str) -> CommandRecord:
        """The record that `raw` holds, for the process `owner`.

        A record that cannot be read counts as another process's, so that the command is not applied twice.
        """
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
    """The record of a command that has ended for a reason that is told."""
    return CommandRecord(status, {"reason": reason})


REVOKED = ended(envelope.REJECTED, "it was taken back before it was applied")
"""The record that keeps a command from being carried out: its undo came first."""


class Do(enum.Enum):
    """What is done with a command that has come."""

    CARRY_OUT = enum.auto()
    """It is entered; let it wait for its turn."""
    ANSWER = enum.auto()
    """Send its outcome: the recorded one, or why it is not carried out now. In that case it may come again."""
    CLOSE = enum.auto()
    """Record its outcome without carrying it out, and send it."""
    WAIT = enum.auto()
    """This process has it. The repeat gives it more time, and the outcome is sent when there is one."""
    TAKE_OVER = enum.auto()
    """An earlier process had it and did not answer."""
    DROP = enum.auto()
    """Give no answer, because the record is forged: without one the outcome is unknown to the server, as it is here."""


@dataclass(frozen=True)
class CommandDecision:
    """What is done with a command; for ``ANSWER`` and ``CLOSE`` with its outcome."""

    what: Do
    outcome: CommandRecord | None = None


def turn_away(status: str, reason: str) -> CommandDecision:
    """Answer a command without a record of it, so that it may come again."""
    return CommandDecision(Do.ANSWER, ended(status, reason))


def admit(
    command: envelope.Command,
    record: CommandRecord | None,
    now: datetime,
    refusal: Callable[[], CommandDecision | None],
    claim: Callable[[], CommandRecord | None],
) -> CommandDecision:
    """Decide about a genuine command that has come, by its record if it has one; enter it if it is to be carried out.

    ``refusal`` is asked where the command is new and in time; it returns why it is not carried out, if so. ``claim``
    enters the command durably, or returns the record that it has got by then. So no command is begun that a later
    process would not know.
    """
    if record is None:
        if now >= command.expires_at:
            return turn_away(envelope.EXPIRED, "it came after it had expired")
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
    """What an undo finds of the command that it takes back."""

    POSSIBLE = enum.auto()
    """It had an effect, or may have."""
    NONE = enum.auto()
    """It had none."""
    OPEN = enum.auto()
    """It has not ended."""
    UNKNOWN = enum.auto()
    """It may have been forgotten, or nobody knows how it ended."""


def effect_of(record: CommandRecord | None, is_covered: Callable[[], bool], of_failed: CommandEffect) -> CommandEffect:
    """Return what a command may have left to take back, by its record.

    ``is_covered`` is asked where there is no record: whether the command would have one, had it ever come.
    ``of_failed`` is what a command that ended ``failed`` leaves.
    """
    if record is None:
        return CommandEffect.NONE if is_covered() else CommandEffect.UNKNOWN
    if not record.is_final:
        return CommandEffect.OPEN
    return {envelope.APPLIED: CommandEffect.POSSIBLE, envelope.FAILED: of_failed}.get(record.status, CommandEffect.NONE)
