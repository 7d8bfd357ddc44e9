"""How the API shows what a run does next. Who uses it: ``history`` and ``now``."""

from __future__ import annotations

from datetime import datetime
from typing import Any

from pydantic import Field

from trainmedic_server.api.view import View


class HeldByView(View):
    """Run for which another one waits, because both work on the same thing."""

    run_id: str
    playbook: str
    target: str
    alert_name: str
    since: datetime = Field(description="When it began.")
    doing: str = Field(description="What it does now, for a person.")
    until: datetime | None = Field(
        description="Latest end of its present activity; null if it has no time limit. "
        "It may go on with more steps then."
    )
    at_deadline: str | None = Field(description="What happens then, for a person.")


class NextView(View):
    """What a run does next, as far as it can be told now."""

    now: str | None = Field(description="The step that it is at; null where it is at none.")
    waits_for: str | None = Field(description="What must happen before it goes on, for a person; null while it works.")
    holder: str | None = Field(description="The run that has the target for which it waits.")
    held_by: HeldByView | None = Field(None, description="More of that run: which it is, and what it does.")
    waiting_since: datetime | None = Field(None, description="Since when it waits for its target.")
    not_before: datetime | None = Field(description="When it goes on by itself at the earliest.")
    deadline: datetime | None = Field(description="When what it is at ends by itself; null where it waits for ever.")
    at_deadline: str | None = Field(description="What happens then, for a person.")
    step: str | None = Field(description="The step that comes next; null where the run then ends.")
    kind: str | None = Field(description="action, wait_for, approve or undo.")
    action: str | None = Field(description="The action of that step, or of the undo.")
    params: dict[str, Any] = Field(description="Its parameters, rendered with what is known now.")
    question: str | None = Field(description="What it asks, where it is an approval.")
    note: str | None = Field(description="Why its condition or its parameters cannot be told yet.")
    outcome: str | None = Field(description="How the run ends where no step is left: succeeded, failed, or cancelled.")
