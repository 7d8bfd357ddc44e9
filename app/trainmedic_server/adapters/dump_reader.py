"""Reads the dumps of PyTorch's flight recorder in a process that can do nothing else (`dump_child`).

Blocking: who serves others meanwhile calls it in a thread.
"""

from __future__ import annotations

import json
import os
import re
import stat
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from trainmedic_server.adapters import dump_child
from trainmedic_server.diagnosis.flight_recorder import dump
from trainmedic_server.diagnosis.flight_recorder.dump import Dump
from trainmedic_server.errors import DumpError

MOST_DUMPS = 4096
"""Of one job."""
_AT_ONCE = 32
"""Dumps in one process. Its start takes as long as reading twenty."""
_RANK = re.compile(r"(?:^|[^0-9])(\d{1,7})(?:\.(?:json|pkl|pickle|pt|bin))?$")


def rank_of(name: str) -> int | None:
    """The rank that a dump's file name ends in: 12 of ``nccl_trace_rank_12``, ``_dump_12``, ``rank-12.json``."""
    found = _RANK.search(name)
    return int(found[1]) if found else None


def read_files(paths: Sequence[Path]) -> tuple[list[Dump], dict[Path, str]]:
    """The dumps in `paths`, and why the others are none; at most `MOST_DUMPS` are read."""
    dumps: list[Dump] = []
    refused: dict[Path, str] = dict.fromkeys(paths[MOST_DUMPS:], f"more than {MOST_DUMPS} dumps")
    raw: dict[Path, bytes] = {}
    for path in paths[:MOST_DUMPS]:
        try:
            raw[path] = _bytes_of(path)
        except OSError as error:
            refused[path] = error.strerror or str(error)
        except DumpError as error:
            refused[path] = str(error)
        is_much = len(raw) == _AT_ONCE or sum(map(len, raw.values())) > dump.MOST_BYTES
        if is_much or path == paths[:MOST_DUMPS][-1]:
            answers = read_raw([(rank_of(path.name) or 0, each) for path, each in raw.items()])
            for path, answer in zip(raw, answers, strict=True):
                if isinstance(answer, Dump):
                    dumps.append(answer)
                else:
                    refused[path] = answer
            raw = {}
    return dumps, refused


def read_raw(raw: Sequence[tuple[int, bytes]], most_memory: int = dump_child.MEMORY) -> list[Dump | str]:
    """Of each rank's bytes the dump, or why it is none. One process reads them all; after one that ends it, another
    goes on with the next. ``most_memory`` is the bytes of address space that such a process may have."""
    read: list[Dump | str] = []
    while len(read) < len(raw):
        waiting = raw[len(read) :]
        answers = _answers(waiting, most_memory)
        for answer in answers:
            reply = json.loads(answer)
            read.append(dump.from_taken(reply["dump"]) if "dump" in reply else reply["refused"])
        if len(answers) < len(waiting):
            read.append("it takes more time or memory than a dump may")
    return read


def _bytes_of(path: Path) -> bytes:
    if rank_of(path.name) is None:
        raise DumpError("its name does not end in a rank")
    # A FIFO would never end, a link leads elsewhere.
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    with os.fdopen(descriptor, "rb") as file:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise DumpError("it is no file")
        raw = file.read(dump.MOST_BYTES + 1)
    if len(raw) > dump.MOST_BYTES:
        raise DumpError(f"it has more than {dump.MOST_BYTES:,} bytes")
    return raw


def _answers(dumps: Sequence[tuple[int, bytes]], most_memory: int) -> list[bytes]:
    """The child's whole answers, in the order of the dumps; fewer than dumps where it ended."""
    said = b"".join(b"%d %d\n%s" % (rank, len(raw), raw) for rank, raw in dumps)
    seconds = dump_child.SECONDS_PER_DUMP * len(dumps) + 30
    # No environment: what stands in it, such as tokens, is none of the dump's business.
    environment = {"PYTHONPATH": os.pathsep.join(entry for entry in sys.path if entry)}
    command = [sys.executable, "-P", "-m", dump_child.__name__, str(most_memory)]
    try:
        done = subprocess.run(  # noqa: S603 - our own program; what others wrote is its input alone
            command, input=said, capture_output=True, env=environment, timeout=seconds, check=False
        )
        output = done.stdout
    except subprocess.TimeoutExpired as error:
        output = error.stdout or b""
    return output.split(b"\n")[:-1]
