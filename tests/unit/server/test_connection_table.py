"""Which connection gives way."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest

from trainmedic_server.http.connection_table import ConnectionTable, Standing
from trainmedic_server.http.limits import ConnectionLimits


@dataclass(eq=False)
class Entry:
    address: str = "192.0.2.1"
    standing: Standing = Standing.STRANGER
    in_work: bool = False
    has_arrived: bool = False
    unread_bytes: int = 0
    closed: bool = field(default=False, init=False)

    def give_way(self) -> None:
        self.closed = True


def table(connections: int = 4, per_client: int = 4) -> ConnectionTable:
    limits = ConnectionLimits(connections=connections, refused=1, per_client=per_client, unread_bytes=100)
    return ConnectionTable(limits)


def added(entries: ConnectionTable, *connections: Entry) -> list[Entry]:
    for connection in connections:
        entries.add(connection)
    return list(connections)


def test_the_stranger_that_was_silent_longest_gives_way() -> None:
    """A request, begun or ended, makes a connection the last to go."""
    entries = table()
    first, second, *_ = added(entries, *(Entry() for _ in range(4)))
    entries.note_activity(first)
    entries.add(Entry())
    assert (first.closed, second.closed) == (False, True)
    assert len(entries) == 4


def test_the_address_with_most_connections_gives_way() -> None:
    """So that a crowd from one place closes its own connections, not those of others."""
    entries = table()
    (other,) = added(entries, Entry("192.0.2.9"))
    crowd = added(entries, *(Entry() for _ in range(20)))
    assert not other.closed
    assert [entry.closed for entry in crowd] == [True] * 17 + [False] * 3


def test_one_address_has_a_share() -> None:
    """Also while there is room in all."""
    entries = table(connections=100, per_client=2)
    crowd = added(entries, *(Entry() for _ in range(5)))
    assert [entry.closed for entry in crowd] == [True, True, True, False, False]


def test_a_request_that_has_arrived_is_answered_first() -> None:
    """In a crowd that tries again and again, each would else be closed before its answer."""
    entries = table(connections=100, per_client=3)
    answered, slow, answered_too = added(entries, *(Entry(in_work=True) for _ in range(3)))
    answered.has_arrived = answered_too.has_arrived = True
    (newcomer,) = added(entries, Entry())
    assert (answered.closed, slow.closed, newcomer.closed) == (False, True, False)
    newcomer.has_arrived = True
    added(entries, one_too_many := Entry())
    assert (one_too_many.closed, len(entries), entries.closed) == (True, 3, 2)


def test_where_every_stranger_is_owed_an_answer_the_newcomer_is_one_too_many() -> None:
    entries = table()
    crowd = added(entries, *(Entry(f"192.0.2.{number}", in_work=True, has_arrived=True) for number in range(4)))
    added(entries, Entry("192.0.2.9"))
    assert entries.is_crowded
    assert not any(entry.closed for entry in crowd)


def test_who_has_shown_a_token_does_not_give_way_to_strangers() -> None:
    """The connection that delivers alerts stays, however many come and however long it is silent."""
    entries = table()
    alertmanager, viewer, *_ = added(entries, *(Entry() for _ in range(4)))
    entries.vouch(alertmanager, Standing.DELIVERER)
    entries.vouch(alertmanager, Standing.CLIENT)
    entries.vouch(viewer, Standing.CLIENT)
    added(entries, *(Entry(f"192.0.2.{number}") for number in range(50)))
    assert not alertmanager.closed
    assert not viewer.closed
    assert alertmanager.standing is Standing.DELIVERER
    assert len(entries) == 4


def test_an_idle_viewer_gives_way_before_one_that_delivers() -> None:
    """And nobody whose request is being answered does; then the newcomer is the one too many."""
    entries = table()
    deliverer, viewer, busy, busy_too = added(entries, *(Entry() for _ in range(4)))
    busy.in_work = busy_too.in_work = True
    for entry, standing in ((deliverer, Standing.DELIVERER), (viewer, 1), (busy, 1), (busy_too, 2)):
        entries.vouch(entry, Standing(standing))
    for expected, crowded in ((viewer, False), (deliverer, False)):
        (newcomer,) = added(entries, Entry("192.0.2.7", in_work=True))
        assert (expected.closed, entries.is_crowded) == (True, crowded)
        entries.vouch(newcomer, Standing.CLIENT)
    added(entries, Entry("192.0.2.8"))
    assert entries.is_crowded


@pytest.mark.parametrize("standing", list(Standing))
def test_a_connection_that_ends_leaves_nothing(standing: Standing) -> None:
    """Whatever it was, and though it is told twice."""
    entries = table()
    (entry,) = added(entries, Entry())
    entries.vouch(entry, standing)
    entries.note_unread(entry)
    for _ in range(2):
        entries.discard(entry)
    entries.note_activity(entry)
    entries.vouch(entry, Standing.DELIVERER)
    assert (len(entries), list(entries)) == (0, [])


def test_unread_responses_are_bounded_together() -> None:
    """Strangers' go first, the longest unread of them; what was read counts no more."""
    entries = table(connections=10, per_client=10)
    known, first, second, third = added(entries, *(Entry(unread_bytes=40) for _ in range(4)))
    entries.vouch(known, Standing.CLIENT)
    for entry in (known, first):
        entries.note_unread(entry)
    entries.note_unread(second)
    assert (known.closed, first.closed, second.closed) == (False, True, False)
    entries.note_read(second)
    entries.note_unread(third)
    assert not third.closed
