"""What the ranks decide together, as it is written for each other, and how often.

A `Decision` belongs to one look: which commands are up for being carried out there (usually none), and
in how many calls the next look is. A `Verdict` is given after every rank has come to that look: which of
the commands are carried out, by all, and which by none. Both are settled once, and read by all.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any, Collection, Mapping

from trainmedic.job.group import ranks_named
from trainmedic.ranks.shared_store import whole_number
from trainmedic.wire import envelope

APART = 1.0
"""Seconds between two looks, where no number of calls was given."""
AHEAD = 0.2
"""Rank 0 decides this many seconds before its own training thread is expected to ask."""
MOST = 10_000
_KEPT = 4


@dataclass(frozen=True)
class Decision:
    """The decision of look ``number``, made by rank ``by``. ``over`` says why it is the last one."""

    number: int
    by: int
    span: int
    commands: tuple[envelope.Command, ...] = ()
    over: str | None = None

    def fields(self) -> dict[str, Any]:
        found: dict[str, Any] = {"by": self.by, "span": self.span}
        if self.commands:
            found["commands"] = [command.encode().decode("ascii") for command in self.commands]
        if self.over is not None:
            found["over"] = self.over
        return found

    @classmethod
    def read(cls, number: int, fields: Mapping[str, Any]) -> Decision:
        """Raises ValueError."""
        commands = tuple(envelope.Command.decode(raw.encode()) for raw in fields.get("commands", ()))
        over = fields.get("over")
        by, span = whole_number(fields, "by"), whole_number(fields, "span")
        return cls(number, by, max(span, 1), commands, None if over is None else str(over))


@dataclass(frozen=True)
class Verdict:
    """``go``: ids that every rank carries out now, in the order of the decision. ``refused``: status and
    reason of those that none carries out. What is in neither may be called up again."""

    go: tuple[str, ...] = ()
    refused: Mapping[str, tuple[str, str]] = field(default_factory=dict)
    missing: str = ""

    def fields(self) -> dict[str, Any]:
        return {"go": list(self.go), "refused": dict(self.refused), "missing": self.missing}

    @classmethod
    def read(cls, fields: Mapping[str, Any]) -> Verdict:
        """Also of a round that was closed because rank 0 is gone: then nothing is carried out."""
        refused = {name: (str(status), str(reason)) for name, (status, reason) in fields.get("refused", {}).items()}
        return cls(tuple(fields.get("go", ())), refused, str(fields.get("missing") or fields.get("gone") or ""))


def judge(
    decision: Decision, told: Mapping[int, Any], missing: str, expired: Collection[str], lateness: str
) -> Verdict:
    """The verdict over the commands of `decision`, from what each rank has said on coming to it.

    What each says is ``step``, and ``cannot`` with the reason for each command that it would not carry
    out. Where a rank is `missing`, nothing is carried out and nothing refused; where the ranks are not at
    the same step, everything is refused.
    """
    if missing:
        return Verdict(missing=missing)
    steps: dict[str, list[int]] = {}
    for rank in sorted(told):
        steps.setdefault(json.dumps(told[rank].get("step")), []).append(rank)
    apart = "; ".join(f"{ranks_named(ranks)} at step {step}" for step, ranks in list(steps.items())[:4])
    go, refused = [], {}
    for command in decision.commands:
        unable = {rank: said["cannot"][command.id] for rank, said in told.items() if command.id in said["cannot"]}
        if len(steps) > 1:
            refused[command.id] = (envelope.FAILED, f"the ranks are not at the same step, so none applied it: {apart}")
        elif command.id in expired:
            refused[command.id] = (envelope.EXPIRED, lateness)
        elif unable:
            refused[command.id] = (envelope.UNSUPPORTED, _unable(unable, len(told)))
        else:
            go.append(command.id)
    return Verdict(tuple(go), refused)


def _unable(reasons: Mapping[int, str], world_size: int) -> str:
    ranks = sorted(reasons)
    told = f"{ranks_named(ranks)}: {reasons[ranks[0]]}"
    return told if len(ranks) == world_size else f"{told}; so no rank applied it"


class Pace:
    """What the last few spans between two looks took."""

    def __init__(self, every: int | None = None) -> None:
        self._every = every
        self._recent: tuple[float, ...] = ()  # seconds per call; replaced whole, for the other thread
        self._span = 1

    def note(self, span: int, seconds: float) -> None:
        """`span` calls took `seconds`."""
        self._span = span
        self._recent = (*self._recent, max(seconds, 0.0) / span)[-_KEPT:]

    def next_span(self) -> int:
        """In how many calls to look again. Grows by doubling, so that one quick call does not mislead."""
        if self._every is not None:
            return self._every
        if not self._recent:
            return 1
        return max(1, min(int(APART / max(self._recent[-1], 1e-9)), 2 * self._span, MOST))

    def seconds(self, calls: int) -> float:
        """How long so many calls take at least."""
        return min(self._recent, default=0.0) * calls
