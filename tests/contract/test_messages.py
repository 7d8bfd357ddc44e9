"""`ports.messages`: what every run store promises of messages to people."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import pytest
import sqlalchemy as sa
from msgspec.structs import replace

from trainmedic_server.adapters.sql_store.messages import messages
from trainmedic_server.adapters.sql_store.store import SqlStore
from trainmedic_server.domain.message import Message, MessageKind, Severity

NOW = datetime(2026, 3, 1, 10, tzinfo=UTC)


def made(number: int, channel: str = "oncall", kind: MessageKind = MessageKind.RUN_FAILED) -> Message:
    """A message that came to be so many seconds after `NOW`."""
    at = NOW + timedelta(seconds=number)
    return Message(
        f"{number}/{channel}", channel, kind, Severity.WARNING, "hot", "t", "x", at, at, f"run-{number}", "u"
    )


async def test_messages_wait_by_channel_until_they_are_sent(store: SqlStore) -> None:
    """Oldest first and unchanged; a stored message stays as it is, sent or not."""
    first, second, other = made(1), made(2), made(1, "chat")
    await store.transact(lambda tx: tx.messages.add([second, other, first]))
    assert await store.transact(lambda tx: tx.messages.waiting("oncall", 10)) == [first, second]
    assert await store.transact(lambda tx: tx.messages.count_waiting("oncall")) == 2
    assert await store.transact(lambda tx: tx.messages.oldest_waiting("oncall", 1)) == [first.id]
    await store.transact(lambda tx: tx.messages.note_sent([first.id], NOW))
    await store.transact(lambda tx: tx.messages.add([replace(first, title="again")]))
    assert await store.transact(lambda tx: tx.messages.waiting("oncall", 10)) == [second]
    await store.transact(lambda tx: tx.messages.drop([second.id]))
    assert await store.transact(lambda tx: tx.messages.waiting("oncall", 10)) == []
    assert await store.transact(lambda tx: tx.messages.waiting("chat", 10)) == [other]


async def test_the_kinds_of_sent_messages_are_known(store: SqlStore) -> None:
    """Pending failure messages count too, since nothing makes them obsolete. Deleted ones do not."""
    failed, asked, unsent = made(1), made(2, kind=MessageKind.APPROVAL), made(3, kind=MessageKind.APPROVAL)
    await store.transact(lambda tx: tx.messages.add([failed, asked, unsent]))
    await store.transact(lambda tx: tx.messages.note_sent([asked.id], NOW))
    ids = ["run-1", "run-2", "run-3"]
    told = {"run-1": {MessageKind.RUN_FAILED}, "run-2": {MessageKind.APPROVAL}}
    assert await store.transact(lambda tx: tx.messages.kinds_sent(ids)) == told
    await store.transact(lambda tx: tx.messages.forget_before(NOW + timedelta(seconds=1)))
    assert await store.transact(lambda tx: tx.messages.kinds_sent(ids)) == {"run-1": {MessageKind.RUN_FAILED}}
    assert await store.transact(lambda tx: tx.messages.waiting("oncall", 10)) == [failed, unsent]
    await store.transact(lambda tx: tx.messages.forget_before(NOW + timedelta(seconds=3)))
    assert await store.transact(lambda tx: tx.messages.waiting("oncall", 10)) == [unsent]
    await store.transact(lambda tx: tx.messages.add([failed]))
    await store.transact(lambda tx: tx.messages.note_sent([failed.id], NOW))
    await store.transact(lambda tx: tx.messages.forget_sent(MessageKind.RUN_FAILED))
    assert await store.transact(lambda tx: tx.messages.kinds_sent(ids)) == {}


@pytest.mark.parametrize("kind", MessageKind)
async def test_an_earlier_release_can_read_every_message(store: SqlStore, kind: MessageKind) -> None:
    """It stops at an unknown kind, so that column has none; this release still knows the kind."""
    older = {"approval", "run_failed", "undo_overdue", "breaker", "pause", "playbook_broken", "takeover"}
    older |= {"follow_up", "repaired", "given_back"}
    message = made(1, kind=kind)
    await store.transact(lambda tx: tx.messages.add([message]))
    assert await store.transact(lambda tx: tx.messages.waiting("oncall", 10)) == [message]
    chosen = sa.select(messages.c.kind)
    assert await store.transact(lambda tx: set(tx.flushed_connection().execute(chosen).scalars())) <= older
    await store.transact(lambda tx: tx.messages.note_sent([message.id], NOW))
    assert await store.transact(lambda tx: tx.messages.kinds_sent(["run-1"])) == {"run-1": {kind}}
    await store.transact(lambda tx: tx.messages.forget_sent(kind))
    assert await store.transact(lambda tx: tx.messages.kinds_sent(["run-1"])) == {}


async def test_the_channels_of_a_message_are_known(store: SqlStore) -> None:
    """The store returns them by run, sent or not; and for single messages, whether they were sent."""
    first, second, other = made(1), made(1, "chat"), made(2)
    await store.transact(lambda tx: tx.messages.add([first, second, other]))
    await store.transact(lambda tx: tx.messages.note_sent([first.id], NOW))
    told = await store.transact(lambda tx: tx.messages.channels_addressed(["run-1", "run-3"]))
    assert told == {"run-1": {"oncall", "chat"}}
    kept = await store.transact(lambda tx: tx.messages.sent_states([first.id, second.id, "9/oncall"]))
    assert kept == {first.id: True, second.id: False}
