"""Stored form of decisions and outcomes, and sync intervals."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any, Collection, Mapping

from trainmedic.job.group import ranks_named
from trainmedic.ranks.shared_store import whole_number
from trainmedic.wire import envelope

_TARGET_SECONDS = 1.0  # between sync points, unless calls were given
_MOST_CALLS = 10_000  # between sync points
_RECENT = 4  # sync points


@dataclass(frozen=True)
class SyncDecision:
    number: int
    by: int  # rank that wrote it
    span: int  # calls until the next sync point
    commands: tuple[envelope.Command, ...] = ()
    over: str | None = None  # why no further decisions follow

    def fields(self) -> dict[str, Any]:
        fields: dict[str, Any] = {"by": self.by, "span": self.span}
        if self.commands:
            fields["commands"] = [command.encode().decode("ascii") for command in self.commands]
        if self.over is not None:
            fields["over"] = self.over
        return fields

    @classmethod
    def read(cls, number: int, fields: Mapping[str, Any]) -> SyncDecision:
        """Parse `fields`' output. Raises ValueError."""
        commands = tuple(envelope.Command.decode(raw.encode()) for raw in fields.get("commands", ()))
        over = fields.get("over")
        by, span = whole_number(fields, "by"), whole_number(fields, "span")
        return cls(number, by, max(span, 1), commands, None if over is None else str(over))


@dataclass(frozen=True)
class AgreedOutcome:
    go: tuple[str, ...] = ()  # IDs of the commands to carry out
    refused: Mapping[str, tuple[str, str]] = field(default_factory=dict)  # status and reason by ID
    missing: str = ""  # ranks that did not take part, as text; then no command is decided

    def fields(self) -> dict[str, Any]:
        return {"go": list(self.go), "refused": dict(self.refused), "missing": self.missing}

    @classmethod
    def read(cls, fields: Mapping[str, Any]) -> AgreedOutcome:
        """Parse the stored form. A round closed because rank 0 is gone runs no command."""
        refused = {name: (str(status), str(reason)) for name, (status, reason) in fields.get("refused", {}).items()}
        return cls(tuple(fields.get("go", ())), refused, str(fields.get("missing") or fields.get("gone") or ""))


def agree(
    decision: SyncDecision, statements: Mapping[int, Any], missing: str, expired: Collection[str], lateness: str
) -> AgreedOutcome:
    """Return the outcome of ``decision``'s commands.

    If a rank is ``missing``, nothing happens; if the stated steps differ, all commands are refused. ``lateness``:
    reason for ``expired`` ones.
    """
    if missing:
        return AgreedOutcome(missing=missing)
    steps: dict[str, list[int]] = {}
    for rank in sorted(statements):
        steps.setdefault(json.dumps(statements[rank].get("step")), []).append(rank)
    positions = "; ".join(f"{ranks_named(ranks)} at step {step}" for step, ranks in list(steps.items())[:4])
    go, refused = [], {}
    for command in decision.commands:
        unable = {
            rank: statement["cannot"][command.id]
            for rank, statement in statements.items()
            if command.id in statement["cannot"]
        }
        if len(steps) > 1:
            refused[command.id] = (
                envelope.FAILED,
                f"the ranks are not at the same step, so none applied it: {positions}",
            )
        elif command.id in expired:
            refused[command.id] = (envelope.EXPIRED, lateness)
        elif unable:
            refused[command.id] = (envelope.UNSUPPORTED, _why_unable(unable, len(statements)))
        else:
            go.append(command.id)
    return AgreedOutcome(tuple(go), refused)


def _why_unable(reasons: Mapping[int, str], world_size: int) -> str:
    ranks = sorted(reasons)
    reason = f"{ranks_named(ranks)}: {reasons[ranks[0]]}"
    return reason if len(ranks) == world_size else f"{reason}; so no rank applied it"


class SyncInterval:
    def __init__(self, every: int | None = None) -> None:
        self._every = every
        self._recent: tuple[float, ...] = ()  # seconds per call; replaced as a whole for the other thread
        self._span = 1

    def record(self, span: int, seconds: float) -> None:
        self._span = span
        self._recent = (*self._recent, max(seconds, 0.0) / span)[-_RECENT:]

    def next_span(self) -> int:
        """Return the calls until the next sync point, at most twice as many as before."""
        if self._every is not None:
            return self._every
        if not self._recent:
            return 1
        return max(1, min(int(_TARGET_SECONDS / max(self._recent[-1], 1e-9)), 2 * self._span, _MOST_CALLS))

    def seconds(self, calls: int) -> float:
        return min(self._recent, default=0.0) * calls  # by the fastest recent ones; 0 while unknown
