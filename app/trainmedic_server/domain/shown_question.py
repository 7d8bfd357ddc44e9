"""Chat messages that show a run's questions. Pure."""

from __future__ import annotations

from msgspec import Struct


class ShownQuestion(Struct, frozen=True):
    """A chat message that shows a question."""

    run_id: str
    step: str
    channel: str
    """The chat's ID of the channel."""
    message: str
    """The chat's ID of the message."""
    shown: str
    """Digest of its content."""
