"""Why something that a rule names was left where it is, and what ended a cleaning before its end."""

from __future__ import annotations

import errno
from enum import StrEnum


class Reason(StrEnum):
    # It is as the rule wants it to stay.
    YOUNG = "young"
    SIZE = "size"
    NEWEST = "among_newest"
    PINNED = "pinned"
    BEST = "best_checkpoint"
    EMPTY = "nothing_to_free"
    # It is not what a rule of its kind deletes.
    SPECIAL = "not_a_regular_file"
    HARD_LINK = "hard_link"
    AGENTS_OWN = "agents_own"
    IN_CHECKPOINT = "in_checkpoint"
    NOT_A_CHECKPOINT = "not_a_checkpoint"
    MOUNT_POINT = "other_filesystem"
    TOO_DEEP = "too_deep"
    TOO_MANY = "too_many_checkpoints"
    # Somebody uses it, or may.
    OPEN = "open"
    OPEN_UNKNOWN = "use_unknown"
    CHANGED = "changed_meanwhile"
    VANISHED = "vanished_meanwhile"
    # It cannot be done.
    NOT_PERMITTED = "not_permitted"
    BUSY = "busy"
    READ_ONLY = "read_only"
    IO_ERROR = "io_error"
    # It was not its turn any more.
    FREE_ENOUGH = "free_enough"
    LIMIT_FILES = "limit_files"
    LIMIT_BYTES = "limit_bytes"
    NO_TIME = "out_of_time"
    STOPPING = "agent_stopping"


_BY_ERRNO = {
    errno.ENOENT: Reason.VANISHED,
    errno.ESTALE: Reason.VANISHED,
    errno.ELOOP: Reason.CHANGED,  # a link where a file or directory was
    errno.ENOTDIR: Reason.CHANGED,
    errno.EISDIR: Reason.CHANGED,
    errno.ENXIO: Reason.CHANGED,  # a pipe or socket where a file was
    errno.ENOTEMPTY: Reason.CHANGED,
    errno.EEXIST: Reason.CHANGED,
    errno.EACCES: Reason.NOT_PERMITTED,
    errno.EPERM: Reason.NOT_PERMITTED,  # an immutable file too
    errno.EBUSY: Reason.BUSY,  # a mount point
    errno.ETXTBSY: Reason.OPEN,
    errno.EWOULDBLOCK: Reason.OPEN,  # under somebody's lease
    errno.EROFS: Reason.READ_ONLY,
    errno.EXDEV: Reason.MOUNT_POINT,
}


def of(error: OSError) -> Reason:
    """What an error of the system says about the entry that it met."""
    return _BY_ERRNO.get(error.errno or 0, Reason.IO_ERROR)
