"""The texts that a playbook has had, and the runs that went by each."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from typing import Protocol

from msgspec import Struct


class UsedVersion(Struct, frozen=True):
    """One version of a playbook by which the server has decided."""

    version: str
    """Hash of its text."""
    first_used_at: datetime
    last_used_at: datetime | None = None
    """When its newest run was created; None where none is counted."""
    runs: int = 0
    """Its runs and decisions not to start one, among those that were counted."""
    first_run: str | None = None
    last_run: str | None = None


class PlaybookVersions(Protocol):
    """Reads the versions that are kept, and never waits for a writer."""

    async def used_versions(self, playbook: str, most_runs: int) -> Sequence[UsedVersion]:
        """Return the versions of a playbook, the newest first, with what is known from its newest `most_runs` runs.
        Raises StoreUnavailable."""
        ...

    async def text_of_version(self, playbook: str, version: str) -> str | None:
        """Return the text of a version; None where it is not kept. Raises StoreUnavailable."""
        ...
