"""First names of jobs' directories: a rename makes a directory's logs none of another job.

Who may write in a directory without the sticky bit can rename other users' directories in it. A directory is known by
its device, inode, owner and the time of its last change, which a rename leaves as it is. Names are known from the first
look of this process on. If the directory itself was changed and renamed between two looks, as when an attempt begins,
the new name counts: a new directory with the inode of a deleted one looks the same.

Who calls it: ``scan_units`` and ``discovery``, for reading and for searches.
"""

from __future__ import annotations

import threading

from msgspec import Struct

from trainmedic_agent.log_opening.node_files import FileFacts

_MOST = 50_000
"""Directories that are remembered, those that were looked at last."""


class _Known(Struct, frozen=True):
    first: str
    name: str
    uid: int
    written_ns: int


class DirectoryNames:
    """The names. Any thread may call it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._known: dict[tuple[int, int], _Known] = {}

    def first_of(self, name: str, facts: FileFacts) -> str:
        """Return the name by which a directory was known first. It is now called `name`."""
        key = (facts.device, facts.inode)
        with self._lock:
            known = self._known.pop(key, None)
            # A new directory can have the inode of one that was deleted. It was written later.
            is_same = known is not None and known.uid == facts.uid and facts.written_ns == known.written_ns
            is_so_called = known is not None and known.uid == facts.uid and known.name == name
            first = known.first if known is not None and (is_same or is_so_called) else name
            self._known[key] = _Known(first, name, facts.uid, facts.written_ns)
            if len(self._known) > _MOST:
                del self._known[next(iter(self._known))]
        return first
