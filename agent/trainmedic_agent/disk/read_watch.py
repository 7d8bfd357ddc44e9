"""Watch for reads by inotify(7), where access times do not record them.

A file opened during the watch is in use, with its matched siblings, such as a training's other shards. An unwatchable
directory counts as possibly in use. Reads from other machines are invisible.
"""

from __future__ import annotations

import ctypes
import math
import os
import struct
from collections.abc import Iterable
from contextlib import closing

from msgspec.structs import replace

from trainmedic_agent.disk.report import Reason
from trainmedic_agent.disk.search import MatchedCheckpoint, MatchedFile
from trainmedic_agent.disk.throttle import Throttle
from trainmedic_agent.disk.walk import WalkedDirectory

WATCH_SECONDS = 60.0  # longest wait for reads
_STEP_SECONDS = 0.5  # interval between reads of the queue
_MAX_OPENED = 100_000  # names in memory; with more, events count as lost
_EVENT = struct.Struct("iIII")  # watch, kind, cookie, length of the name
_BUFFER_BYTES = 64 * 1024
# From inotify(7).
_OPEN, _OVERFLOW, _IS_DIRECTORY, _ONLY_DIRECTORY = 0x20, 0x4000, 0x40000000, 0x01000000
_NO_WATCH = -1  # number in place of a watch that the kernel refused

_libc = ctypes.CDLL(None, use_errno=True)


class ReadWatch:
    """`seconds`: the rule's ``min_age``, which no watch exceeds."""

    def __init__(self, seconds: float, throttle: Throttle) -> None:
        self._seconds = min(seconds, WATCH_SECONDS)
        self._throttle = throttle
        self._queue: int | None = None  # -1 if the kernel refused it
        self._is_blind = False  # True if events were lost
        self._watches: dict[WalkedDirectory, set[int]] = {}
        # Matched files. In other directories every file counts.
        self._matched_names: dict[WalkedDirectory, set[str]] = {}
        self._opened: dict[int, set[str]] = {}  # names of opened files, by watch
        self._opened_count = 0
        self._own_opens: set[tuple[int, str]] = set()

    def close(self) -> None:
        if self._queue is not None and self._queue >= 0:
            os.close(self._queue)

    def watch_files(self, files: Iterable[MatchedFile]) -> None:
        """Watch the files' directories where access times are untraced, instead of earlier ones.

        This waits up to `WATCH_SECONDS`; the watch continues afterwards.
        """
        self._watches.clear()
        self._matched_names.clear()
        for file in files:
            if file.directory.root.access_times.untraced:
                self._matched_names.setdefault(file.directory, set()).add(file.name)
        self._watch(self._matched_names, is_recursive=False)

    def watch_checkpoints(self, matched: Iterable[MatchedCheckpoint]) -> None:
        self._watch(
            (each.directory for each in matched if each.directory.root.access_times.untraced),
            is_recursive=True,
        )

    def obstacle(self, directory: WalkedDirectory) -> Reason | None:
        """Return why nothing in a watched directory may be deleted; None if nothing was read."""
        if not directory.root.access_times.untraced or not self._seconds:
            return None
        self._read_queue()
        numbers = self._watches.get(directory, {_NO_WATCH})
        if self._is_blind or _NO_WATCH in numbers:
            return Reason.OPEN_UNKNOWN
        names = self._matched_names.get(directory)
        opened = (name for number in numbers for name in self._opened[number])
        return Reason.READ if any(names is None or name in names for name in opened) else None

    def ignore(self, directory: WalkedDirectory, name: str) -> None:
        """Ignore the agent's own open of a file, found by the next read of the queue."""
        self._own_opens.update((number, name) for number in self._watches.get(directory, ()))

    def _watch(self, directories: Iterable[WalkedDirectory], *, is_recursive: bool) -> None:
        if not self._seconds:
            return
        before = len(self._opened)  # a directory that is watched since an earlier batch needs no further wait
        for directory in directories:
            if not self._throttle.may_continue():
                return
            self._watches[directory] = self._add(directory, is_recursive)
        for _ in range(math.ceil(self._seconds / _STEP_SECONDS) if len(self._opened) > before else 0):
            self._throttle.wait(_STEP_SECONDS)
            self._read_queue()
            if not self._throttle.may_continue():
                return

    def _add(self, directory: WalkedDirectory, is_recursive: bool) -> set[int]:
        """Return watch numbers, with `_NO_WATCH` after an error."""
        numbers: set[int] = set()

        def add(inner: WalkedDirectory, _: bool = True) -> bool:
            # By descriptor: the path may lead elsewhere by now.
            number = self._add_watch(f"/proc/self/fd/{inner.fd}")
            numbers.add(number)
            if number != _NO_WATCH:
                self._opened.setdefault(number, set())
            return True

        try:
            fd = directory.reopen()
        except OSError:
            return {_NO_WATCH}
        try:
            opened = replace(directory, fd=fd)
            if not is_recursive:
                add(opened)
                return numbers
            with closing(opened.walk_all(self._throttle, lambda *_: None, add)) as entries:
                for _ in entries:
                    pass
            return numbers
        finally:
            os.close(fd)

    def _add_watch(self, path: str) -> int:
        if self._queue is None:
            self._queue = int(_libc.inotify_init1(os.O_NONBLOCK | os.O_CLOEXEC))
        return int(_libc.inotify_add_watch(self._queue, path.encode(), _OPEN | _ONLY_DIRECTORY))

    def _read_queue(self) -> None:
        while self._queue is not None and self._queue >= 0 and not self._is_blind:
            try:
                events = os.read(self._queue, _BUFFER_BYTES)
            except BlockingIOError:
                break
            at = 0
            while at < len(events):
                number, kind, _, length = _EVENT.unpack_from(events, at)
                at += _EVENT.size + length
                if kind & _OVERFLOW:
                    self._is_blind = True
                elif kind & _OPEN and not kind & _IS_DIRECTORY and number in self._opened:
                    self._add_opened(number, os.fsdecode(events[at - length : at].rstrip(b"\0")))
        self._own_opens.clear()

    def _add_opened(self, number: int, name: str) -> None:
        if (number, name) in self._own_opens or name in self._opened[number]:
            return
        self._opened[number].add(name)
        self._opened_count += 1
        self._is_blind |= self._opened_count > _MAX_OPENED
