"""Checkpoints by the names under which training scripts import them; the code is in ``recovery.checkpoints``."""

from trainmedic.recovery.checkpoints import (
    COMPLETE,
    PINNED,
    candidates,
    choose,
    completion,
    is_pinned,
    mark_complete,
    newest_first,
    pin,
    surplus,
    unpin,
)
from trainmedic.recovery.checkpoints import SavedCheckpoint as Found

__all__ = [
    "COMPLETE",
    "PINNED",
    "Found",
    "candidates",
    "choose",
    "completion",
    "is_pinned",
    "mark_complete",
    "newest_first",
    "pin",
    "surplus",
    "unpin",
]
