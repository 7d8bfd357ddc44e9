from __future__ import annotations

import io
import os
import stat
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

from trainmedic_core import yaml_text
from trainmedic_core.problems import FileProblem

MOST_DOCUMENTS = 500
"""Per file."""
MOST_PROBLEMS = 100
"""Reported per file."""
MOST_FILES = 1_000  # of all folders of a library
MOST_ENTRIES = 10_000
"""Entries of a directory."""
TEST_SUFFIX = "_test"
TEMPLATE_SUFFIX = "_template"
"""Suffix of a file for a playbook's step."""
LOG_RULE = "log_rule"
_ENDINGS = (".yaml", ".yml")


def read_text(path: Path) -> str | FileProblem:
    raw = read(path)
    return raw if isinstance(raw, FileProblem) else yaml_text.decode(raw, str(path))


def read(path: Path) -> bytes | FileProblem:
    """Return a file's bytes, up to one over `MAX_BYTES`, or the problem."""
    try:
        # Non-blocking: a named pipe would wait for its writer.
        with os.fdopen(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb", buffering=0) as file:
            if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                return FileProblem(str(path), None, None, "not a regular file")
            # The extra byte shows `yaml_text.decode` that the file is too large.
            return _read_up_to(file, yaml_text.MAX_BYTES + 1)
    except FileNotFoundError:
        return FileProblem(str(path), None, None, "there is no such file")
    except (OSError, ValueError) as error:
        return FileProblem(str(path), None, None, _unreadable(error))


def _read_up_to(file: io.FileIO, most: int) -> bytes:
    raw = b""
    while len(raw) < most and (piece := file.read(most - len(raw))):
        raw += piece
    return raw


def _unreadable(error: Exception) -> str:
    return f"cannot be read: {getattr(error, 'strerror', None) or type(error).__name__}"


def document_files(root: Path) -> Iterator[Path | FileProblem]:
    """Yield the files of playbooks and log rules at `root`, one directory deep, sorted, and problems.

    Names that begin with a dot are skipped: drafts of editors, or Kubernetes' ``..data``.
    """
    for path in _yaml_files(root):
        if isinstance(path, FileProblem) or path == root or not (is_test(path) or is_template(path)):
            yield path


def test_files(root: Path) -> Iterator[Path]:
    yield from (path for path in _yaml_files(root) if isinstance(path, Path) and is_test(path))


def is_template(path: Path) -> bool:
    return path.stem.endswith(TEMPLATE_SUFFIX)


def is_test(path: Path) -> bool:
    return path.stem.endswith(TEST_SUFFIX)


def _yaml_files(root: Path) -> Iterator[Path | FileProblem]:
    try:
        is_directory = stat.S_ISDIR(root.stat().st_mode)
    except (OSError, ValueError) as error:
        is_absent = isinstance(error, (FileNotFoundError, NotADirectoryError)) and not root.is_symlink()
        message = "there is no such file or directory" if is_absent else _unreadable(error)
        yield FileProblem(str(root), None, None, message)
        return
    if not is_directory:
        yield root
        return
    for path in _visible_entries(root):
        if isinstance(path, FileProblem) or (path.suffix in _ENDINGS and not _is_directory(path)):
            yield path
        elif _is_directory(path):
            for inner in _visible_entries(path):
                if isinstance(inner, FileProblem) or (inner.suffix in _ENDINGS and not _is_directory(inner)):
                    yield inner


def exists(path: Path) -> bool:
    try:
        return path.exists()
    except OSError:
        return False


def _is_directory(path: Path) -> bool:
    try:
        return path.is_dir()
    except OSError:
        return False  # reading it as a file reports the reason


def _visible_entries(directory: Path) -> list[Path | FileProblem]:
    try:
        with os.scandir(directory) as entries:
            names = [entry.name for entry in islice(entries, MOST_ENTRIES + 1)]
    except OSError as error:
        return [FileProblem(str(directory), None, None, _unreadable(error))]
    if len(names) > MOST_ENTRIES:
        return [FileProblem(str(directory), None, None, f"not read: it has over {MOST_ENTRIES} entries")]
    return [directory / name for name in sorted(names) if not name.startswith(".")]
