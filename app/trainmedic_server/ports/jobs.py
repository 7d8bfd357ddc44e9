"""Connected jobs and launchers, and their notices."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Protocol

from msgspec import Struct

from trainmedic.wire.notice import Notice
from trainmedic_server.ports.outside import Presence


class ArrivedNotice(Struct, frozen=True):
    entry: bytes  # ID in the stream, to discard it.
    notice: Notice


class JobSource(Protocol):
    async def jobs(self) -> list[Presence]:
        """Include untrusted presences. Raises BusUnavailable."""
        ...

    async def launchers(self) -> list[Presence]:
        """Return presences of launchers, each named by its job. Raises BusUnavailable."""
        ...

    def notices(self) -> Sequence[ArrivedNotice]: ...

    def discard_notices(self, entries: Collection[bytes]) -> None: ...


class PresenceSource(JobSource, Protocol):
    async def agents(self) -> list[Presence]: ...
