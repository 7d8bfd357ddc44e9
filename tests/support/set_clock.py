"""The clock of a program, which a test sets while the program runs (``tests/driver/clock.c``)."""

from __future__ import annotations

import contextlib
import mmap
import struct
import subprocess
from collections.abc import Iterator, Mapping
from datetime import timedelta
from pathlib import Path

from tests.support.agent_node import KEY
from tests.support.live import Server

SOURCE = Path(__file__).parents[1] / "driver" / "clock.c"


class MachineClock:
    """The time of day of all programs that are started with its `environment`, and of what these start."""

    def __init__(self, directory: Path) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        library, file = directory / "libclock.so", directory / "clock-ahead"
        strict = ["-O2", "-Wall", "-Wextra", "-Werror", "-shared", "-fPIC"]
        subprocess.run(["cc", *strict, "-o", library, SOURCE, "-ldl"], check=True)
        file.write_bytes(bytes(8))
        with file.open("r+b") as opened:
            self._mapped = mmap.mmap(opened.fileno(), 8)
        self.environment: Mapping[str, str] = {"LD_PRELOAD": str(library), "CLOCK_AHEAD": str(file)}
        self.ahead = timedelta(0)

    def set(self, ahead: timedelta) -> None:
        """Set the clock to so much ahead of the real time."""
        self.ahead = ahead
        self._mapped[:8] = struct.pack("q", int(ahead.total_seconds()))

    def start(self, server: Server) -> None:
        """Start a server that has this clock."""
        server.start(TRAINMEDIC_SIGNING_KEY=KEY, **self.environment)

    @contextlib.contextmanager
    def serving(self, server: Server) -> Iterator[None]:
        """The same, and end it after the block."""
        try:
            self.start(server)
            yield
        finally:
            server.__exit__()
