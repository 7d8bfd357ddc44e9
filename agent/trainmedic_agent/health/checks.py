"""Results of health checks. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from datetime import datetime
from enum import StrEnum
from typing import Any

from msgspec import Struct, field
from msgspec.structs import asdict

from trainmedic.wire import envelope


class Level(StrEnum):
    """`BURN` contains `QUICK`."""

    QUICK = "quick"
    BURN = "burn"


class HealthVerdict(StrEnum):
    OK = "ok"
    DEGRADED = "degraded"
    """It works, but worse than its maximum or its own record."""
    FAILED = "failed"
    UNKNOWN = "unknown"  # It could not be read


_WORST_FIRST = (HealthVerdict.FAILED, HealthVerdict.UNKNOWN, HealthVerdict.DEGRADED, HealthVerdict.OK)


def worst(verdicts: Iterable[HealthVerdict]) -> HealthVerdict:
    """Return the worst one, `HealthVerdict.UNKNOWN` without any."""
    return min(verdicts, key=_WORST_FIRST.index, default=HealthVerdict.UNKNOWN)


class HealthCheck(Struct, frozen=True):
    """- ``part``: GPU's UUID, interface, port, disk or mount point. Empty for the node
    - ``observed``, ``expected``: texts for people
    """

    name: str
    part: str
    verdict: HealthVerdict
    observed: str
    expected: str

    def __str__(self) -> str:
        return f"{self.part}: {self.text}" if self.part else self.text

    @property
    def text(self) -> str:
        return f"{self.name}: {self.observed}; expected: {self.expected}"


def is_usable(checks: Iterable[HealthCheck]) -> bool:
    return all(check.verdict in (HealthVerdict.OK, HealthVerdict.DEGRADED) for check in checks)


def checked(name: str, part: str, is_ok: bool, observed: object, expected: object) -> HealthCheck:
    return HealthCheck(name, part, HealthVerdict.OK if is_ok else HealthVerdict.FAILED, str(observed), str(expected))


def at_maximum(name: str, part: str, present: float, maximum: float, prefix: str) -> HealthCheck:
    verdict = HealthVerdict.OK if present >= maximum else HealthVerdict.DEGRADED
    return HealthCheck(name, part, verdict, f"{prefix}{present:g}", f"{prefix}{maximum:g}")


def unread(name: str, part: str, reason: object) -> HealthCheck:
    return HealthCheck(name, part, HealthVerdict.UNKNOWN, f"not readable: {reason}", "a reading")


class ValueKind(StrEnum):
    COUNTER = "counter"
    """Errors in all: their growth in an hour is compared."""
    STATE = "state"
    """Fixed by configuration, such as a link's rate: less is degraded, 0 is failed."""
    SPEED = "speed"  # Measured: 20 % less is degraded, unless it varies as much


class HealthValue(Struct, frozen=True):
    name: str
    part: str
    kind: ValueKind
    amount: float
    unit: str = ""

    @property
    def key(self) -> str:
        return f"{self.name} {self.part}".rstrip()


class CheckResults(Struct):
    checks: list[HealthCheck] = field(default_factory=list)
    values: list[HealthValue] = field(default_factory=list)

    def add(self, other: CheckResults) -> None:
        self.checks += other.checks
        self.values += other.values


class HealthReport(Struct, frozen=True):
    """- ``at``: end of the checks
    - ``learning``: values without enough earlier ones to compare
    """

    level: Level
    at: datetime
    checks: tuple[HealthCheck, ...]
    learning: tuple[str, ...] = ()

    @property
    def verdict(self) -> HealthVerdict:
        return worst(check.verdict for check in self.checks)

    @property
    def faults(self) -> list[str]:
        """Sentences for what is not ok, the worst first."""
        bad = [check for check in self.checks if check.verdict is not HealthVerdict.OK]
        return [str(check) for check in sorted(bad, key=lambda check: _WORST_FIRST.index(check.verdict))]

    def as_output(self) -> Mapping[str, Any]:
        return {
            "level": str(self.level),
            "verdict": str(self.verdict),
            "at": envelope.write_time(self.at),
            "faults": self.faults,
            "learning": list(self.learning),
            "checks": [{**asdict(check), "verdict": str(check.verdict)} for check in self.checks],
        }
