"""Stored messages."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from datetime import datetime
from typing import Any

import sqlalchemy as sa

from trainmedic_server.adapters.sql_store.bulk import UnitRecords
from trainmedic_server.adapters.sql_store.columns import Text, TimeColumn, metadata, partial_index
from trainmedic_server.domain.message import Message, MessageKind, Severity
from trainmedic_server.ports.messages import StoredMessages

messages = sa.Table(
    "messages",
    metadata,
    sa.Column("id", Text, primary_key=True),
    sa.Column("channel", Text, nullable=False),
    sa.Column("kind", Text, nullable=False),
    sa.Column("severity", Text, nullable=False),
    sa.Column("topic", Text, nullable=False),
    sa.Column("title", Text, nullable=False),
    sa.Column("text", Text, nullable=False),
    sa.Column("at", TimeColumn, nullable=False),
    sa.Column("due_at", TimeColumn, nullable=False),
    sa.Column("run_id", Text),
    sa.Column("link", Text, nullable=False),
    sa.Column("sent_at", TimeColumn),
    sa.Column("newer_kind", Text),
)
"""Earlier releases stop at an unknown kind. So a new kind is in ``newer_kind``, and ``kind`` has the nearest one that
every release knows.
"""

# for each newer kind, what earlier releases read in its place
_NEAREST_KIND: Mapping[MessageKind, MessageKind] = {
    MessageKind.NOT_STARTED: MessageKind.RUN_FAILED,
    MessageKind.TARGET_UNKNOWN: MessageKind.RUN_FAILED,
    MessageKind.EFFECT_LOST: MessageKind.RUN_FAILED,
}
_KIND: sa.ColumnElement[str] = sa.func.coalesce(messages.c.newer_kind, messages.c.kind)

# messages to send
partial_index("ix_messages_waiting", messages.c.channel, messages.c.at, where="sent_at IS NULL")
# messages about a run
partial_index("ix_messages_run", messages.c.run_id, where="run_id IS NOT NULL")
# pruning
partial_index("ix_messages_sent", messages.c.sent_at, where="sent_at IS NOT NULL")

_WAITING = messages.c.sent_at.is_(None)
_MEMBERS = [column for column in messages.c if column.name not in ("kind", "sent_at", "newer_kind")]


class SqlMessages(UnitRecords, StoredMessages):
    def add(self, made: Sequence[Message]) -> None:
        self._write(messages, [_row(message) for message in made], "ignore")

    def waiting(self, channel: str, limit: int) -> list[Message]:
        chosen = sa.select(*_MEMBERS, _KIND.label("kind")).where(_WAITING, messages.c.channel == channel)
        rows = self._connection().execute(chosen.order_by(messages.c.at, messages.c.id).limit(limit))
        return [_message(row) for row in rows.mappings()]

    def count_waiting(self, channel: str) -> int:
        counted = sa.select(sa.func.count()).where(_WAITING, messages.c.channel == channel)
        return self._connection().execute(counted).scalar_one()

    def oldest_waiting(self, channel: str, count: int) -> list[str]:
        chosen = sa.select(messages.c.id).where(_WAITING, messages.c.channel == channel)
        return list(self._connection().execute(chosen.order_by(messages.c.at, messages.c.id).limit(count)).scalars())

    def note_sent(self, ids: Collection[str], at: datetime) -> None:
        self._connection().execute(sa.update(messages).where(messages.c.id.in_(ids)).values(sent_at=at))

    def drop(self, ids: Collection[str]) -> None:
        self._connection().execute(sa.delete(messages).where(messages.c.id.in_(ids)))

    def kinds_sent(self, run_ids: Collection[str]) -> Mapping[str, set[MessageKind]]:
        chosen = sa.select(messages.c.run_id, _KIND).where(
            messages.c.run_id.in_(run_ids),
            # A pending message about a question or an overdue undo may never be sent, because the cause can pass by
            # itself.
            sa.or_(messages.c.sent_at.is_not(None), _KIND == MessageKind.RUN_FAILED),
        )
        kinds: dict[str, set[MessageKind]] = {}
        for run_id, kind in self._connection().execute(chosen):
            kinds.setdefault(run_id, set()).add(MessageKind(kind))
        return kinds

    def channels_addressed(self, run_ids: Collection[str]) -> Mapping[str, set[str]]:
        chosen = sa.select(messages.c.run_id, messages.c.channel).where(messages.c.run_id.in_(run_ids)).distinct()
        channels: dict[str, set[str]] = {}
        for run_id, channel in self._connection().execute(chosen):
            channels.setdefault(run_id, set()).add(channel)
        return channels

    def sent_states(self, ids: Collection[str]) -> Mapping[str, bool]:
        chosen = sa.select(messages.c.id, messages.c.sent_at.is_not(None)).where(messages.c.id.in_(ids))
        return {message_id: bool(is_sent) for message_id, is_sent in self._connection().execute(chosen)}

    def forget_sent(self, kind: MessageKind) -> None:
        statement = sa.delete(messages).where(messages.c.sent_at.is_not(None), _KIND.in_([kind]))
        self._connection().execute(statement)

    def forget_before(self, moment: datetime) -> None:
        for is_old in (messages.c.sent_at < moment, sa.and_(_WAITING, messages.c.at < moment)):
            self._connection().execute(sa.delete(messages).where(is_old))


def _row(message: Message) -> tuple[Any, ...]:
    nearest = _NEAREST_KIND.get(message.kind)
    newer_kind = message.kind if nearest else None
    values = {"kind": nearest or message.kind, "sent_at": None, "newer_kind": newer_kind}
    values |= {column.name: getattr(message, column.name) for column in messages.c if column.name not in values}
    return tuple(values[column.name] for column in messages.c)


def _message(row: sa.RowMapping) -> Message:
    members: dict[str, Any] = dict(row)
    return Message(**{**members, "kind": MessageKind(row["kind"]), "severity": Severity(row["severity"])})
