"""Reasons and counters of a rule's output, with up to three example paths per reason."""

from __future__ import annotations

import errno
import json
import os
import sys
from collections.abc import Mapping
from enum import StrEnum
from itertools import islice
from typing import Any, Protocol

from msgspec import Struct, field

_MAX_EXAMPLES = 3
_ALL_ROOTS = sys.maxsize
# Pairs: most examples per reason, and most roots per rule. Tried in order until the output fits `_MOST_BYTES`.
_LIMITS = (*((examples, _ALL_ROOTS) for examples in range(_MAX_EXAMPLES, -1, -1)), (0, 10), (0, 1), (0, 0))
_MAX_PATH_LENGTH = 200  # characters
_MOST_BYTES = 48 * 1024  # bytes of JSON: a larger reply than 64 KiB would not be kept


class Reason(StrEnum):
    # Kept by the rule.
    YOUNG = "young"
    SIZE = "size"
    NEWEST = "among_newest"
    PINNED = "pinned"
    BEST = "best_checkpoint"
    METADATA_UNREAD = "metadata_unread"
    EMPTY = "nothing_to_free"
    # Not deleted by rules of this kind.
    SPECIAL = "not_a_regular_file"
    HARD_LINK = "hard_link"
    AGENTS_OWN = "agents_own"
    IN_CHECKPOINT = "in_checkpoint"
    NOT_A_CHECKPOINT = "not_a_checkpoint"
    MOUNT_POINT = "other_filesystem"
    TOO_DEEP = "too_deep"
    TOO_MANY = "too_many_checkpoints"
    # In use, or possibly in use.
    OPEN = "open"
    READ = "read_meanwhile"
    OPEN_UNKNOWN = "use_unknown"  # or reads may be unrecorded
    CHANGED = "changed_meanwhile"
    VANISHED = "vanished_meanwhile"
    MOVED = "moved_meanwhile"
    # Refused by the system.
    NOT_PERMITTED = "not_permitted"
    BUSY = "busy"
    READ_ONLY = "read_only"
    NO_HOLES = "holes_not_supported"
    IO_ERROR = "io_error"
    # The cleaning ended before.
    FREE_ENOUGH = "free_enough"
    LIMIT_FILES = "limit_files"
    LIMIT_BYTES = "limit_bytes"
    NO_TIME = "out_of_time"
    STOPPING = "agent_stopping"

    @classmethod
    def of(cls, error: OSError) -> Reason:
        return _REASON_BY_ERRNO.get(error.errno or 0, cls.IO_ERROR)


_REASON_BY_ERRNO = {
    errno.ENOENT: Reason.VANISHED,
    errno.ESTALE: Reason.VANISHED,
    errno.ELOOP: Reason.CHANGED,  # a link replaced a file or directory
    errno.ENOTDIR: Reason.CHANGED,
    errno.EISDIR: Reason.CHANGED,
    errno.ENXIO: Reason.CHANGED,  # a pipe or socket replaced a file
    errno.ENOTEMPTY: Reason.CHANGED,
    errno.EEXIST: Reason.CHANGED,
    errno.EACCES: Reason.NOT_PERMITTED,
    errno.EPERM: Reason.NOT_PERMITTED,  # also for immutable files
    errno.EBUSY: Reason.BUSY,  # a mount point
    errno.ETXTBSY: Reason.OPEN,
    errno.EWOULDBLOCK: Reason.OPEN,  # another process has a lease
    errno.EROFS: Reason.READ_ONLY,
    errno.EOPNOTSUPP: Reason.NO_HOLES,  # logs cannot be shrunk, or emptied under a writer
    errno.EXDEV: Reason.MOUNT_POINT,
}


class _Located(Protocol):
    def path(self, name: str = "") -> str: ...


class _LeftEntries(Struct):
    count: int = 0
    examples: list[str] = field(default_factory=list)


class RuleCounters(Struct):
    matched: int = 0
    files: int = 0  # deleted, truncated or shrunk; in a trial run those that would be
    bytes: int = 0  # freed ones
    checkpoints: int | None = None  # deleted ones; None for rules that delete files
    refused_roots: dict[str, str] = field(default_factory=dict)  # reasons by path
    free_enough_roots: list[str] = field(default_factory=list)
    access_times: dict[str, str] = field(default_factory=dict)  # `AccessTimes` by root, for rules that use them
    is_first_pass: bool = True
    """False once all roots were walked: later walks count nothing."""
    _left: dict[Reason, _LeftEntries] = field(default_factory=dict)

    def skip(self, reason: Reason, directory: _Located, name: str) -> None:
        """Count a skipped entry; `name` is empty for the directory itself."""
        if self.is_first_pass:
            self.leave(reason, directory, name)

    def leave(self, reason: Reason, directory: _Located, name: str) -> None:
        entries = self._left.setdefault(reason, _LeftEntries())
        entries.count += 1
        if len(entries.examples) < _MAX_EXAMPLES:
            entries.examples.append(printable(directory.path(name)))

    def leave_rest(self, reason: Reason, count: int) -> None:
        if count > 0:
            self._left.setdefault(reason, _LeftEntries()).count += count

    def output(self, most_examples: int, most_roots: int) -> Mapping[str, Any]:
        left = {
            str(reason): {"count": entries.count, **({"examples": shown} if shown else {})}
            for reason, entries in sorted(self._left.items())
            for shown in [entries.examples[:most_examples]]
        }
        of_roots = {"access_times": self.access_times, "refused_roots": self.refused_roots}
        left_out = sum(max(len(each) - most_roots, 0) for each in (*of_roots.values(), self.free_enough_roots))
        return {
            "matched": self.matched,
            "files": self.files,
            "bytes": self.bytes,
            **({} if self.checkpoints is None else {"checkpoints": self.checkpoints}),
            "left": left,
            **{name: dict(islice(values.items(), most_roots)) for name, values in of_roots.items() if values},
            **({"free_enough_roots": self.free_enough_roots[:most_roots]} if self.free_enough_roots else {}),
            **({"roots_left_out": left_out} if left_out else {}),
        }


def outputs(counters: Mapping[str, RuleCounters]) -> Mapping[str, Mapping[str, Any]]:
    every: Mapping[str, Mapping[str, Any]] = {}
    for most_examples, most_roots in _LIMITS:
        every = {name: part.output(most_examples, most_roots) for name, part in counters.items()}
        if len(json.dumps(every)) <= _MOST_BYTES:
            break
    return every


def printable(path: str) -> str:
    """Return a path on one line of bounded length."""
    text = os.fsencode(path).decode("utf-8", "backslashreplace")
    text = "".join(char if char.isprintable() else char.encode("unicode_escape").decode("ascii") for char in text)
    return text if len(text) <= _MAX_PATH_LENGTH else f"{text[: _MAX_PATH_LENGTH - 1]}…"
