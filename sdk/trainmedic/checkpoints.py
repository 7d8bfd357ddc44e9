"""Public names of ``recovery.checkpoints``."""

from trainmedic.recovery.checkpoints import (
    COMPLETE,
    NEVER_DELETED,
    PINNED,
    candidates,
    choose,
    completion,
    flush_directory,
    is_pinned,
    mark_complete,
    newest_first,
    pin,
    surplus,
    unpin,
    write_durably,
)
from trainmedic.recovery.checkpoints import SavedCheckpoint as Found
from trainmedic.recovery.checkpoints import as_seen_by_rank_0 as agreed
from trainmedic.recovery.checkpoints import pin_reason as pinned_for

__all__ = [
    "COMPLETE",
    "NEVER_DELETED",
    "PINNED",
    "Found",
    "agreed",
    "candidates",
    "choose",
    "completion",
    "flush_directory",
    "is_pinned",
    "mark_complete",
    "newest_first",
    "pin",
    "pinned_for",
    "surplus",
    "unpin",
    "write_durably",
]
