"""Sources files of one job's attempts, in which ranks describe themselves.

Any writer of the directory can forge one, so it decides only job and ranks of the attempt's logs, and which further
files are read within the policy's paths.
"""

from __future__ import annotations

import json
import os
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

from msgspec import Struct
from msgspec.structs import replace

from trainmedic.wire.reading import read_object
from trainmedic_agent.log_opening.node_files import FileFacts, LogRefused, NamedBy, NodeFiles
from trainmedic_agent.log_opening.own_files import OwnFiles
from trainmedic_agent.log_reading.log_policy import LogsPolicy
from trainmedic_agent.log_reading.path_patterns import checked_path
from trainmedic_logs.domain.finding import Origin

_LARGEST = 64 * 1024  # bytes of a sources file
_MOST_FILES = 64  # files that a rank may name
_LONGEST_NAME = 253  # characters of a job's name
_SOURCES = ("training", "launcher")  # a job cannot forge kernel lines


class _RankSources(Struct, frozen=True):
    rank: int
    local_rank: int | None
    """None if unknown."""
    origin: Origin
    files: tuple[tuple[str, str], ...]
    """Path and source."""
    outside: int
    """Number of files not allowed."""
    named_by: NamedBy


class JobSources:
    def __init__(self, policy: LogsPolicy, node: str, files: NodeFiles = OwnFiles()) -> None:
        self._files = files
        self._allowed = (*policy.roots, *policy.paths)
        self._node = node
        self._facts: dict[str, FileFacts | None] = {}  # by path, of one directory
        # Inode, size and last write when read, with the content if valid, by path.
        self._read: dict[str, tuple[tuple[int, int, int], _RankSources | None]] = {}
        # By attempt directory and file name.
        self._attempts: dict[str, dict[str, _RankSources]] = {}
        self._launchers: dict[str, set[str | None]] = {}  # nodes, by attempt directory; see `register_launcher`

    def begin_scan(self) -> None:
        """Start a scan of the job. Forget the contents of files that the last scan did not register."""
        registered = {f"{directory}/{name}" for directory, files in self._attempts.items() for name in files}
        self._read = {path: entry for path, entry in self._read.items() if path in registered}
        self._attempts = {}
        self._launchers = {}

    @property
    def outside(self) -> int:
        """Number of named files that are not allowed."""
        return sum(entry.outside for entry in self._all())

    def read_metadata(self, directory: str, names: Sequence[str]) -> None:
        """Prepare `register` for files of a directory. Raises OSError, LogRefused."""
        every = self._files.facts(directory, names)
        self._facts = {f"{directory}/{name}": facts for name, facts in zip(names, every, strict=True)}

    def register(self, directory: str, name: str) -> None:
        """Register a sources file of this scan, and read it if it has changed."""
        path = f"{directory}/{name}"
        facts = self._facts.get(path)
        if facts is None:
            return
        mark = (facts.inode, facts.size, facts.written_ns)
        if path not in self._read or self._read[path][0] != mark:
            self._read[path] = (mark, self._of_file(path))
        entry = self._read[path][1]
        if entry is not None:
            self._attempts.setdefault(directory, {})[name] = entry

    def register_launcher(self, directory: str, node: str | None) -> None:
        """`node` is None if its name is truncated."""
        self._launchers.setdefault(directory, set()).add(node)

    def launchers(self, directory: str) -> Collection[str | None]:  # their nodes
        return self._launchers.get(directory, set())

    def of_rank(self, attempt: str, rank: int | None) -> Origin | None:
        """Return a rank's origin, if a sources file of this node has this rank."""
        return next((entry.origin for entry in self._of_attempt(attempt) if entry.rank == rank), None)

    def of_local_rank(self, attempt: str, local_rank: int) -> Origin | None:
        return next((entry.origin for entry in self._of_attempt(attempt) if entry.local_rank == local_rank), None)

    def is_of_another_job(self, attempt: str, job: str) -> bool:
        """Return whether this node's sources files in `attempt` name only other jobs, after a rename."""
        stated = {entry.origin.job for entry in self._of_attempt(attempt)}
        return bool(stated) and job not in stated

    def named_files(self) -> Iterator[tuple[str, Origin, NamedBy]]:
        """Yield path and origin of further files, with the file that names them."""
        for entry in self._all():
            for path, source in entry.files:
                yield path, replace(entry.origin, source=source), entry.named_by

    def _of_attempt(self, attempt: str) -> list[_RankSources]:
        return list(self._attempts.get(attempt, {}).values())

    def _all(self) -> Iterator[_RankSources]:
        for attempt in self._attempts.values():
            yield from attempt.values()

    def _of_file(self, path: str) -> _RankSources | None:
        try:
            fd = self._files.open(path)
        except (OSError, LogRefused):
            return None
        try:
            raw, facts = os.read(fd, _LARGEST + 1), os.fstat(fd)
        except OSError:
            return None
        finally:
            os.close(fd)
        if len(raw) > _LARGEST:
            return None
        try:
            return self._parsed(read_object(raw), NamedBy(path, facts.st_dev, facts.st_ino))
        except (ValueError, KeyError, TypeError, json.JSONDecodeError):
            return None  # incomplete or invalid

    def _parsed(self, values: Mapping[str, Any], named_by: NamedBy) -> _RankSources | None:
        """Return None for another node's, or without valid job and rank. Raises ValueError, KeyError, TypeError."""
        if values.get("node") != self._node:
            return None
        attempt, rank, local_rank, node_rank = (
            _number(values.get(name)) for name in ("attempt", "rank", "local_rank", "node_rank")
        )
        job = values["job"]
        if rank is None or not isinstance(job, str) or not 0 < len(job) <= _LONGEST_NAME:
            return None
        origin = Origin("training", self._node, job, attempt, rank, local_rank, node_rank)
        named = [(each["path"], each.get("source", "training")) for each in values.get("files", ())][:_MOST_FILES]
        files = tuple((path, source) for path, source in named if self._is_allowed(path) and source in _SOURCES)
        return _RankSources(rank, local_rank, origin, files, len(named) - len(files), named_by)

    def _is_allowed(self, path: object) -> bool:
        try:
            checked = checked_path(path) if isinstance(path, str) else ""
        except ValueError:
            return False
        return any(checked.startswith(f"{root}/") for root in self._allowed)


def _number(value: object) -> int | None:
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < 1_000_000_000:
        return None
    return value
