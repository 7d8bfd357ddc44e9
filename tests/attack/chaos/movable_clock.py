"""A wall clock that can be moved for one program while it runs, by the library libfaketime.

Monotonic clocks go on as they do on a real machine whose time is set. Where the library is not installed there is none.
"""

from __future__ import annotations

from pathlib import Path

_LIBRARIES = ("/usr/lib/*/faketime/libfaketimeMT.so.1", "/usr/lib/faketime/libfaketimeMT.so.1")


def library() -> Path | None:
    """Debian's package libfaketime brings it."""
    return next((path for pattern in _LIBRARIES for path in sorted(Path("/").glob(pattern[1:]))), None)


class MovableClock:
    """The wall clock of the programs that are started with `environment`."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self.move(0)

    @property
    def environment(self) -> dict[str, str]:
        found = library()
        if found is None:
            return {}
        return {
            "LD_PRELOAD": str(found),
            "FAKETIME_TIMESTAMP_FILE": str(self._path),
            "FAKETIME_CACHE_DURATION": "1",  # seconds after which the file is read again
            "FAKETIME_DONT_FAKE_MONOTONIC": "1",
        }

    def move(self, seconds: int) -> None:
        """Let the clock be ahead by so many seconds, or behind. Takes effect within a second."""
        fresh = self._path.with_suffix(".new")
        fresh.write_text(f"{seconds:+d}\n")
        fresh.replace(self._path)
