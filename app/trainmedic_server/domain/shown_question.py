from __future__ import annotations

from msgspec import Struct


class ShownQuestion(Struct, frozen=True):
    run_id: str
    step: str
    channel: str
    message: str  # The chat's ID of the message
    shown: str  # Hash of the shown content
