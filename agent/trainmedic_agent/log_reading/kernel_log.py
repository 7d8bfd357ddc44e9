"""The kernel's log, from the start of the boot on: by ``/dev/kmsg``, or by the journal.

Both keep what was logged before the agent was started. A line's place is its number in ``/dev/kmsg``, and by the
journal the kernel's time since boot in microseconds, so a line that is read again has the same place. Who reads from a
file such as ``kern.log`` follows it like others (``files``). What the kernel has lost before it was read is counted.
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
_LARGEST_RECORD = 8192
"""Bytes of a record of ``/dev/kmsg`` at most (printk's CONSOLE_EXT_LOG_MAX)."""
_MOST_AT_ONCE = 2000
_JOURNAL_PIECE = 64 * 1024
_LONGEST_ENTRY = 256 * 1024
_RESTART_SECONDS = 5.0
_FAR_OFF = 2.0
"""Seconds by which the kernel's own time of a line may be wrong."""
_SAME_MICROSECOND = 16
"""So many lines of one microsecond have places of their own."""


class KernelReader(Protocol):
    """One way to read it."""

    lost: int
    """Lines that the kernel had overwritten before they were read."""

    def fileno(self) -> int | None:
        """What can be waited for with poll(2); None where there is nothing now."""
        ...

    def read(self) -> list[PlacedLine]:
        """The next lines, as ``/dev/kmsg`` has them; none where there are none now. Raises OSError."""
        ...

    def place_json(self) -> Mapping[str, Any]:
        """What it needs to go on after a restart, beside the place."""
        ...

    def close(self) -> None: ...


def own_kmsg(path: str) -> int:
    """Open the kernel's log with the rights of this process. Raises OSError."""
    return os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOCTTY)


open_kmsg: Callable[[str], int] = own_kmsg
"""Opens ``/dev/kmsg``. A reader without capabilities has the opener do it."""


class KmsgReader:
    """Records of ``/dev/kmsg``, from number `first` on."""

    def __init__(self, first: int, path: str = KMSG) -> None:
        """Raises OSError where it may not be read."""
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
                continue  # overwritten while it was to be read; the next number says how many are lost
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
    """The kernel's lines of this boot as journald has them, by a ``journalctl`` that goes on as long as this does."""

    def __init__(self, after: int, cursor: str, command: str = "journalctl") -> None:
        """`after` is the last place that was read, 0 for none; `cursor` is its journal's name, which spares reading
        what was before."""
        self.lost = 0
        self._after = after
        self._cursor = cursor
        self._command = command
        self._process: subprocess.Popen[bytes] | None = None
        self._begun = b""
        self._start_at = 0.0
        self._has_read = False
        self._microsecond = (0, 0)

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
            self._ended()
            return []
        *entries, self._begun = (self._begun + piece).split(b"\n")
        if len(self._begun) > _LONGEST_ENTRY:
            self._begun = b""  # its end will not be JSON, and is left out as well
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
        self._begun, self._has_read, self._microsecond = b"", False, (0, 0)
        return True

    def _ended(self) -> None:
        """It has gone: with a cursor that the journal does not have any more, without one next time."""
        if not self._has_read:
            self._cursor = ""
        self.close()

    def _line(self, raw: bytes) -> PlacedLine | None:
        try:
            entry = json.loads(raw)
            message, cursor = entry["MESSAGE"], str(entry["__CURSOR"])
            # Text that is not UTF-8 comes as the numbers of its bytes.
            text = bytes(message) if isinstance(message, list) else str(message).encode("utf-8", "replace")
            at = int(entry.get("_SOURCE_MONOTONIC_TIMESTAMP") or entry["__MONOTONIC_TIMESTAMP"])
        except (ValueError, KeyError, TypeError):
            return None
        self._has_read = True
        same = self._microsecond[1] + 1 if self._microsecond[0] == at else 0
        self._microsecond = (at, same)
        place = at * _SAME_MICROSECOND + min(same, _SAME_MICROSECOND - 1)
        if place <= self._after:
            return None
        self._after, self._cursor = place, cursor
        priority = str(entry.get("PRIORITY", "6"))[:3]
        return place, f"{priority},{place},{at},-;".encode() + text.replace(b"\n", b" ")


