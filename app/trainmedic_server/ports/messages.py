"""Stored messages to people."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from datetime import datetime
from typing import Protocol

from trainmedic_server.domain.message import Message, MessageKind


class StoredMessages(Protocol):
    def add(self, messages: Sequence[Message]) -> None: ...  # skips existing IDs

    def waiting(self, channel: str, limit: int) -> list[Message]: ...  # oldest first

    def count_waiting(self, channel: str) -> int: ...
    def oldest_waiting(self, channel: str, count: int) -> list[str]:
        """Return IDs."""
        ...

    def note_sent(self, ids: Collection[str], at: datetime) -> None: ...
    def drop(self, ids: Collection[str]) -> None: ...

    def kinds_sent(self, run_ids: Collection[str]) -> Mapping[str, set[MessageKind]]:
        """Return the kinds sent about each run. Waiting ``RUN_FAILED`` messages count too."""
        ...

    def channels_addressed(self, run_ids: Collection[str]) -> Mapping[str, set[str]]:
        """Return the channels of each run's messages, sent and waiting ones."""
        ...

    def sent_states(self, ids: Collection[str]) -> Mapping[str, bool]:
        """Return whether each stored one was sent; others are missing."""
        ...

    def forget_sent(self, kind: MessageKind) -> None: ...

    def forget_before(self, moment: datetime) -> None:
        """Forget messages sent before `moment`, and unsent ones created before it."""
        ...
