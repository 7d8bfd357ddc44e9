"""What a diagnosis says."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime
from enum import StrEnum
from typing import Any

from msgspec import Struct

from trainmedic_logs.domain.finding import CauseClass


class Confidence(StrEnum):
    """How far a verdict can be relied on."""

    HIGH = "high"
    """What was found leaves no other reading. Only then is a node named."""
    MEDIUM = "medium"
    """The likeliest reading; another one is not ruled out."""
    LOW = "low"
    """A hint."""

    def lowered(self) -> Confidence:
        """One step less sure."""
        return {Confidence.HIGH: Confidence.MEDIUM}.get(self, Confidence.LOW)


class Advice(StrEnum):
    """What to do next."""

    RESTART = "restart"
    ISOLATE_NODE = "isolate_node"
    """Keep new work from the node, and look at it before it gets some."""
    STOP = "stop"
    """Another attempt would end alike."""
    ROLLBACK = "rollback"
    """Go on from a checkpoint before it began."""
    ASK = "ask"
    """A person has to look."""
    NONE = "none"
    """Nothing says that it failed, so there is nothing to do."""


class Evidence(Struct, frozen=True):
    """One thing that was seen, and why it counts."""

    why: str
    """A sentence for people."""
    line: str = ""
    """As it was printed; empty where it is no line, such as a rank's silence."""
    source: str = ""
    """``training``, ``kernel``, …, ``flight recorder``, ``exit``, ``presence``."""
    node: str = ""
    rank: int | None = None
    at: datetime | None = None
    """Aware, UTC, by that node's clock."""
    rule: str = ""

    def plain(self) -> dict[str, Any]:
        """As it stands in JSON."""
        return {
            "line": self.line,
            "source": self.source,
            "node": self.node or None,
            "rank": self.rank,
            "at": None if self.at is None else self.at.isoformat(),
            "rule": self.rule or None,
            "why": self.why,
        }


class Verdict(Struct, frozen=True):
    """Who began a failure, and why, as far as it can be said."""

    cause: CauseClass
    confidence: Confidence
    summary: str
    """One sentence for people."""
    advice: Advice
    ranks: tuple[int, ...] = ()
    """Where it began, ascending; empty where no rank can be named."""
    node: str | None = None
    """The node that is at fault: named only with high confidence, and never by what a job printed itself."""
    gpu: str | None = None
    """The GPU that is at fault, as the kernel or the agent names it."""
    evidence: tuple[Evidence, ...] = ()
    """What the verdict rests on, the strongest first."""
    against: tuple[Evidence, ...] = ()
    """What does not fit it."""
    missing: tuple[str, ...] = ()
    """What would have told more, and was not there."""
    same_before: int = 0
    """How many earlier attempts of the job ended with the same."""
    fingerprint: str = ""
    """The same for the same cause by the same line, of whichever attempt."""
    shares: Mapping[str, float] | None = None
    """Of a slow job: which part of a step is data, compute and wait, 0 to 1."""

    def plain(self) -> dict[str, Any]:
        """As it stands in JSON, in the API and in `--output json`."""
        return {
            "cause": self.cause.value,
            "node": self.node,
            "ranks": list(self.ranks),
            "gpu": self.gpu,
            "confidence": self.confidence.value,
            "summary": self.summary,
            "advice": self.advice.value,
            "evidence": [evidence.plain() for evidence in self.evidence],
            "against": [evidence.plain() for evidence in self.against],
            "missing": list(self.missing),
            "same_before": self.same_before,
            "fingerprint": self.fingerprint,
            "shares": None if self.shares is None else dict(self.shares),
        }
