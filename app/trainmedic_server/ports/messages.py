"""Messages to people: those that wait in the run store, and who tells that something is wrong with the playbooks."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from datetime import datetime
from typing import Protocol

from trainmedic_server.domain.message import Message, MessageKind


class StoredMessages(Protocol):
    """The messages that wait and those that were sent, within one transaction of the run store."""

    def add(self, messages: Sequence[Message]) -> None:
        """Keep messages that are to be sent. One that is kept already, sent or not, stays as it is."""
        ...

    def waiting(self, channel: str, limit: int) -> list[Message]:
        """Return the channel's messages that were not sent yet, oldest first."""
        ...

    def count_waiting(self, channel: str) -> int: ...
    def oldest_waiting(self, channel: str, count: int) -> list[str]:
        """Return the ids of so many of the channel's messages that were not sent, oldest first."""
        ...

    def note_sent(self, ids: Collection[str], at: datetime) -> None: ...
    def drop(self, ids: Collection[str]) -> None:
        """Forget these messages."""
        ...

    def kinds_told(self, run_ids: Collection[str]) -> Mapping[str, set[MessageKind]]:
        """Return of which kinds messages about each run were sent, or, of its failure, wait to be sent."""
        ...

    def channels_told(self, run_ids: Collection[str]) -> Mapping[str, set[str]]:
        """Return the channels for which messages about each run were stored, sent or not."""
        ...

    def kept(self, ids: Collection[str]) -> Mapping[str, bool]:
        """Return which of these messages are stored, and whether each was sent."""
        ...

    def forget_sent(self, kind: MessageKind) -> None:
        """Forget what was sent of this kind, so that the same may be told again."""
        ...

    def forget_before(self, moment: datetime) -> None:
        """Forget what was sent before, and what came to be before and was never sent: its channel is not there any
        more."""
        ...
