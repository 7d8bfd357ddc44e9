"""What is heard of jobs: their presences, and what they say without being asked."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Protocol

from msgspec import Struct

from trainmedic.wire.notice import Notice
from trainmedic_server.ports.outside import Presence


class ArrivedNotice(Struct, frozen=True):
    """A genuine notice, and by which name its source knows it."""

    entry: bytes
    notice: Notice


class JobSource(Protocol):
    """Where what is heard of jobs comes from."""

    async def jobs(self) -> list[Presence]:
        """Return everybody who says that he is a job. Raises BusUnavailable."""
        ...

    async def launchers(self) -> list[Presence]:
        """Return everybody who says that he launches a job, by the job's name. Raises BusUnavailable."""
        ...

    def notices(self) -> Sequence[ArrivedNotice]:
        """Return the notices that have come and were not discarded, oldest first."""
        ...

    def discard_notices(self, entries: Collection[bytes]) -> None:
        """Forget notices, because what they say is durable."""
        ...
