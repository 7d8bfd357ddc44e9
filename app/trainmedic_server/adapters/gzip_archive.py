"""Archive of deleted runs: gzipped NDJSON files.

A file gets its name after it was synced and read back. An empty directory gets a file 0. So a missing newest file
shows a missing or recreated volume.
"""

from __future__ import annotations

import contextlib
import errno
import gzip
import json
import os
import re
import tempfile
import time
import uuid
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from trainmedic_server import errors
from trainmedic_server.adapters.foreign_answers import UNREADABLE
from trainmedic_server.ports.archive import ArchivedRun

_NAME = re.compile(r"runs-([0-9]{8,18})(-\d{4}-\d{2}-\d{2})?\.ndjson\.gz")
_FIRST = "runs-00000000.ndjson.gz"
_LEVEL = 6  # Of gzip.
_ABANDONED_AFTER_SECONDS = 86400.0  # Another server may still write a younger part.
_FAULTS = (OSError, EOFError, zlib.error, *UNREADABLE)
# Errors of filesystems without hard links.
_NO_LINKS = {errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK}
_CONFIGURATION_ERRORS = {  # Waiting does not end them.
    *(errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOENT, errno.ENOTDIR),
    *(errno.EEXIST, errno.ELOOP, errno.ENAMETOOLONG, errno.EINVAL),
}


class GzipArchive:
    def __init__(self, directory: Path) -> None:
        self._directory = directory.absolute()

    @property
    def name(self) -> str:
        return str(self._directory)

    def prepare(self) -> None:
        """Begin the archive in an empty directory. Raises ConfigurationError, or ArchiveUnavailable if waiting may help
        (disk full).
        """
        try:
            self._directory.mkdir(mode=0o700, parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=self._directory):
                pass  # It is writable.
            self._remove_abandoned()
            if not self._files():
                with contextlib.suppress(FileExistsError):  # Several servers that share it may begin it at once.
                    _write(self._directory / _FIRST, [])
        except ValueError as error:
            raise _unusable(self._directory, error) from error
        except OSError as error:
            unusable = _unusable if error.errno in _CONFIGURATION_ERRORS else _unavailable
            raise unusable(self._directory, error) from error

    def last(self, at_least: int) -> tuple[int, list[ArchivedRun]]:
        try:
            number, path = self._newest(at_least)
            return number, [_of_line(line) for line in _lines(path)]
        except _FAULTS as error:
            raise _unavailable(self._directory, error) from error

    def write(self, archived: Sequence[ArchivedRun], at_least: int) -> int:
        try:
            number = self._newest(at_least)[0] + 1
            day = min(run.created_at for run in archived).date()
            path = self._directory / f"runs-{number:08}-{day}.ndjson.gz"
            _write(path, [run.line for run in archived])
        except _FAULTS as error:
            raise _unavailable(self._directory, error) from error
        return number

    def _newest(self, at_least: int) -> tuple[int, Path]:
        files = self._files()
        number, path = max(files, default=(-1, self._directory))
        if number < at_least:
            hint = "" if files or at_least else ", nor any other; start the server again to begin an archive there"
            raise errors.ArchiveUnavailable(
                f"the archive {self._directory}: its file number {at_least} is missing{hint}. Is its volume "
                "mounted? If so put its newest file back, or name another directory for another archive"
            )
        return number, path

    def _remove_abandoned(self) -> None:
        for part in self._directory.glob("*.part"):
            with contextlib.suppress(OSError):
                if time.time() - part.lstat().st_mtime > _ABANDONED_AFTER_SECONDS:
                    part.unlink()

    def _files(self) -> list[tuple[int, Path]]:
        named = ((_NAME.fullmatch(path.name), path) for path in self._directory.iterdir())
        return [(int(match[1]), path) for match, path in named if match]


def _write(path: Path, content: Sequence[str]) -> None:
    part = path.parent / f"{uuid.uuid4().hex}.part"
    try:
        with open(part, "xb", opener=lambda path, flags: os.open(path, flags, 0o600)) as file:
            with gzip.GzipFile(fileobj=file, mode="wb", compresslevel=_LEVEL, filename="") as written:
                written.writelines(line.encode() + b"\n" for line in content)
            file.flush()
            os.fsync(file.fileno())
        if _lines(part) != list(content):
            raise OSError("what was written reads back differently")
        _give_name(part, path)
        _sync(path.parent)
    finally:
        part.unlink(missing_ok=True)


def _give_name(part: Path, path: Path) -> None:
    """Raises FileExistsError: unlike a rename, a link replaces no file of another server."""
    try:
        os.link(part, path)
    except OSError as error:
        if error.errno not in _NO_LINKS:
            raise
        if path.exists():
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(path)) from None
        part.rename(path)


def _of_line(line: str) -> ArchivedRun:
    document: dict[str, Any] = json.loads(line)
    run_id = document["run"]["id"]
    if not isinstance(run_id, str):
        raise ValueError("the id of a run is none")
    return ArchivedRun.of(run_id, document, line)


def _lines(path: Path) -> list[str]:
    with gzip.open(path, "rt", encoding="utf-8", newline="\n") as file:
        return [line.removesuffix("\n") for line in file]


def _sync(directory: Path) -> None:
    handle = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _unusable(directory: Path, error: Exception) -> errors.ConfigurationError:
    return errors.ConfigurationError(
        f"--archive: {str(directory)!r}: {_reason(error)}; use a directory that the server can create and write"
    )


def _unavailable(directory: Path, error: Exception) -> errors.ArchiveUnavailable:
    return errors.ArchiveUnavailable(f"the archive {directory}: {_reason(error)}")


def _reason(error: Exception) -> str:
    if isinstance(error, UNREADABLE) and not isinstance(error, ValueError):
        return f"its newest file does not contain runs ({type(error).__name__})"
    return getattr(error, "strerror", None) or str(error)
