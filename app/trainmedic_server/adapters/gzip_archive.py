"""The archive of deleted runs: gzipped NDJSON in a directory, which other programs read. `ports.archive.RunArchive`.

A file is written whole under another name, forced to the disk, read back, and only then gets its name, so what has one
is complete. A kill in between leaves a file with the ending ``.part``, which the next one overwrites.
"""

from __future__ import annotations

import gzip
import json
import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from trainmedic_server import errors
from trainmedic_server.ports.archive import ArchivedRun

_NAME = re.compile(r"runs-(\d{8})-\d{4}-\d{2}-\d{2}\.ndjson\.gz")
_LEVEL = 6


class GzipArchive:
    """Files of runs in `directory`, numbered as they were written; the day is that of the oldest run in one."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory

    def last(self) -> list[ArchivedRun]:
        """Return the runs of the newest file, of which a kill may have left some in the store. Raises
        ArchiveUnavailable."""
        try:
            newest = max(self._files(), default=None)
            return [] if newest is None else [_of_line(line) for line in _lines(newest[1])]
        except (OSError, ValueError, EOFError) as error:
            raise _unavailable(self._directory, error) from error

    def write(self, archived: Sequence[ArchivedRun]) -> None:
        """Write a file of these runs; it is on the disk and was read back when this returns. Raises
        ArchiveUnavailable."""
        try:
            self._directory.mkdir(mode=0o700, parents=True, exist_ok=True)
            number = max((number for number, _ in self._files()), default=0) + 1
            day = min(run.created_at for run in archived).date()
            path = self._directory / f"runs-{number:08}-{day}.ndjson.gz"
            part = path.with_name("runs.part")
            content = [run.line for run in archived]
            with open(part, "wb", opener=_for_its_owner) as file:
                with gzip.GzipFile(fileobj=file, mode="wb", compresslevel=_LEVEL, filename="") as written:
                    written.writelines(line.encode() + b"\n" for line in content)
                file.flush()
                os.fsync(file.fileno())
            if _lines(part) != content:
                raise OSError("what was written reads back differently")
            part.rename(path)
            _sync(self._directory)
        except (OSError, ValueError, EOFError) as error:
            raise _unavailable(self._directory, error) from error

    def _files(self) -> list[tuple[int, Path]]:
        if not self._directory.exists():
            return []
        named = ((_NAME.fullmatch(path.name), path) for path in self._directory.iterdir())
        return [(int(match[1]), path) for match, path in named if match]


def _of_line(line: str) -> ArchivedRun:
    document: dict[str, Any] = json.loads(line)
    return ArchivedRun.of(document["run"]["id"], document, line)


def _lines(path: Path) -> list[str]:
    with gzip.open(path, "rt", encoding="utf-8", newline="\n") as file:
        return [line.removesuffix("\n") for line in file]


def _for_its_owner(path: str, flags: int) -> int:
    return os.open(path, flags, 0o600)


def _sync(directory: Path) -> None:
    handle = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _unavailable(directory: Path, error: Exception) -> errors.ArchiveUnavailable:
    return errors.ArchiveUnavailable(f"the archive {directory}: {getattr(error, 'strerror', None) or error}")
