"""Which log files there are: looked for below the directories that the policy names, through no symbolic link.

Each kind of place has a `Finder` that says for a directory's entries which to go into, and which are logs of whom. A
scan costs one listing for each directory, so it is made as often as its own duration allows (``files``).

Not here: opening files and reading them (``log_files``).
"""

from __future__ import annotations

import errno
import os
import re
import stat
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import PurePosixPath
from typing import Protocol

from trainmedic.wire import log_layout
from trainmedic_server.agent.disk.filesystems import open_directory
from trainmedic_server.agent.log_reading.job_sources import JobSources
from trainmedic_server.agent.log_reading.log_files import UnreadReason, open_way
from trainmedic_server.agent.log_reading.log_policy import LogsPolicy
from trainmedic_server.agent.log_reading.path_patterns import NUMBERS, PathPattern
from trainmedic_server.domain.finding import Origin

PODS = "/var/log/pods"
MOST_ENTRIES = 200_000
"""Entries of directories that one scan looks at."""
_DEEPEST = 10
_CONTAINER_LOG = re.compile(r"\d{1,9}\.log\Z")
_ROTATED = re.compile(r"(.+?)(?:\.\d{1,3}|-\d{8}(?:-?\d{1,6})?|\.\d{4}-?\d\d-?\d\d\S{0,16})\Z")
_PACKED = re.compile(r".+\.(?:gz|xz|bz2|zst|lz4|zip)\Z")
_STREAM_SOURCES = {
    log_layout.STDOUT: "training",
    log_layout.STDERR: "training",
    log_layout.LAUNCHER: "launcher",
}


@dataclass(frozen=True, slots=True)
class FoundFile:
    """A file that is a log, or was one by another name."""

    path: str
    device: int
    inode: int
    size: int
    written_ns: int
    """When it was last written: nanoseconds since 1970."""
    origin: Origin | None
    """None where only its inode says that it is a log: it was renamed."""


@dataclass(frozen=True, slots=True)
class Scan:
    """What one look at all directories has found."""

    files: tuple[FoundFile, ...]
    refused: Mapping[UnreadReason, int]
    is_cut: bool = False
    """There were more entries than are looked at."""


class Finder(Protocol):
    """What is a log below one directory."""

    def enter(self, name: str) -> Finder | None:
        """How to look at the directory `name` in this one; None to pass it over."""
        ...

    def origin(self, name: str) -> Origin | None:
        """Whose the file `name` in this directory is; None where it is no log, or not this node's."""
        ...


@dataclass(frozen=True, slots=True)
class PatternFinder:
    """Files by a pattern of the policy."""

    pattern: PathPattern
    source: str
    node: str
    depth: int = 0
    places: Mapping[str, str] = field(default_factory=dict)

    def enter(self, name: str) -> PatternFinder | None:
        if self.depth + 1 >= len(self.pattern.parts):
            return None
        places = self._places(name)
        return None if places is None else replace(self, depth=self.depth + 1, places=places)

    def origin(self, name: str) -> Origin | None:
        if self.depth + 1 != len(self.pattern.parts):
            return None
        places = self._places(name)
        if places is None:
            return None
        attempt, rank, local_rank, node_rank = (int(places[name]) if name in places else None for name in NUMBERS)
        job = readable(places["job"]) if "job" in places else None
        return Origin(self.source, self.node, job, attempt, rank, local_rank, node_rank)

    def _places(self, name: str) -> dict[str, str] | None:
        match = self.pattern.parts[self.depth].match(name)
        if match is None or match.groupdict().get("node", self.node) != self.node:
            return None
        return {**self.places, **match.groupdict()}


