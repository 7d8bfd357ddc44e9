"""Verdicts on a job for playbook expressions: ``job.verdict``."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import timedelta
from typing import Any

from msgspec import Struct
from msgspec.structs import asdict

THROUGHPUT_DROP = "TrainingThroughputDrop"
SLOW_ALERTS = frozenset({"TrainingStraggler", THROUGHPUT_DROP})  # alerts about slow jobs
CURRENT_FOR = timedelta(hours=1)  # age beyond which expressions see no verdict


class JobVerdict(Struct, frozen=True):
    """Without a verdict, members are empty, so that comparisons are false instead of errors."""

    cause: str | None = None
    confidence: str | None = None
    advice: str | None = None
    node: str | None = None  # only with high confidence
    ranks: tuple[int, ...] = ()

    @classmethod
    def of(cls, said: Mapping[str, Any]) -> JobVerdict:
        texts = {name: str(said[name]) if said.get(name) else None for name in ("cause", "confidence", "advice")}
        node = str(said["node"]) if said.get("node") else None
        return cls(**texts, node=node, ranks=tuple(int(rank) for rank in said.get("ranks") or ()))

    def as_data(self) -> dict[str, Any]:
        return {**asdict(self), "ranks": list(self.ranks)}


class VerdictsOnJob(Struct, frozen=True):
    failure: JobVerdict | None = None
    slowness: JobVerdict | None = None

    def seen_by(self, alertname: str) -> JobVerdict:
        """Return the slowness for slow-job alerts, otherwise preferably the failure."""
        if alertname in SLOW_ALERTS:
            return self.slowness or JobVerdict()
        return self.failure or self.slowness or JobVerdict()
