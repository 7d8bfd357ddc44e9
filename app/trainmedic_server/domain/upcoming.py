"""The next actions of a run. Times are aware UTC."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any

from msgspec import Struct, field


class HeldBy(Struct, frozen=True):
    """The run that another one waits for."""

    run_id: str
    playbook: str
    target: str
    alert_name: str
    since: datetime
    doing: str
    until: datetime | None = None
    """Latest end of that activity, if limited. More steps may follow."""
    at_deadline: str | None = None
    """What happens then, for people."""
    held_by: HeldBy | None = None
    is_certain: bool = True  # False if it may hold another GPU than the one waited for


def clock(at: datetime) -> str:
    return f"{at.astimezone(UTC):%Y-%m-%dT%H:%M:%SZ}"


UNTIL = "until "  # prefix of Upcoming.waits_for for a condition or a time

TRIED_AGAIN = "tried again"  # Upcoming.outcome after a run's end (guards.again)


def waiting(waits_for: str) -> str:
    return f"waits {'' if waits_for.startswith(UNTIL) else 'for '}{waits_for}"


class Upcoming(Struct, frozen=True):
    """Fields up to ``at_deadline`` describe the present step, the others the next."""

    now: str | None = None
    waits_for: str | None = None
    holder: str | None = None  # ID of the run that it waits for
    held_by: HeldBy | None = None
    waiting_since: datetime | None = None
    not_before: datetime | None = None  # earliest time at which it continues by itself
    deadline: datetime | None = None  # end of the present activity; None for never
    at_deadline: str | None = None  # what happens then, for people
    step: str | None = None  # the next one, as all below
    """None if the run ends next (``outcome``)."""
    kind: str | None = None
    action: str | None = None
    params: Mapping[str, Any] = field(default_factory=dict)
    question: str | None = None
    note: str | None = None
    outcome: str | None = None
    """How the run ends if no step is left: ``succeeded``, ``failed``, or ``cancelled`` (by a person, waiting only for
    work in progress). `TRIED_AGAIN` after its end.
    """