class KernelStream:
    """The kernel's lines on their way to the rules. One thread uses it."""

    def __init__(
        self, reader: KernelReader, origin: Origin, booted_at: datetime | None, kept: Mapping[str, Any]
    ) -> None:
        self.stream = LineStream(origin, booted_at, kept)
        self.reader = reader
        self._origin = origin
        self._booted_at = booted_at
        self._is_live = False  # all lines that were there have been read, so what comes is new
        self._recent: deque[PlacedLine] = deque(maxlen=4 * MOST_AROUND)

    @property
    def key(self) -> str:
        return "kernel"

    def place_json(self) -> Mapping[str, Any]:
        oldest = self.stream.oldest_place
        place = {**self.reader.place_json(), "boot": self._origin.generation}
        return place if oldest is None else {**place, "next": oldest, "cursor": ""}

    def excerpt(self, place: int) -> Excerpt | None:
        recent = [(number, _text(raw)) for number, raw in self._recent]
        before = [raw for number, raw in recent if number < place]
        after = [raw for number, raw in recent if number >= place]
        return excerpt_of(before, after) if after and recent[len(before)][0] == place else None

    def poll(self, runner: RuleRunner, counters: LogCounters, now: datetime) -> bool:
        """Read what is new; return whether there may be more. Raises OSError."""
        lost = self.reader.lost
        placed = self.reader.read()
        counters.add_kernel_lines_lost(self.reader.lost - lost)
        counters.lines(self._origin.source, len(placed))
        self._recent.extend(placed)
        lines = [*self.stream.feed(self._timed(placed, now), now), *self.stream.flush(now)]
        self._is_live = not placed or self._is_live
        if placed or lines:
            runner.take(self, lines)
        runner.add_excerpts(self)
        return bool(placed)

    def _timed(self, placed: list[PlacedLine], now: datetime) -> list[PlacedLine]:
        """Lines with the time at which they came, where the kernel's own is far from that: the clock by which it logs
        is not corrected, and after months it is minutes off."""
        if not self._is_live or self._booted_at is None:
            return placed
        since_boot = (now - self._booted_at).total_seconds()
        return [(place, retimed(raw, since_boot)) for place, raw in placed]

    def fall_behind(self) -> None:
        """Lines are not read for now: when they are, they are not new any more."""
        self._is_live = False

    def wait(self, seconds: float) -> None:
        """Wait until there is something to read, so many seconds at most."""
        fd = self.reader.fileno()
        if fd is None:
            time.sleep(seconds)
            return
        poll = select.poll()
        poll.register(fd, select.POLLIN)
        poll.poll(seconds * 1000)


def retimed(raw: bytes, since_boot: float) -> bytes:
    """A line that has just come, with this time in the place of the kernel's where they are far from each other."""
    head, _, text = raw.partition(b";")
    fields = head.split(b",")
    if len(fields) < 3 or not fields[2].isdigit() or abs(int(fields[2]) / 1e6 - since_boot) <= _FAR_OFF:
        return raw
    fields[2] = str(round(since_boot * 1e6)).encode()
    return b",".join(fields) + b";" + text


def _text(raw: bytes) -> bytes:
    """A line of ``/dev/kmsg`` as people know it: with the seconds since boot."""
    head, _, text = raw.partition(b";")
    fields = head.split(b",")
    return b"[%12.6f] %s" % (int(fields[2]) / 1e6, text) if len(fields) > 2 and fields[2].isdigit() else raw


def way_of(kernel: KernelLog, kmsg: str = KMSG, journals: Sequence[str] = _JOURNALS) -> KernelReading:
    """How the kernel's log is read here: as the policy says, or by the first way that works."""
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


def opened(way: KernelReading, kept: Mapping[str, Any], boot: str, kmsg: str = KMSG) -> KernelReader:
    """A reader that goes on where the one before has ended; from the boot's start if that was before the boot.

    Raises OSError.
    """
    is_same = kept.get("boot") == boot and kept.get("by") == way.value
    first = int(kept.get("next", 0)) if is_same else 0
    if way is KernelReading.JOURNAL:
        return JournalReader(max(first - 1, 0), str(kept.get("cursor", "")) if is_same else "")
    return KmsgReader(first, kmsg)
