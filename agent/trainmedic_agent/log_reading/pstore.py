"""Kernel panic records, which survive the boot; each is read once.

Findings in them are only reported, because they predate this boot.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime
from operator import itemgetter
from typing import Any

from msgspec.structs import replace

from trainmedic_agent.log_opening.node_files import LogRefused, NodeFiles
from trainmedic_agent.log_opening.own_files import OwnFiles
from trainmedic_agent.log_reading.line_cutter import LineCutter
from trainmedic_agent.log_reading.rule_runner import RuleRunner
from trainmedic_agent.log_reading.streams import LineStream, excerpt_of
from trainmedic_logs.domain.finding import MOST_AROUND, Excerpt, Origin

DIRECTORIES = ("/sys/fs/pstore", "/var/lib/systemd/pstore")
_RECORD = re.compile(r"(?:dmesg|console)[A-Za-z0-9._-]{0,200}\Z")
_PACKED = re.compile(r".+\.(?:z|enc\.z|gz)\Z")
_LARGEST = 1024 * 1024  # bytes read of a record
_MOST_RECORDS = 64  # the newest: systemd archives records without limit
_DEEPEST = 2  # directories below the given ones
_MOST_ENTRIES = 10_000  # entries read of a directory
KEY = "pstore"  # key of the stored position, which lists the records read


class _Record:
    """A record as a `ReadStream`."""

    key = KEY

    def __init__(self, origin: Origin, raw: bytes, read: Sequence[str]) -> None:
        self.stream = LineStream(origin, None, {})
        self.lines = LineCutter().feed(raw if raw.endswith(b"\n") else raw + b"\n")
        self._read = list(read)

    def place_json(self) -> Mapping[str, Any]:
        return {"read": self._read}

    def excerpt(self, place: int) -> Excerpt | None:
        before = [raw for begin, raw in self.lines if begin < place]
        return excerpt_of(before[-MOST_AROUND:], [raw for begin, raw in self.lines if begin >= place])


def read_records(
    runner: RuleRunner,
    origin: Origin,
    kept: Mapping[str, Any],
    tops: Sequence[str] = DIRECTORIES,
    files: NodeFiles = OwnFiles(),
) -> int:
    """Process unread records; return their number. `kept`: the stored state."""
    read = [str(name) for name in kept.get("read", ())]
    count = 0
    for path, written_at in sorted(_records(tops, files), key=itemgetter(1))[-_MOST_RECORDS:]:
        name = f"{path} {written_at:.3f}"
        if name in read:
            continue
        raw = _content(path, files)
        if raw is None:
            continue
        read = [*read, name][-4 * _MOST_RECORDS :]
        record = _Record(replace(origin, stream=path, generation=f"{written_at:.3f}"), raw, read)
        at = datetime.fromtimestamp(written_at, UTC)
        lines = [*record.stream.feed(record.lines, at), *record.stream.flush(None)]
        runner.take(record, lines)
        record.stream.excerpts = [replace(each, due=0.0) for each in record.stream.excerpts]
        runner.add_excerpts(record)
        count += 1
    return count


def _records(tops: Sequence[str], files: NodeFiles) -> Iterator[tuple[str, float]]:
    for top in tops:
        yield from _below(top, 0, files)


def _below(directory: str, depth: int, files: NodeFiles) -> Iterator[tuple[str, float]]:
    try:
        entries = sorted(files.listing(directory, _MOST_ENTRIES).entries, key=lambda entry: entry.name)
        every = files.facts(directory, [entry.name for entry in entries])
    except (OSError, LogRefused):
        return
    for entry, facts in zip(entries, every, strict=True):
        path = f"{directory}/{entry.name}"
        if entry.is_directory:
            if depth < _DEEPEST:
                yield from _below(path, depth + 1, files)
        elif facts is not None and _RECORD.match(entry.name) and not _PACKED.match(entry.name):
            yield path, facts.written_ns / 1e9


def _content(path: str, files: NodeFiles) -> bytes | None:
    try:
        with os.fdopen(files.open(path), "rb") as file:
            return file.read(_LARGEST)
    except (OSError, LogRefused):
        return None
