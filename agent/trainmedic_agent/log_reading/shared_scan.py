"""The reader's scans for files, shared with searches: a search has the next scan made at once, and makes none itself.

So searches take neither the time nor the opener from the scans that find new logs. Who calls it: ``log_reader`` (its
scanning thread) and ``log_search`` (one thread).
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection

from msgspec.structs import replace

from trainmedic_agent.log_reading.discovery import FileKey, Scan

_TURN = 0.1


class SharedScan:
    """The last scan, and whether a search waits for the next one. Implements ``log_search``'s `LooksForFiles`."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._begun = self._ended = 0
        self._is_wanted = self._is_stopped = False
        self._latest = Scan((), {})

    # --- the thread that scans --------------------------------------------------------------------------

    def begin(self) -> bool:
        """Begin a scan. Return whether a search waits for it."""
        with self._changed:
            self._begun += 1
            is_wanted, self._is_wanted = self._is_wanted, False
            return is_wanted

    def end(self, scan: Scan) -> None:
        with self._changed:
            self._ended, self._latest = self._begun, scan
            self._changed.notify_all()

    def pause(self, seconds: float) -> None:
        """Wait until a search wants a scan, for so long at most."""
        with self._changed:
            self._changed.wait_for(lambda: self._is_wanted or self._is_stopped, seconds)

    def stop(self) -> None:
        with self._changed:
            self._is_stopped = True
            self._changed.notify_all()

    # --- the thread that searches -----------------------------------------------------------------------

    def scan(
        self,
        known: Collection[FileKey],
        is_stopping: Callable[[], bool],
        seconds: float | None = None,
        job_seconds: float = 0.0,
    ) -> Scan:
        """Return a scan that began after this call. After `seconds`, return the last one, marked as stale."""
        until = None if seconds is None else time.monotonic() + seconds
        with self._changed:
            begun, self._is_wanted = self._begun, True
            self._changed.notify_all()
            while self._ended <= begun:
                if is_stopping() or self._is_stopped or (until is not None and time.monotonic() > until):
                    return replace(self._latest, is_stale=True)
                self._changed.wait(_TURN)
            return self._latest
