"""A journal, behind a program that takes the arguments of journalctl: the outermost edge of reading it."""

from __future__ import annotations

import json
import stat
import time
from pathlib import Path

from trainmedic_agent.log_reading.kernel_log import JournalReader

JOURNALCTL = """#!/bin/sh
echo "$@" >> {calls}
for argument in "$@"; do case "$argument" in --after-cursor=gone) exit 1;; esac; done
cat {entries}
exec sleep 60
"""


class Journal:
    """A program that takes journalctl's arguments and prints entries as it does."""

    def __init__(self, directory: Path) -> None:
        self.entries = directory / "entries"
        self.calls = directory / "calls"
        self.program = directory / "journalctl"
        self.program.write_text(JOURNALCTL.format(calls=self.calls, entries=self.entries))
        self.program.chmod(self.program.stat().st_mode | stat.S_IXUSR)
        self.entries.write_text("")

    def add(self, cursor: str, microseconds: int, message: object) -> None:
        entry = {
            "__CURSOR": cursor,
            "__REALTIME_TIMESTAMP": "1767225600000000",
            "__MONOTONIC_TIMESTAMP": str(microseconds + 7),
            "_SOURCE_MONOTONIC_TIMESTAMP": str(microseconds),
            "_BOOT_ID": "c0ffee",
            "PRIORITY": "3",
            "MESSAGE": message,
        }
        with self.entries.open("a") as file:
            file.write(json.dumps(entry) + "\n")

    def read(self, reader: JournalReader, count: int) -> list[bytes]:
        """The next lines, for a real program is behind them."""
        lines: list[tuple[int, bytes]] = []
        until = time.monotonic() + 60
        while len(lines) < count and time.monotonic() < until:
            lines += reader.read()
            time.sleep(0.01)
        return [raw for _, raw in lines]
