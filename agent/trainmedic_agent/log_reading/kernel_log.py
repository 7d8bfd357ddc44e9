"""The kernel's log of this boot.

A line's place is its number in ``/dev/kmsg``, or in the journal 16 times its microseconds since boot.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import select
import shutil
import subprocess
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, Protocol

from trainmedic_agent.log_reading.line_cutter import PlacedLine
from trainmedic_agent.log_reading.log_counters import LogCounters
from trainmedic_agent.log_reading.log_policy import KernelLog, KernelReading
from trainmedic_agent.log_reading.rule_runner import RuleRunner
from trainmedic_agent.log_reading.streams import LineStream, excerpt_of
from trainmedic_logs.domain.finding import MOST_AROUND, Excerpt, Origin

log = logging.getLogger(__name__)

KMSG = "/dev/kmsg"
_JOURNALS = ("/run/log/journal", "/var/log/journal")
_LARGEST_RECORD = 8192  # bytes: printk's CONSOLE_EXT_LOG_MAX
_MOST_AT_ONCE = 2000  # lines per read
_JOURNAL_PIECE = 64 * 1024  # bytes per read
_LONGEST_ENTRY = 256 * 1024  # bytes of a journal entry
_RESTART_SECONDS = 5.0  # between starts of journalctl
_MAX_CLOCK_ERROR = 2.0  # seconds by which the kernel's time may differ from ours
_PLACES_PER_MICROSECOND = 16  # so that lines of the same microsecond have different places


class KernelReader(Protocol):
    lost: int  # lines overwritten before they were read

    def fileno(self) -> int | None:
        """Return a descriptor for poll(2), None without one."""
        ...

    def read(self) -> list[PlacedLine]:
        """Return the next lines as in ``/dev/kmsg``, without waiting. Raises OSError."""
        ...

    def place_json(self) -> Mapping[str, Any]: ...

    def close(self) -> None: ...


def open_kmsg_directly(path: str) -> int:
    """Raises OSError."""
    return os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOCTTY)


open_kmsg: Callable[[str], int] = open_kmsg_directly  # replaced in an unprivileged reader, which uses the opener


class KmsgReader:
    def __init__(self, first: int, path: str = KMSG) -> None:
        """Raises OSError if not permitted."""
        self.lost = 0
        self._next = first
        self._fd = open_kmsg(path)

    def fileno(self) -> int:
        return self._fd

    def read(self) -> list[PlacedLine]:
        lines: list[PlacedLine] = []
        while len(lines) < _MOST_AT_ONCE:
            try:
                record = os.read(self._fd, _LARGEST_RECORD)
            except BlockingIOError:
                break
            except BrokenPipeError:
                continue  # overwritten; the next number shows how many are lost
            if not record:
                break
            number = _number(record)
            if number is None or number < self._next:
                continue
            self.lost += number - self._next
            self._next = number + 1
            lines.append((number, record.partition(b"\n")[0]))
        return lines

    def place_json(self) -> Mapping[str, Any]:
        return {"by": KernelReading.KMSG.value, "next": self._next}

    def close(self) -> None:
        os.close(self._fd)


def _number(record: bytes) -> int | None:
    fields = record.partition(b";")[0].split(b",")
    return int(fields[1]) if len(fields) > 2 and fields[1].isdigit() else None


class JournalReader:
    """The kernel's lines in the systemd journal. Its command, ``journalctl``, is restarted when it ends."""

    def __init__(self, after: int, cursor: str, command: str = "journalctl") -> None:
        """`after`: last place read, 0 for none. `cursor`: its journal cursor."""
        self.lost = 0
        self._after = after
        self._cursor = cursor
        self._command = command
        self._process: subprocess.Popen[bytes] | None = None
        self._unfinished = b""
        self._start_at = 0.0
        self._has_read = False  # since the command's start
        self._place = 0  # of the last line, also of one read before

    def fileno(self) -> int | None:
        return self._process.stdout.fileno() if self._process is not None and self._process.stdout else None

    def read(self) -> list[PlacedLine]:
        if self._process is None and not self._start():
            return []
        fd = self.fileno()
        assert fd is not None
        try:
            piece = os.read(fd, _JOURNAL_PIECE)
        except BlockingIOError:
            return []
        if not piece:
            self._close_ended()
            return []
        *entries, self._unfinished = (self._unfinished + piece).split(b"\n")
        if len(self._unfinished) > _LONGEST_ENTRY:
            self._unfinished = b""  # its end is not valid JSON and is dropped too
        placed = (self._line(entry) for entry in entries)
        return [line for line in placed if line is not None]

    def place_json(self) -> Mapping[str, Any]:
        return {"by": KernelReading.JOURNAL.value, "next": self._after + 1, "cursor": self._cursor}

    def close(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(1.0)
            if process.stdout is not None:
                process.stdout.close()

    def _start(self) -> bool:
        if time.monotonic() < self._start_at:
            return False
        self._start_at = time.monotonic() + _RESTART_SECONDS
        known = [f"--after-cursor={self._cursor}"] if self._cursor else []
        fields = "--output-fields=MESSAGE,PRIORITY,_SOURCE_MONOTONIC_TIMESTAMP"
        arguments = ["--dmesg", "--output=json", fields, "--follow", "--lines=all", "--no-pager", *known]
        self._process = subprocess.Popen(  # noqa: S603
            [self._command, *arguments], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
        )
        os.set_blocking(self.fileno() or -1, False)
        self._unfinished, self._has_read = b"", False
        self._place = self._after if self._cursor else 0
        return True

    def _close_ended(self) -> None:
        """Close the ended process. If it returned nothing, forget the cursor, possibly invalid."""
        if not self._has_read:
            self._cursor = ""
        self.close()

    def _line(self, raw: bytes) -> PlacedLine | None:
        """Return None if invalid or read before."""
        try:
            entry = json.loads(raw)
            message, cursor = entry["MESSAGE"], str(entry["__CURSOR"])
            # Text that is not UTF-8 is a list of byte values.
            text = bytes(message) if isinstance(message, list) else str(message).encode("utf-8", "replace")
            at = int(entry.get("_SOURCE_MONOTONIC_TIMESTAMP") or entry["__MONOTONIC_TIMESTAMP"])
        except (ValueError, KeyError, TypeError):
            return None
        self._has_read = True
        # Places grow though a processor can store a line after a later one of another.
        self._place = place = max(at * _PLACES_PER_MICROSECOND, self._place + 1)
        if place <= self._after:
            return None
        self._after, self._cursor = place, cursor
        priority = str(entry.get("PRIORITY", "6"))[:3]
        at = place // _PLACES_PER_MICROSECOND  # so that times do not go back either
        return place, f"{priority},{place},{at},-;".encode() + text.replace(b"\n", b" ")


class KernelStream:
    """Not thread-safe."""

    def __init__(
        self, reader: KernelReader, origin: Origin, booted_at: datetime | None, kept: Mapping[str, Any]
    ) -> None:
        self.stream = LineStream(origin, booted_at, kept)
        self.reader = reader
        self._origin = origin
        self._booted_at = booted_at
        self._is_live = False  # all existing lines were read, so further ones are new
        self._recent: deque[PlacedLine] = deque(maxlen=4 * MOST_AROUND)  # for excerpts

    @property
    def key(self) -> str:
        return "kernel"

    def place_json(self) -> Mapping[str, Any]:
        oldest = self.stream.oldest_place
        place = {**self.reader.place_json(), "boot": self._origin.generation}
        # The cursor is after the oldest unfinished line, so the journal is read again from the boot on.
        return place if oldest is None else {**place, "next": oldest, "cursor": ""}

    def excerpt(self, place: int) -> Excerpt | None:
        before = [_text(raw) for number, raw in self._recent if number < place]
        if len(before) == len(self._recent) or self._recent[len(before)][0] != place:
            return None
        return excerpt_of(before, [_text(raw) for number, raw in self._recent if number >= place])

    def poll(self, runner: RuleRunner, counters: LogCounters, now: datetime) -> bool:
        """Read new lines; return whether there may be more. Raises OSError."""
        lost = self.reader.lost
        placed = self.reader.read()
        counters.kernel_lines_lost += self.reader.lost - lost
        counters.lines.add(self._origin.source, len(placed))
        self._recent.extend(placed)
        lines = [*self.stream.feed(self._timed(placed, now), now), *self.stream.flush(now)]
        self._is_live = not placed or self._is_live
        if placed or lines:
            runner.take(self, lines)
        runner.add_excerpts(self)
        return bool(placed)

    def _timed(self, placed: list[PlacedLine], now: datetime) -> list[PlacedLine]:
        """Replace timestamps far from the arrival: the kernel's clock drifts by minutes."""
        if not self._is_live or self._booted_at is None:
            return placed
        since_boot = (now - self._booted_at).total_seconds()
        return [(place, with_plausible_time(raw, since_boot)) for place, raw in placed]

    def mark_behind(self) -> None:
        """Expect old lines at the next poll, because reading has paused."""
        self._is_live = False

    def wait(self, seconds: float) -> None:
        fd = self.reader.fileno()
        if fd is None:
            time.sleep(seconds)
            return
        poll = select.poll()
        poll.register(fd, select.POLLIN)
        poll.poll(seconds * 1000)


def with_plausible_time(raw: bytes, since_boot: float) -> bytes:
    """Replace a new line's time if it is far from `since_boot`, in seconds."""
    head, _, text = raw.partition(b";")
    fields = head.split(b",")
    if len(fields) < 3 or not fields[2].isdigit() or abs(int(fields[2]) / 1e6 - since_boot) <= _MAX_CLOCK_ERROR:
        return raw
    fields[2] = str(round(since_boot * 1e6)).encode()
    return b",".join(fields) + b";" + text


def _text(raw: bytes) -> bytes:
    head, _, text = raw.partition(b";")
    fields = head.split(b",")
    return b"[%12.6f] %s" % (int(fields[2]) / 1e6, text) if len(fields) > 2 and fields[2].isdigit() else raw


def choose_reading(kernel: KernelLog, kmsg: str = KMSG, journals: Sequence[str] = _JOURNALS) -> KernelReading:
    """Return the policy's way to read the kernel's log, else the first that works.

    FILE, the last resort, is not read here: `Discovery` finds the policy's file.
    """
    if kernel.by is not KernelReading.ANY:
        return kernel.by
    with contextlib.suppress(OSError):
        reader = KmsgReader(0, kmsg)
        try:
            reader.read()
            return KernelReading.KMSG
        finally:
            reader.close()
    if shutil.which("journalctl") and any(Path(journal).is_dir() for journal in journals):
        return KernelReading.JOURNAL
    return KernelReading.FILE


def open_reader(way: KernelReading, kept: Mapping[str, Any], boot: str, kmsg: str = KMSG) -> KernelReader:
    """Return a reader for KMSG or JOURNAL. Raises OSError.

    It continues at `kept`, a reader's `place_json` with its boot ID, or starts with the boot.
    """
    is_same = kept.get("boot") == boot and kept.get("by") == way.value
    first = int(kept.get("next", 0)) if is_same else 0
    if way is KernelReading.JOURNAL:
        return JournalReader(max(first - 1, 0), str(kept.get("cursor", "")) if is_same else "")
    return KmsgReader(first, kmsg)
