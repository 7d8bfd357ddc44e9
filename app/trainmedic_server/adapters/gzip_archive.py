"""The archive of deleted runs: gzipped NDJSON in a directory, which other programs read. `ports.archive.RunArchive`.

A file is written whole under another name, forced to the disk, read back, and only then gets its name, so what has one
is complete. A kill in between leaves a file with the ending ``.part``, which the next one overwrites.

There is always a newest file, since a start puts one without runs, numbered 0, into an empty directory. A directory
that has none, or not the newest that is known, is not the archive: its volume is away, or it was made anew.
"""

from __future__ import annotations

import errno
import gzip
import json
import os
import re
import tempfile
import uuid
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from trainmedic_server import errors
from trainmedic_server.ports.archive import ArchivedRun

_NAME = re.compile(r"runs-(\d{8})(-\d{4}-\d{2}-\d{2})?\.ndjson\.gz")
_FIRST = "runs-00000000.ndjson.gz"
_LEVEL = 6
_MISTAKES = {
    *(errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOENT, errno.ENOTDIR),
    *(errno.EEXIST, errno.ELOOP, errno.ENAMETOOLONG, errno.EINVAL),
}
"""What no waiting mends: the place is wrong, or the user's rights are."""


class GzipArchive:
    """Files of runs in `directory`, numbered as they were written; the day is that of the oldest run in one."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory.absolute()

    @property
    def name(self) -> str:
        return str(self._directory)

    def prepare(self) -> None:
        """Make the directory where it is missing, and begin the archive where it is empty; once, when a server starts.

        Raises ConfigurationError where it can be no archive, and ArchiveUnavailable where it cannot be one now, as on
        a full disk.
        """
        try:
            self._directory.mkdir(mode=0o700, parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=self._directory):
                pass  # it can be written
            if not self._files():
                # Under a name of its own: several servers that share the directory may begin it at once.
                _write(self._directory / _FIRST, self._directory / f"{uuid.uuid4().hex}.part", [])
        except ValueError as error:
            raise _unusable(self._directory, error) from error
        except OSError as error:
            unusable = _unusable if error.errno in _MISTAKES else _unavailable
            raise unusable(self._directory, error) from error

    def last(self, at_least: int) -> tuple[int, list[ArchivedRun]]:
        """Return the number of the newest file and its runs, of which a kill may have left some in the store. Raises
        ArchiveUnavailable."""
        try:
            number, path = self._newest(at_least)
            return number, [_of_line(line) for line in _lines(path)]
        except (OSError, ValueError, EOFError) as error:
            raise _unavailable(self._directory, error) from error

    def write(self, archived: Sequence[ArchivedRun], at_least: int) -> int:
        """Write a file of these runs, and return its number; it is on the disk and was read back when this returns.
        Raises ArchiveUnavailable."""
        try:
            number = self._newest(at_least)[0] + 1
            day = min(run.created_at for run in archived).date()
            path = self._directory / f"runs-{number:08}-{day}.ndjson.gz"
            _write(path, self._directory / "runs.part", [run.line for run in archived])
        except (OSError, ValueError, EOFError) as error:
            raise _unavailable(self._directory, error) from error
        return number

    def _newest(self, at_least: int) -> tuple[int, Path]:
        files = self._files()
        number, path = max(files, default=(-1, self._directory))
        if number < at_least:
            begun = "" if files or at_least else ", nor any other; start the server again to begin an archive there"
            raise errors.ArchiveUnavailable(
                f"the archive {self._directory}: its file number {at_least} is not there{begun}. Is its volume "
                "mounted? If so put its newest file back, or name another directory for another archive"
            )
        return number, path

    def _files(self) -> list[tuple[int, Path]]:
        named = ((_NAME.fullmatch(path.name), path) for path in self._directory.iterdir())
        return [(int(match[1]), path) for match, path in named if match]


def _write(path: Path, part: Path, content: Sequence[str]) -> None:
    with open(part, "wb", opener=_for_its_owner) as file:
        with gzip.GzipFile(fileobj=file, mode="wb", compresslevel=_LEVEL, filename="") as written:
            written.writelines(line.encode() + b"\n" for line in content)
        file.flush()
        os.fsync(file.fileno())
    if _lines(part) != list(content):
        raise OSError("what was written reads back differently")
    part.rename(path)
    _sync(path.parent)


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


def _unusable(directory: Path, error: Exception) -> errors.ConfigurationError:
    return errors.ConfigurationError(
        f"--archive: {str(directory)!r}: {_words(error)}; name a directory that the server may make and write to"
    )


def _unavailable(directory: Path, error: Exception) -> errors.ArchiveUnavailable:
    return errors.ArchiveUnavailable(f"the archive {directory}: {_words(error)}")


def _words(error: Exception) -> str:
    return getattr(error, "strerror", None) or str(error)
