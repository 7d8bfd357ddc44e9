"""Which connections there are, and which of them gives way when there are too many.

A connection is a stranger's until a request on it has shown a token. When there is no room left, the
strangers give way first, and of these the one that was silent longest, of the address that has most of
them. A new client has therefore room while any stranger keeps the server waiting, and the connection that
delivers alerts is taken by nobody without a token. Where no tokens are set everybody is a stranger; then
silence alone decides.

A request that has arrived whole is answered: were its connection to give way to new ones, a crowd of clients
that try again would take the server's time and none would get an answer.

Not here: what is read and written over a connection (``http_connection``). Who calls it: `HttpConnection`
and ``listener``.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from enum import IntEnum
from itertools import chain, count
from typing import Protocol

from trainmedic_server.http.limits import ConnectionLimits


class Standing(IntEnum):
    """What is known of the client of a connection. The lower gives way to the higher."""

    STRANGER = 0
    CLIENT = 1
    """It has shown a token."""
    DELIVERER = 2
    """Its token has the role ``webhook``."""


class TableEntry(Protocol):
    """What the table asks of a connection."""

    address: str
    standing: Standing

    @property
    def in_work(self) -> bool:
        """Whether a request is being answered."""
        ...

    @property
    def has_arrived(self) -> bool:
        """Whether a request is being answered, and nothing of it is still to come."""
        ...

    @property
    def unread_bytes(self) -> int:
        """The memory of responses that the client has not taken, and of what it has sent meanwhile."""
        ...

    def give_way(self) -> None:
        """Close at once. The connection leaves the table before this returns, or soon after."""
        ...


class ConnectionTable:
    """The open connections, each group in the order in which its members last began or ended a request."""

    def __init__(self, limits: ConnectionLimits) -> None:
        self._limits = limits
        # Dictionaries for their order: what has become active is taken out and put in again at the end. The
        # numbers count what happens, and so compare the groups of several addresses.
        self._strangers: dict[str, dict[TableEntry, int]] = {}
        self._known: dict[Standing, dict[TableEntry, int]] = {Standing.CLIENT: {}, Standing.DELIVERER: {}}
        self._numbers = count()
        self._unread: dict[TableEntry, None] = {}
        self._count = 0
        self.closed = 0
        """How many have had to give way."""

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[TableEntry]:
        return chain(*self._strangers.values(), *self._known.values())

    def add(self, connection: TableEntry) -> None:
        """Add a new connection, and have another one give way where there is no room for it.

        Where all others of its address are owed an answer it gives way itself, and is not added.
        """
        of_client = self._strangers.get(connection.address, {})
        if len(of_client) >= self._limits.per_client:
            loser = next(_waited_for(of_client), connection)
            self._close(loser)
            if loser is connection:
                return
        elif self._count >= self._limits.connections:
            candidate = self._candidate()
            if candidate is not None:
                self._close(candidate)
        self._strangers.setdefault(connection.address, {})[connection] = next(self._numbers)
        self._count += 1

    def discard(self, connection: TableEntry) -> None:
        """Remove a connection, if it is there."""
        group = self._group(connection)
        if connection in group:
            del group[connection]
            self._count -= 1
        if not group and connection.standing is Standing.STRANGER:
            self._strangers.pop(connection.address, None)
        self._unread.pop(connection, None)

    def active(self, connection: TableEntry) -> None:
        """Note that a request has begun or ended."""
        group = self._group(connection)
        if connection in group:
            del group[connection]
            group[connection] = next(self._numbers)

    def vouch(self, connection: TableEntry, standing: Standing) -> None:
        """Note that the client has shown a token; a connection never falls to a lower standing."""
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
    def crowded(self) -> bool:
        """Whether there are more connections than are served: nobody could give way."""
        return self._count > self._limits.connections

    @property
    def overfull(self) -> bool:
        """Whether there are so many that a new one cannot even be answered."""
        return self._count > self._limits.connections + self._limits.refused

    def unread(self, connection: TableEntry) -> None:
        """Note that a client does not take what is written, and close connections where all of them hold too much."""
        self._unread[connection] = None
        held = sum(entry.unread_bytes for entry in self._unread)
        while held > self._limits.unread_bytes and self._unread:
            # The lowest standing, and of these the one that has been unread longest.
            loser = min(self._unread, key=lambda entry: entry.standing)
            held -= loser.unread_bytes
            self._close(loser)

    def read(self, connection: TableEntry) -> None:
        """Note that the client has taken what was written."""
        self._unread.pop(connection, None)

    def _candidate(self) -> TableEntry | None:
        """The connection that gives way to a new one; None where each is owed an answer.

        A known client's is owed one as soon as its request begins.
        """
        for group in sorted(self._strangers.values(), key=_size_and_age, reverse=True):
            for entry in _waited_for(group):
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


def _waited_for(group: Iterable[TableEntry]) -> Iterator[TableEntry]:
    """Those whose clients keep the server waiting, for a request or the rest of one."""
    return (entry for entry in group if not entry.has_arrived)


def _size_and_age(group: dict[TableEntry, int]) -> tuple[int, int]:
    """Orders groups by their size, and those of the same size by how long their first member was silent."""
    return len(group), -next(iter(group.values()))
