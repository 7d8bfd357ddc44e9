"""Kinds of history events about waits (`event_kinds`)."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from typing import Literal

from msgspec import UNSET, UnsetType

from trainmedic_server.domain.event_kinds import OfRun


class WaitingForTurn(OfRun, frozen=True):
    """`max_concurrent` is reached, and `queue` lets the run wait."""

    why: str


class WaitStarted(OfRun, frozen=True):
    """The step waits for the alert (`resolved`), a time, a query or an action."""

    step: str
    wait_for: str
    deadline: datetime | None


class WaitChanged(OfRun, frozen=True):
    """The query or action holds now, or does not; `why` after an error."""

    step: str
    holds: bool
    value: float | None
    why: str | None


class WaitEnded(OfRun, frozen=True):
    """The wait ended: `resolved`, `held` (query or action), `over` (time), `moot` (the alert resolved), or
    `timed_out`."""

    step: str
    outcome: Literal["resolved", "held", "over", "moot", "timed_out"]
    because: str | UnsetType | None = UNSET


class TargetsChanged(OfRun, frozen=True):
    """The run's further targets changed to `also`."""

    also: Sequence[str]