@dataclass(frozen=True, slots=True)
class LayoutFinder:
    """Files of a log directory with the layout of ``trainmedic.wire.log_layout``."""

    root: str
    node: str
    sources: JobSources
    parts: tuple[str, ...] = ()

    def enter(self, name: str) -> LayoutFinder | None:
        depth = len(self.parts)
        if depth == 1 and log_layout.attempt_number(name) is None:
            return None
        if depth == 2 and name != f"ranks-{log_layout.encoded(self.node)}":
            return None
        if depth >= _DEEPEST:
            return None
        return replace(self, parts=(*self.parts, name))

    def origin(self, name: str) -> Origin | None:
        said = log_layout.file_at(PurePosixPath(*self.parts, name))
        if said is None or said.is_rotated:
            return None
        directory = "/".join((self.root, *self.parts))
        if said.kind == log_layout.SOURCES and said.node == self.node:
            self.sources.saw(directory, name)
            return None
        if said.kind == log_layout.RECORDS:
            # The number of a rank does not say on which node of a shared directory it is; its sources file does.
            return self.sources.of_rank(directory, said.rank)
        if said.kind not in _STREAM_SOURCES or said.node != self.node:
            return None
        job = readable(said.job if said.job is not None else said.directory)
        origin = Origin(_STREAM_SOURCES[said.kind], self.node, job=job, attempt=said.attempt)
        if said.local_rank is None:
            return origin
        attempt = "/".join((self.root, *self.parts[:2]))
        return self.sources.of_local_rank(attempt, said.local_rank) or replace(origin, local_rank=said.local_rank)


@dataclass(frozen=True, slots=True)
class PodFinder:
    """Logs of containers as the kubelet keeps them: ``<namespace>_<pod>_<uid>/<container>/<restarts>.log``."""

    policy: LogsPolicy
    node: str
    pod: str | None = None
    depth: int = 0

    def enter(self, name: str) -> PodFinder | None:
        if self.depth == 1:
            return replace(self, depth=2)
        parts = name.split("_")
        if self.depth != 0 or len(parts) != 3 or not self.policy.reads_pods_of(parts[0]):
            return None
        return replace(self, pod=f"{parts[0]}/{parts[1]}", depth=1)

    def origin(self, name: str) -> Origin | None:
        if self.depth != 2 or _CONTAINER_LOG.match(name) is None:
            return None
        return Origin("training", self.node, pod=self.pod)


