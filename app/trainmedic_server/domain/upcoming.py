"""What a run does next, as far as it can be told now. Who makes it: ``engine.upcoming``; the API shows it."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime
from typing import Any

from msgspec import Struct, field


class HeldBy(Struct, frozen=True):
    """Run for which another one waits, because both work on the same thing. Times are aware UTC datetimes."""

    run_id: str
    playbook: str
    target: str
    """Key of its target."""
    alert_name: str
    since: datetime
    """Time at which it was admitted."""
    doing: str
    """Its present activity, for a person."""
    until: datetime | None = None
    """Latest end of its present activity. None if it has no time limit. More steps may follow."""
    at_deadline: str | None = None
    """Consequence of reaching that time, for a person."""


class Upcoming(Struct, frozen=True):
    """What a run is at, what it waits for, and what comes then. Times are aware UTC datetimes."""

    now: str | None = None
    """The id of the step that it is at; None where it is at none."""
    waits_for: str | None = None
    """For a person: what must happen before it goes on; None while it works."""
    holder: str | None = None
    """The run that has the target for which it waits."""
    held_by: HeldBy | None = None
    """More about the run that is waited for, and what it does."""
    waiting_since: datetime | None = None
    """Start of the wait for its target. None if it does not wait."""
    not_before: datetime | None = None
    """When it goes on by itself at the earliest, such as for another attempt."""
    deadline: datetime | None = None
    """When what it is at ends by itself; None where it waits for ever."""
    at_deadline: str | None = None
    """For a person: what happens then."""
    step: str | None = None
    """The id of the step that comes next; None where the run then ends, which ``outcome`` says."""
    kind: str | None = None
    """``action``, ``wait_for``, ``approve`` or ``undo``."""
    action: str | None = None
    """The name of that step's action, or of the undo."""
    params: Mapping[str, Any] = field(default_factory=dict)
    """Its parameters, rendered with what is known now."""
    question: str | None = None
    """What it asks, where it is an approval."""
    note: str | None = None
    """Why its condition or its parameters cannot be told yet."""
    outcome: str | None = None
    """How the run ends where no step is left: ``succeeded``, ``failed``, or ``cancelled`` where a person has
    ended it and only what is in work is waited for."""
