"""Run IDs in paths: complete, or a unique beginning or end."""

from __future__ import annotations

from typing import Annotated

from fastapi import Path

from trainmedic_server.errors import Conflict
from trainmedic_server.ports.present import Present

RunId = Annotated[
    str,
    Path(
        pattern=r"^[0-9A-Za-z_-]{1,64}$",
        description="The run's ID, or a unique beginning or end of at least 4 characters.",
    ),
]
_WHOLE = 36  # characters of a complete ID
_SHORTEST = 4
_SHOWN = 8  # matches that an error lists


async def whole(present: Present, part: str) -> str:
    """Return the complete ID, `part` itself if it is too short or nothing matches. Raises Conflict, naming several
    matches, and StoreUnavailable.
    """
    if not _SHORTEST <= len(part) < _WHOLE:
        return part
    found = await present.runs_named(part, _SHOWN + 1)
    if part in found or not found:
        return part
    if len(found) > 1:
        more = " and more" if len(found) > _SHOWN else ""
        raise Conflict(f"Several runs begin or end with {part}: {', '.join(found[:_SHOWN])}{more}.")
    return found[0]
