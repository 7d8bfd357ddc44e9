"""Blocking reader of dumps in a confined process."""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Self

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from trainmedic_core.confined_process import START_SECONDS, ConfinedProcess, ExecutedProgram, StartsPrograms
from trainmedic_logs.diagnosis.flight_recorder import dump
from trainmedic_logs.diagnosis.flight_recorder.dump import Dump, ProcessGroup
from trainmedic_logs.errors import DumpError
from trainmedic_logs.files import dump_child
from trainmedic_logs.files.reading_limits import ReadingLimits

MOST_DUMPS = 4096
"""Per call."""
# An answer takes at most 1/64 of the memory: the values that Python makes of it take up to ten times as much.
_ANSWER_SHARE = 64
_WALL_SECONDS = 60  # per dump
_ENDED = "it takes more time or memory than a dump may"
_RANK = re.compile(r"(?:^|[^0-9])(\d{1,7})(?:\.(?:json|pkl|pickle|pt|bin))?$")


def rank_of(name: str) -> int | None:
    """Return the rank in a file name such as ``nccl_trace_rank_12`` or ``rank-12.json``."""
    found = _RANK.search(name)
    return int(found[1]) if found else None


def read_files(paths: Sequence[Path], limits: ReadingLimits | None = None) -> tuple[list[Dump], dict[Path, str]]:
    """Return dumps, and why others were refused."""
    limits = limits or ReadingLimits()
    dumps: list[Dump] = []
    refused: dict[Path, str] = dict.fromkeys(paths[MOST_DUMPS:], f"more than {MOST_DUMPS} dumps")
    shared = SharedParts()
    longest = min(dump_child.LONGEST_ANSWER, limits.memory // _ANSWER_SHARE)
    with DumpProcess(min(dump_child.MEMORY, limits.memory), longest, lambda: limits.seconds_left) as process:
        for path in paths[:MOST_DUMPS]:
            try:
                limits.check()
                # `_bytes_of` refuses a name without a rank.
                answer = process.read(rank_of(path.name) or 0, _bytes_of(path))
                limits.check()
            except OSError as error:
                refused[path] = error.strerror or str(error)
            except DumpError as error:
                refused[path] = str(error)
            else:
                if isinstance(answer, Dump):
                    dumps.append(shared.of(answer))
                else:
                    refused[path] = answer
    return dumps, refused


def read_raw(
    raw: Sequence[tuple[int, bytes]],
    most_memory: int = dump_child.MEMORY,
    longest_answer: int = dump_child.LONGEST_ANSWER,
    start: StartsPrograms = ExecutedProgram,
) -> list[Dump | str]:
    """Return each rank's dump, or why there is none. Raises OSError.

    `most_memory` (address space) and `longest_answer` are in bytes.
    """
    with DumpProcess(most_memory, longest_answer, start=start) as process:
        return [process.read(rank, each) for rank, each in raw]


class SharedParts:
    """Shared copies of equal groups and texts: 4,096 ranks list the same members."""

    def __init__(self) -> None:
        self._groups: dict[ProcessGroup, ProcessGroup] = {}
        self._texts: dict[str, str] = {}

    def of(self, read: Dump) -> Dump:
        by_id: dict[int, ProcessGroup] = {}

        def group_of(group: ProcessGroup) -> ProcessGroup:
            # By identity first: hashing a group reads all its members.
            if id(group) not in by_id:
                by_id[id(group)] = self._groups.setdefault(group, group)
            return by_id[id(group)]

        groups = tuple(group_of(group) for group in read.groups)
        entries = tuple(
            replace(
                entry,
                group=group_of(entry.group),
                operation=self._texts.setdefault(entry.operation, entry.operation),
                sizes=self._texts.setdefault(entry.sizes, entry.sizes),
            )
            for entry in read.entries
        )
        return replace(read, groups=groups, entries=entries)


class _Answer(Struct):
    dump: dump.Taken | None = None
    refused: str | None = None


_DECODER = msgspec.json.Decoder(_Answer)


class DumpProcess:
    """Client of the confined parser, started on demand."""

    def __init__(
        self,
        most_memory: int,
        longest_answer: int,
        seconds_left: Callable[[], float] = lambda: float("inf"),
        start: StartsPrograms = ExecutedProgram,
    ) -> None:
        self._longest_answer = longest_answer
        self._seconds_left = seconds_left
        limits = (str(most_memory), str(longest_answer))
        self._process = ConfinedProcess(dump_child.__name__, limits, longest_answer, start)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.end()

    def read(self, rank: int, raw: bytes) -> Dump | str:
        seconds = min(_WALL_SECONDS + START_SECONDS, self._seconds_left())
        line = self._process.ask(b"%d %d\n%s" % (rank, len(raw), raw), seconds)
        if not line.endswith(b"\n"):
            self.end()
            return dump_child.TOO_MUCH if len(line) > self._longest_answer else _ENDED
        try:
            answer = _DECODER.decode(line)
            return dump.from_taken(answer.dump) if answer.dump is not None else answer.refused or _ENDED
        except (msgspec.MsgspecError, IndexError):
            self.end()
            return "the dump parser sent an invalid answer"

    def end(self) -> None:
        self._process.end()


def _bytes_of(path: Path) -> bytes:
    if rank_of(path.name) is None:
        raise DumpError("its name does not end in a rank")
    # A FIFO would never end, and a link leads elsewhere.
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    with os.fdopen(descriptor, "rb") as file:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise DumpError("it is not a regular file")
        raw = file.read(dump.MOST_BYTES + 1)
    if len(raw) > dump.MOST_BYTES:
        raise DumpError(f"it has more than {dump.MOST_BYTES:,} bytes")
    return raw
