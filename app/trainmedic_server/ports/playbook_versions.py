from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from typing import Protocol

from msgspec import Struct


class UsedVersion(Struct, frozen=True):
    """`first_run` and `last_run` are run IDs. They and `last_used_at` are None if no counted run used it."""

    version: str
    first_used_at: datetime
    last_used_at: datetime | None = None
    runs: int = 0
    first_run: str | None = None
    last_run: str | None = None


class PlaybookVersions(Protocol):
    async def used_versions(self, playbook: str, most_runs: int) -> Sequence[UsedVersion]:
        """Return at most 500 versions, newest first. Figures except `first_used_at` count the newest `most_runs` runs,
        without members of groups. Raises StoreUnavailable.
        """
        ...

    async def text_of_version(self, playbook: str, version: str) -> str | None:
        """Return None if not stored. Raises StoreUnavailable."""
        ...
