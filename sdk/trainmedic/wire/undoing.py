"""Answers to an undo that has nothing to revert, and their proof: a memory complete since before the command."""

from __future__ import annotations

import uuid
from datetime import datetime, timedelta, timezone
from typing import Any, Mapping

NOTHING = "nothing_to_undo"
KNOWN = "known"  # member of the output with a proof that the server requires
NEVER_APPLIED = "never_applied"  # everything is remembered since before the command
NOT_IN_FORCE = "not_in_force"  # the receiver records active changes, and this one ended

_RESOLUTION = timedelta(milliseconds=1)  # of the time in an ID


def nothing_to_undo(known: str, **more: Any) -> Mapping[str, Any]:
    return {NOTHING: True, KNOWN: known, **more}


def issued_at(command_id: str) -> datetime | None:
    """Return when the command was issued, by the server's clock, or None if the ID is no UUIDv7."""
    try:
        value = uuid.UUID(command_id)
        if value.version != 7:
            return None
        return datetime.fromtimestamp((value.int >> 80) / 1000, timezone.utc)
    except (ValueError, OverflowError, OSError):
        return None


def is_covered(command_id: str, remembered_since: datetime | None) -> bool:
    """Return whether a memory complete since `remembered_since` would know this command.

    Wrong only if a receiver applies it, loses its memory and restarts, all within the difference of the clocks.
    """
    issued = issued_at(command_id)
    return issued is not None and remembered_since is not None and remembered_since - _RESOLUTION < issued


def unknown_command(who: str, remembered_since: datetime | None) -> str:
    since = f" (it remembers nothing from before {remembered_since:%Y-%m-%d %H:%M:%SZ})" if remembered_since else ""
    return (
        f"{who} does not know the command that is to be taken back, and its memory may have been lost{since}: look "
        "whether the change is still in force, take it back by hand, and close the undo with a note"
    )