class Discovery:
    """Looks for log files. One thread uses it."""

    def __init__(self, policy: LogsPolicy, node: str, pods: str = PODS, kernel_file: str | None = None) -> None:
        self._policy = policy
        self._node = node
        self._sources = JobSources(policy, node)
        self._tops: list[tuple[str, Finder]] = [
            (root, LayoutFinder(root, node, self._sources)) for root in policy.roots
        ]
        for files in policy.files:
            self._tops.append((files.path.base, PatternFinder(files.path, files.source, node)))
        for pattern in policy.slurm:
            self._tops.append((pattern.base, PatternFinder(pattern, "slurm", node)))
        if policy.pods:
            self._tops.append((pods, PodFinder(policy, node)))
        if kernel_file is not None:
            directory, _, name = kernel_file.rpartition("/")
            self._tops.append((directory, _OneFile(name, Origin("kernel", node))))
        self._refused: Counter[UnreadReason] = Counter()
        self._left = 0

    def scan(self, known: Collection[tuple[int, int]], is_stopping: Callable[[], bool]) -> Scan:
        """Look at everything once. `known` are the devices and inodes of files that are followed by any name."""
        self._refused, self._left = Counter(), MOST_ENTRIES
        self._sources.begin_scan()
        files: dict[tuple[int, int], FoundFile] = {}
        for top, finder in self._tops:
            for file in self._below(top, finder, known, is_stopping):
                self._keep(files, file)
        for path, origin in self._sources.named_files():
            directory, _, name = path.rpartition("/")
            for file in self._below(directory, _OneFile(name, origin), known, is_stopping):
                self._keep(files, file)
        refused = self._refused + Counter({UnreadReason.OUTSIDE: self._sources.outside})
        return Scan(tuple(files.values()), refused, self._left <= 0)

    def _keep(self, files: dict[tuple[int, int], FoundFile], file: FoundFile) -> None:
        """Of several that name one file, the first that says whose it is."""
        key = (file.device, file.inode)
        if key not in files or files[key].origin is None:
            files[key] = file

    def _below(
        self, top: str, finder: Finder, known: Collection[tuple[int, int]], is_stopping: Callable[[], bool]
    ) -> Iterator[FoundFile]:
        try:
            fd = open_way(top)
        except OSError as error:
            self._count(error)
            return
        yield from self._walk(fd, top, finder, known, is_stopping)

    def _walk(
        self, fd: int, path: str, finder: Finder, known: Collection[tuple[int, int]], is_stopping: Callable[[], bool]
    ) -> Iterator[FoundFile]:
        """What is below the open directory `fd`, which is closed."""
        deeper: list[tuple[str, Finder]] = []
        names: set[str] = set()
        candidates: list[tuple[os.DirEntry[str], Origin | None]] = []
        try:
            device = os.fstat(fd).st_dev
            with os.scandir(fd) as entries:
                for entry in entries:
                    self._left -= 1
                    if self._left <= 0 or is_stopping():
                        return
                    names.add(entry.name)
                    if entry.is_dir(follow_symlinks=False):
                        inner = finder.enter(entry.name)
                        if inner is not None:
                            deeper.append((entry.name, inner))
                        continue
                    origin = finder.origin(entry.name)
                    if origin is not None or (device, entry.inode()) in known:
                        candidates.append((entry, origin))
            for entry, origin in candidates:
                file = self._file(path, entry, origin, names)
                if file is not None and (file.origin is not None or (file.device, file.inode) in known):
                    yield file
            for name, inner in deeper:
                try:
                    child = open_directory(fd, name)
                except OSError as error:
                    self._count(error)
                    continue
                yield from self._walk(child, f"{path}/{name}", inner, known, is_stopping)
        except OSError as error:
            self._count(error)
        finally:
            os.close(fd)

    def _file(self, path: str, entry: os.DirEntry[str], origin: Origin | None, names: set[str]) -> FoundFile | None:
        try:
            facts = entry.stat(follow_symlinks=False)
        except OSError:
            return None  # it has vanished
        if stat.S_ISLNK(facts.st_mode):
            self._refused[UnreadReason.LINK] += 1
            return None
        if not stat.S_ISREG(facts.st_mode):
            self._refused[UnreadReason.SPECIAL] += 1
            return None
        if facts.st_nlink > 1:
            self._refused[UnreadReason.SECOND_NAME] += 1
            return None
        whole = f"{path}/{entry.name}"
        if origin is not None:
            origin = None if is_rotated(entry.name, names) else replace(origin, stream=readable(whole))
        return FoundFile(whole, facts.st_dev, facts.st_ino, facts.st_size, facts.st_mtime_ns, origin)

    def _count(self, error: OSError) -> None:
        if isinstance(error, PermissionError):
            self._refused[UnreadReason.FORBIDDEN] += 1
        elif isinstance(error, NotADirectoryError) or error.errno == errno.ELOOP:
            self._refused[UnreadReason.LINK] += 1


@dataclass(frozen=True, slots=True)
class _OneFile:
    name: str
    whose: Origin

    def enter(self, name: str) -> None:
        return None

    def origin(self, name: str) -> Origin | None:
        return self.whose if name == self.name else None


def is_rotated(name: str, names: Collection[str]) -> bool:
    """Whether a name is that of an older log, of which there is a newer one in the same directory, or of a packed
    one. Its lines were read under its first name."""
    if _PACKED.match(name):
        return True
    match = _ROTATED.match(name)
    return match is not None and match[1] in names


def readable(name: str) -> str:
    """A name or path as text: a byte that is not UTF-8 is written as ``\\xe4``."""
    return os.fsencode(name).decode("utf-8", "backslashreplace")
