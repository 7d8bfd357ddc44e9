"""What one rule did and what it left: the reasons, and the counters that become its part of the command's output.

Paths in the output are examples, three for each reason, and written so that any name can be read: bytes that are
not UTF-8 and control characters appear as escapes.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Mapping
from enum import StrEnum
from typing import Any, Protocol

from msgspec import Struct, field

_MAX_EXAMPLES = 3
_MAX_PATH_LENGTH = 200


class Reason(StrEnum):
    """Why an entry was left where it is, or what ended a rule or a cleaning before everything was dealt with."""

    # The rule wants it to stay.
    YOUNG = "young"
    SIZE = "size"
    NEWEST = "among_newest"
    PINNED = "pinned"
    BEST = "best_checkpoint"
    METADATA_UNREAD = "metadata_unread"
    EMPTY = "nothing_to_free"
    # A rule of this kind does not delete such entries.
    SPECIAL = "not_a_regular_file"
    HARD_LINK = "hard_link"
    AGENTS_OWN = "agents_own"
    IN_CHECKPOINT = "in_checkpoint"
    NOT_A_CHECKPOINT = "not_a_checkpoint"
    MOUNT_POINT = "other_filesystem"
    TOO_DEEP = "too_deep"
    TOO_MANY = "too_many_checkpoints"
    # Somebody uses it, or may use it.
    OPEN = "open"
    READ = "read_meanwhile"
    OPEN_UNKNOWN = "use_unknown"
    CHANGED = "changed_meanwhile"
    VANISHED = "vanished_meanwhile"
    MOVED = "moved_meanwhile"
    # The system refuses.
    NOT_PERMITTED = "not_permitted"
    BUSY = "busy"
    READ_ONLY = "read_only"
    NO_HOLES = "holes_not_supported"
    IO_ERROR = "io_error"
    # The cleaning ended before its turn came.
    FREE_ENOUGH = "free_enough"
    LIMIT_FILES = "limit_files"
    LIMIT_BYTES = "limit_bytes"
    NO_TIME = "out_of_time"
    STOPPING = "agent_stopping"

    @classmethod
    def of(cls, error: OSError) -> Reason:
        """What an error of the system says about the entry that it met."""
        return _REASON_BY_ERRNO.get(error.errno or 0, cls.IO_ERROR)


_REASON_BY_ERRNO = {
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
    errno.EOPNOTSUPP: Reason.NO_HOLES,  # a filesystem on which a log can be neither shrunk nor emptied under its writer
    errno.EXDEV: Reason.MOUNT_POINT,
}


class _Located(Protocol):
    def path(self, name: str = "") -> str: ...


class _LeftEntries(Struct):
    count: int = 0
    examples: list[str] = field(default_factory=list)


class RuleCounters(Struct):
    """What one rule did."""

    matched: int = 0
    """Entries that the rule was ready to delete once it had looked at everything."""
    files: int = 0
    """Files that were deleted or truncated; each file of a deleted checkpoint counts."""
    bytes: int = 0
    """Bytes that this freed."""
    checkpoints: int | None = None
    """Checkpoints that were deleted whole; None for a rule that deletes files."""
    refused_roots: dict[str, str] = field(default_factory=dict)
    """By path, the sentence that says why the root cannot be cleaned."""
    free_enough_roots: list[str] = field(default_factory=list)
    """Paths of roots that were not touched because enough is free there."""
    access_times: dict[str, str] = field(default_factory=dict)
    """By path of a root, how far its access times can be trusted; for a rule whose ages count from the last use."""
    is_first_pass: bool = True
    """False once all roots have been walked: a second walk meets the same entries and must not count them again."""
    _left: dict[Reason, _LeftEntries] = field(default_factory=dict)

    def skip(self, reason: Reason, directory: _Located, name: str) -> None:
        """Count an entry that the search passes over; `name` is empty for the directory itself."""
        if self.is_first_pass:
            self.leave(reason, directory, name)

    def leave(self, reason: Reason, directory: _Located, name: str) -> None:
        """Count an entry whose turn had come, or would have come, and that was left."""
        entries = self._left.setdefault(reason, _LeftEntries())
        entries.count += 1
        if len(entries.examples) < _MAX_EXAMPLES:
            entries.examples.append(printable(directory.path(name)))

    def leave_rest(self, reason: Reason, count: int) -> None:
        """Count the entries that were left when the rule ended."""
        if count > 0:
            self._left.setdefault(reason, _LeftEntries()).count += count

    def output(self) -> Mapping[str, Any]:
        left = {
            str(reason): {"count": entries.count, **({"examples": entries.examples} if entries.examples else {})}
            for reason, entries in sorted(self._left.items())
        }
        return {
            "matched": self.matched,
            "files": self.files,
            "bytes": self.bytes,
            **({} if self.checkpoints is None else {"checkpoints": self.checkpoints}),
            "left": left,
            **({"access_times": self.access_times} if self.access_times else {}),
            **({"refused_roots": self.refused_roots} if self.refused_roots else {}),
            **({"free_enough_roots": self.free_enough_roots} if self.free_enough_roots else {}),
        }


def printable(path: str) -> str:
    """A path for a person: on one line, and not longer than a line."""
    text = os.fsencode(path).decode("utf-8", "backslashreplace")
    text = "".join(char if char.isprintable() else char.encode("unicode_escape").decode("ascii") for char in text)
    return text if len(text) <= _MAX_PATH_LENGTH else f"{text[: _MAX_PATH_LENGTH - 1]}…"
