"""What the verdicts on a job say to playbooks: `job.verdict` in their expressions."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import timedelta
from typing import Any

from msgspec import Struct

THROUGHPUT_DROP = "TrainingThroughputDrop"
SLOW_ALERTS = frozenset({"TrainingStraggler", THROUGHPUT_DROP})
"""The alerts that say of a job that it is slow, and not that it fails; each has lasted five minutes by then."""
CURRENT_FOR = timedelta(hours=1)
"""After the first sign of the failure: later alerts of the job are of something else."""


class JobVerdict(Struct, frozen=True):
    """A verdict on a job, as far as playbooks need it. Without one everything is empty, so that a comparison
    with it is false and never an error."""

    cause: str | None = None
    """The class of the cause, such as ``gpu``; ``unknown`` is one."""
    confidence: str | None = None
    """``high``, ``medium`` or ``low``."""
    advice: str | None = None
    node: str | None = None
    """The node at fault; only with high confidence."""
    ranks: tuple[int, ...] = ()
    """Where it began, ascending."""

    @classmethod
    def of(cls, said: Mapping[str, Any]) -> JobVerdict:
        """From the members of a verdict as it stands in JSON."""
        texts = {name: str(said[name]) if said.get(name) else None for name in ("cause", "confidence", "advice")}
        node = str(said["node"]) if said.get("node") else None
        return cls(**texts, node=node, ranks=tuple(int(rank) for rank in said.get("ranks") or ()))

    def as_data(self) -> dict[str, Any]:
        """As expressions see it."""
        return {
            "cause": self.cause,
            "confidence": self.confidence,
            "advice": self.advice,
            "node": self.node,
            "ranks": list(self.ranks),
        }


class VerdictsOnJob(Struct, frozen=True):
    """The newest verdict on a job's failure, and the newest on its being slow. They are of different things, so neither
    takes the other's place."""

    failure: JobVerdict | None = None
    slowness: JobVerdict | None = None

    def seen_by(self, alertname: str) -> JobVerdict:
        """Return what an alert of the job is about: of one that says that it is slow that alone, of every other the
        failure where there is one."""
        if alertname in SLOW_ALERTS:
            return self.slowness or JobVerdict()
        return self.failure or self.slowness or JobVerdict()
