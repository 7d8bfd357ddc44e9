"""Open connections, and which to close when there are too many.

Those without a token close first: of the address with the most, the one silent longest. A fully received request is
always answered; otherwise retries would use up the server.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from enum import IntEnum
from itertools import chain, count
from typing import Protocol

from trainmedic_server.http.limits import ConnectionLimits


class Standing(IntEnum):
    """Trust in a connection's client. Lower values are closed first."""

    STRANGER = 0
    CLIENT = 1
    DELIVERER = 2
    """With the role ``webhook``."""


class TableEntry(Protocol):
    address: str
    standing: Standing

    @property
    def in_work(self) -> bool: ...  # from a request's head to the end of its response

    @property
    def has_arrived(self) -> bool:
        """True if a request has been received completely and is being answered."""
        ...

    @property
    def unread_bytes(self) -> int:
        """Memory of unread responses, and of requests received in that time."""
        ...

    def give_way(self) -> None:
        """Close at once. The connection leaves the table before this returns, or soon after."""
        ...


class ConnectionTable:
    """Connections in groups: one for each address without a token, one for each `Standing` with a token.

    Each group is in the order of the last start or end of a request.
    """

    def __init__(self, limits: ConnectionLimits) -> None:
        self._limits = limits
        # Dictionaries keep the order: an active connection is moved to the end. The numbers count events, to compare
        # groups of several addresses.
        self._strangers: dict[str, dict[TableEntry, int]] = {}
        self._known: dict[Standing, dict[TableEntry, int]] = {Standing.CLIENT: {}, Standing.DELIVERER: {}}
        self._numbers = count()
        self._unread: dict[TableEntry, None] = {}  # longest unread first
        self._count = 0
        self.closed = 0  # since the listener last logged it

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[TableEntry]:
        return chain(*self._strangers.values(), *self._known.values())

    def add(self, connection: TableEntry) -> None:
        """Add a connection. At a limit, close another one; at the limit of its address the new one, if all others there
        await an answer.
        """
        of_client = self._strangers.get(connection.address, {})
        if len(of_client) >= self._limits.per_client:
            victim = next(_awaiting_no_answer(of_client), connection)
            self._close(victim)
            if victim is connection:
                return
        elif self._count >= self._limits.connections:
            candidate = self._least_trusted()
            if candidate is not None:
                self._close(candidate)
        self._strangers.setdefault(connection.address, {})[connection] = next(self._numbers)
        self._count += 1

    def discard(self, connection: TableEntry) -> None:
        group = self._group(connection)
        if connection in group:
            del group[connection]
            self._count -= 1
        if not group and connection.standing is Standing.STRANGER:
            self._strangers.pop(connection.address, None)
        self._unread.pop(connection, None)

    def note_activity(self, connection: TableEntry) -> None:
        group = self._group(connection)
        if connection in group:
            del group[connection]
            group[connection] = next(self._numbers)

    def vouch(self, connection: TableEntry, standing: Standing) -> None:
        """Record that the client presented a token. The standing never falls."""
        if standing <= connection.standing:
            return
        is_here = connection in self._group(connection)
        was_unread = connection in self._unread
        self.discard(connection)
        connection.standing = standing
        if is_here:
            self._group(connection)[connection] = next(self._numbers)
            self._count += 1
        if was_unread:
            self._unread[connection] = None

    @property
    def is_crowded(self) -> bool:  # new requests get 503
        return self._count > self._limits.connections

    @property
    def is_overfull(self) -> bool:
        """True if a new connection cannot even be answered."""
        return self._count > self._limits.connections + self._limits.refused

    def note_unread(self, connection: TableEntry) -> None:
        """Record that the client does not read its response. Close connections if unread responses need too much."""
        self._unread[connection] = None
        held = sum(entry.unread_bytes for entry in self._unread)
        while held > self._limits.unread_bytes and self._unread:
            # The lowest standing, and of these the one unread longest.
            victim = min(self._unread, key=lambda entry: entry.standing)
            held -= victim.unread_bytes
            self._close(victim)

    def note_read(self, connection: TableEntry) -> None:
        self._unread.pop(connection, None)

    def _least_trusted(self) -> TableEntry | None:
        """Return the connection to close for a new one. None if all await answers or, with a token, are in work."""
        for group in sorted(self._strangers.values(), key=_size_and_age, reverse=True):
            for entry in _awaiting_no_answer(group):
                return entry
        idle = (entry for group in self._known.values() for entry in group if not entry.in_work)
        return next(idle, None)

    def _close(self, connection: TableEntry) -> None:
        self.discard(connection)
        self.closed += 1
        connection.give_way()

    def _group(self, connection: TableEntry) -> dict[TableEntry, int]:
        if connection.standing is Standing.STRANGER:
            return self._strangers.get(connection.address, {})
        return self._known[connection.standing]


def _awaiting_no_answer(group: Iterable[TableEntry]) -> Iterator[TableEntry]:
    return (entry for entry in group if not entry.has_arrived)


def _size_and_age(group: dict[TableEntry, int]) -> tuple[int, int]:  # larger for more, and longer silent ones
    return len(group), -next(iter(group.values()))
