"""Questions in a chat: which message shows which, and what it shows. Pure."""

from __future__ import annotations

from msgspec import Struct


class ShownQuestion(Struct, frozen=True):
    """The message of a chat that shows a question."""

    run_id: str
    step: str
    """The id of the step that asks."""
    channel: str
    """Where the message is, as the chat names it."""
    message: str
    """The message itself, as the chat names it."""
    shown: str
    """A digest of what it shows."""
