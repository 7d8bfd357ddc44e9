"""What a receiver answers to an undo where there is nothing to take back, and how it may know that.

A receiver that has forgotten a command finds nothing to take back either, and must not say that there is nothing:
it answers ``failed``, so that the undo stays owed. Job and node agent use the same rule: a command that is not
remembered was never applied if the memory is whole since before the command was issued.

Who calls it: ``trainmedic.job.queue``, the agent's ``command_runner``, and the server, which judges the answers.
"""

from __future__ import annotations

import uuid
from datetime import datetime, timedelta, timezone
from typing import Any, Mapping

NOTHING = "nothing_to_undo"
"""The member of the output that says that nothing was taken back, because nothing was there."""
KNOWN = "known"
"""The member that says how the receiver knows. Without it the server does not believe it."""
NEVER_APPLIED = "never_applied"
"""The receiver remembers all that it was sent since before the command was issued, and has not applied it."""
NOT_IN_FORCE = "not_in_force"
"""The receiver has a record of what is in force, and what the command did is not in it: it has ended, or was taken
back before."""

_RESOLUTION = timedelta(milliseconds=1)  # of the time in an id


def nothing_to_undo(known: str, **more: Any) -> Mapping[str, Any]:
    """The output of an undo that found nothing to take back."""
    return {NOTHING: True, KNOWN: known, **more}


def issued_at(command_id: str) -> datetime | None:
    """When the command of this id was issued, by the server's clock; None where the id does not tell.

    Ids are UUIDv7 (RFC 9562, section 5.7), which begin with Unix milliseconds.
    """
    try:
        value = uuid.UUID(command_id)
        if value.version != 7:
            return None
        return datetime.fromtimestamp((value.int >> 80) / 1000, timezone.utc)
    except (ValueError, OverflowError, OSError):
        return None


def is_covered(command_id: str, remembered_since: datetime | None) -> bool:
    """Whether a memory that is whole since then would know the command, had it ever come.

    The times are of two clocks, and are compared as they are: to be wrong, a receiver would have to apply a command,
    lose its memory and begin anew within the time by which the clocks are apart.
    """
    issued = issued_at(command_id)
    return issued is not None and remembered_since is not None and remembered_since - _RESOLUTION < issued


def unknown_command(who: str, remembered_since: datetime | None) -> str:
    """The reason of the answer ``failed`` to the undo of a command that may have been forgotten."""
    since = f" (it remembers nothing from before {remembered_since:%Y-%m-%d %H:%M:%SZ})" if remembered_since else ""
    return (
        f"{who} does not know the command that is to be taken back, and its memory may have been lost{since}: look "
        "whether the change is still in force, take it back by hand, and close the undo with a note"
    )
