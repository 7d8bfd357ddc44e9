"""Changes that are not reverted, as API models."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from datetime import datetime
from typing import Any

from pydantic import Field

from trainmedic_server.api.view import View
from trainmedic_server.domain.changes import Change
from trainmedic_server.domain.modes import UndoTrigger


class ChangeView(View):
    run_id: str
    playbook: str
    target: str
    targets: tuple[str, ...] = Field((), description="What it changed, if that is not the run's target.")
    step: str
    action: str
    params: dict[str, Any]
    before: str | None = Field(description="The earlier value, as the action reported it; null if unknown.")
    after: str | None = Field(description="The value that it set.")
    is_certain: bool = Field(description="False if it is unknown whether the action was carried out.")
    unchanged_because: str | None = Field(
        description="Why the action changed nothing, such as a drain by another; null if it changed something."
    )
    since: datetime
    undo: UndoTrigger = Field(description="never: it is not reverted automatically.")
    is_reversible: bool = Field(description="True if an operator can order its undo.")
    given_back: str = Field(description="When it is reverted, for people.")
    not_before: datetime | None = Field(description="Next attempt, after a failed one.")
    latest: datetime | None = Field(description="When the run stops waiting to revert it; null if never.")
    lease_seconds: float | None = Field(description="Lifetime without renewal; null if it does not end by itself.")
    undo_error: str | None = Field(description="Error of the last failed undo.")
    lost_because: str | None = Field(description="Why it is no longer in effect, or not everywhere, before its undo.")


def change_views(listed: Iterable[Change]) -> Iterator[ChangeView]:
    for change in listed:
        lease = change.lease.total_seconds() if change.lease is not None else None
        yield ChangeView.of(change, lease_seconds=lease)
