"""The reader's scans, shared with searches."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection

from msgspec.structs import replace

from trainmedic_agent.log_reading.discovery import Scan
from trainmedic_agent.log_reading.scan_units import FileKey

_STOP_CHECK_SECONDS = 0.1  # between looks whether to stop


class SharedScan:
    """The latest scan. A search requests the next one at once."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._begun = self._ended = 0
        self._is_wanted = self._is_stopped = False
        self._latest = Scan((), {})

    # --- called by the scanning thread ---

    def begin(self) -> bool:
        """Return whether a search waits."""
        with self._changed:
            self._begun += 1
            is_wanted, self._is_wanted = self._is_wanted, False
            return is_wanted

    def end(self, scan: Scan) -> None:
        with self._changed:
            self._ended, self._latest = self._begun, scan
            self._changed.notify_all()

    def pause(self, seconds: float) -> None:
        """Wait up to `seconds` until a search requests a scan."""
        with self._changed:
            self._changed.wait_for(lambda: self._is_wanted or self._is_stopped, seconds)

    def stop(self) -> None:
        with self._changed:
            self._is_stopped = True
            self._changed.notify_all()

    # --- called by the searching thread ---

    def scan(
        self,
        known: Collection[FileKey],
        is_stopping: Callable[[], bool],
        seconds: float | None = None,
        job_seconds: float = 0.0,
    ) -> Scan:
        """Return a scan that began after this call; after `seconds` or a stop the last one, marked as stale."""
        until = None if seconds is None else time.monotonic() + seconds
        with self._changed:
            begun, self._is_wanted = self._begun, True
            self._changed.notify_all()
            while self._ended <= begun:
                if is_stopping() or self._is_stopped or (until is not None and time.monotonic() > until):
                    return replace(self._latest, is_stale=True)
                self._changed.wait(_STOP_CHECK_SECONDS)
            return self._latest
