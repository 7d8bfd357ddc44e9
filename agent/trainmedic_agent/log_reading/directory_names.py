"""First names of job directories, so that a rename does not assign logs to another job.

Writers of a non-sticky directory can rename others' directories in it. A directory is identified by device, inode and
owner, if renamed also by its last change.
"""

from __future__ import annotations

import threading

from msgspec import Struct

from trainmedic_agent.log_opening.node_files import FileFacts

_MOST = 50_000  # directories


class _Known(Struct, frozen=True):
    first_name: str
    latest_name: str
    uid: int
    written_ns: int


class DirectoryNames:
    """Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._known: dict[tuple[int, int], _Known] = {}

    def first_of(self, name: str, facts: FileFacts) -> str:
        """Record a directory's present name; return its first one."""
        key = (facts.device, facts.inode)
        with self._lock:
            known = self._known.pop(key, None)
            # With another name and another time, it may be a new directory with the inode of a deleted one.
            is_same = (
                known is not None
                and known.uid == facts.uid
                and (known.written_ns == facts.written_ns or known.latest_name == name)
            )
            first = known.first_name if known is not None and is_same else name
            self._known[key] = _Known(first, name, facts.uid, facts.written_ns)
            if len(self._known) > _MOST:
                del self._known[next(iter(self._known))]
        return first
