from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime
from enum import StrEnum
from typing import Any

from msgspec import Struct

from trainmedic_logs.domain.finding import CauseClass


class Confidence(StrEnum):
    HIGH = "high"
    """The only confidence that names a node."""
    MEDIUM = "medium"
    LOW = "low"

    def lowered(self) -> Confidence:
        return Confidence.MEDIUM if self is Confidence.HIGH else Confidence.LOW


class Advice(StrEnum):  # `advice.MEANS` explains each
    RESTART = "restart"
    ISOLATE_NODE = "isolate_node"
    STOP = "stop"
    ROLLBACK = "rollback"
    ASK = "ask"
    NONE = "none"
    """No failure is known."""


class Evidence(Struct, frozen=True):
    why: str
    line: str = ""
    source: str = ""
    """``training``, ``kernel``, …, ``flight recorder``, ``exit``, ``presence``."""
    node: str = ""
    rank: int | None = None
    at: datetime | None = None
    """UTC, by the node's clock."""
    rule: str = ""

    def plain(self) -> dict[str, Any]:
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
    cause: CauseClass
    confidence: Confidence
    summary: str
    advice: Advice
    ranks: tuple[int, ...] = ()
    """Origin, ascending; empty if unknown."""
    node: str | None = None
    """Node at fault, if trusted evidence names it."""
    gpu: str | None = None
    evidence: tuple[Evidence, ...] = ()
    against: tuple[Evidence, ...] = ()
    missing: tuple[str, ...] = ()
    """Evidence that was not available, in words."""
    same_before: int = 0
    """Earlier attempts with the same fingerprint."""
    fingerprint: str = ""
    """Equal for the same cause and line."""
    shares: Mapping[str, float] | None = None
    """Shares of ``data``, ``compute`` and ``wait`` in a step, 0 to 1."""

    def plain(self) -> dict[str, Any]:
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
