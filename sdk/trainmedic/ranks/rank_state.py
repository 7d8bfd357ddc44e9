"""The values that describe one rank: its position in the training and the status that the others read.

Who uses it: ``synchronizer`` and its two roles, ``coordinator`` and ``participant``.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Any, Mapping

HEARTBEAT_EVERY = 2.0
"""Seconds between two heartbeats of a rank."""
HEARTBEAT_OF_MANY = 5.0
"""The same in a job of more ranks than `MANY_RANKS`, so that the store has time for them."""
MANY_RANKS = 64


class RankLost(Exception):
    """This rank cannot take part any more; the text says why."""


@dataclass(frozen=True)
class TrainingPosition:
    """How far the training thread has come. A new one is made at each sync point."""

    number: int = -1
    """The sync point that it has passed last."""
    calls: int = 0
    """How many calls of `Medic.commands` it had made by then."""
    span: int = 1
    """How many calls after that one the next sync point is."""
    at: float = field(default_factory=time.monotonic)
    """When that was, by the monotonic clock."""


@dataclass(frozen=True)
class RankStatus:
    """What a rank writes for the others with each heartbeat. The fields' names are those of the stored form."""

    heartbeat: int = 0
    """Counts the heartbeats of its process."""
    passed: int = -1
    """The sync point that its training thread has passed last."""
    about: Mapping[str, Any] = field(default_factory=dict)
    """Where the rank runs: its node, host and GPU."""
    stats: Mapping[str, Any] = field(default_factory=dict)
    """Its figures, see `trainmedic.Medic.stats`."""

    def fields(self) -> dict[str, Any]:
        return dict(vars(self))


def outcome_key(sync_key: tuple[int, int]) -> str:
    """The key under which the ranks enter their outcome of the command with that sync key."""
    return f"outcome/{sync_key[0]}/{sync_key[1]}"
