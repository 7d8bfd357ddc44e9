"""Position and status of one rank."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Any, Mapping

HEARTBEAT_EVERY = 2.0  # seconds
HEARTBEAT_OF_MANY = 5.0  # seconds, for more than `MANY_RANKS` ranks
MANY_RANKS = 64


class RankLost(Exception):
    """This rank can no longer take part, for the given reason."""


@dataclass(frozen=True)
class TrainingPosition:
    number: int = -1  # last sync point that the training thread passed
    calls: int = 0  # made until then
    span: int = 1  # calls from there to the next sync point
    at: float = field(default_factory=time.monotonic)


@dataclass(frozen=True)
class RankStatus:
    heartbeat: int = 0  # increasing number
    passed: int = -1  # last sync point
    about: Mapping[str, Any] = field(default_factory=dict)  # its location
    stats: Mapping[str, Any] = field(default_factory=dict)

    def fields(self) -> dict[str, Any]:
        return dict(vars(self))


def outcome_key(sync_key: tuple[int, int]) -> str:
    return f"outcome/{sync_key[0]}/{sync_key[1]}"
