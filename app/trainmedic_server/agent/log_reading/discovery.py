"""Which log files there are: looked for below the directories that the policy names, through no symbolic link.

What is a log, and whose, ``finders`` says. A scan costs one listing for each directory, so it is made as often as its
own duration allows (``log_reader``).

Not here: opening files and reading them (``log_files``).
"""

from __future__ import annotations

import errno
import os
import re
import stat
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping
from functools import partial

from msgspec import Struct
from msgspec.structs import replace

from trainmedic.wire import log_layout
from trainmedic_server.agent.disk.filesystems import open_directory
from trainmedic_server.agent.log_reading.finders import (
    Finder,
    LayoutFinder,
    NamedFile,
    PatternFinder,
    PodFinder,
    readable,
)
from trainmedic_server.agent.log_reading.job_sources import JobSources
from trainmedic_server.agent.log_reading.log_files import UnreadReason, open_way
from trainmedic_server.agent.log_reading.log_policy import LogsPolicy
from trainmedic_server.domain.finding import Origin

PODS = "/var/log/pods"
MOST_ENTRIES = 200_000
"""Entries of directories that one scan looks at."""
OLD_SECONDS = 6 * 3600.0
"""A job in whose logs nobody has written for so long is looked through every `_OLD_EVERY` seconds only."""
_OLD_EVERY = 60.0
_ROTATED = re.compile(r"(.+?)(?:\.\d{1,3}|-\d{8}(?:-?\d{1,6})?|\.\d{4}-?\d\d-?\d\d\S{0,16})\Z")
_PACKED = re.compile(r".+\.(?:gz|xz|bz2|zst|lz4|zip)\Z")


class FoundFile(Struct, frozen=True):
    """A file that is a log, or was one by another name."""

    path: str
    device: int
    inode: int
    size: int
    written_ns: int
    """When it was last written: nanoseconds since 1970."""
    origin: Origin | None
    """None where only its inode says that it is a log: it was renamed."""


class Scan(Struct, frozen=True):
    """What one look at all directories has found."""

    files: tuple[FoundFile, ...]
    refused: Mapping[UnreadReason, int]
    dumps: tuple[FoundFile, ...] = ()
    """Of flight recorders; they are no logs."""
    is_cut: bool = False
    """There were more entries than are looked at."""


class _OldDirectory(Struct, frozen=True):
    """A directory right below one that is looked through: one of many old jobs. What was found in it still holds."""

    looked_at: float
    """By the monotonic clock."""
    changed_ns: int
    files: tuple[FoundFile, ...]


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
            self._tops.append((directory, NamedFile(name, Origin("kernel", node))))
        self._refused: Counter[UnreadReason] = Counter()
        self._left = 0
        self._old: dict[str, _OldDirectory] = {}

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
            for file in self._below(directory, NamedFile(name, origin), known, is_stopping):
                self._keep(files, file)
        refused = self._refused + Counter({UnreadReason.OUTSIDE: self._sources.outside})
        dumps = tuple(file for file in files.values() if is_dump(file))
        logs = tuple(file for file in files.values() if not is_dump(file))
        return Scan(logs, refused, dumps, self._left <= 0)

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

    def _unless_old(self, fd: int, path: str, walk: Callable[[], Iterator[FoundFile]]) -> Iterator[FoundFile]:
        """What `walk` finds in the directory `fd`, or what it found a moment ago, if that was old."""
        now, changed_ns = time.monotonic(), os.fstat(fd).st_mtime_ns
        old = self._old.pop(path, None)
        if old is not None and old.changed_ns == changed_ns and now - old.looked_at < _OLD_EVERY:
            os.close(fd)
            self._sources.keep(path)
            files = old.files
        else:
            files = tuple(walk())
            old = _OldDirectory(now, changed_ns, files)
        newest_ns = max((changed_ns, *(file.written_ns for file in files)))
        if time.time() - newest_ns / 1e9 > OLD_SECONDS and len(self._old) < MOST_ENTRIES:
            self._old[path] = old
        yield from files

    def _walk(
        self,
        fd: int,
        path: str,
        finder: Finder,
        known: Collection[tuple[int, int]],
        is_stopping: Callable[[], bool],
        *,
        is_top: bool = True,
    ) -> Iterator[FoundFile]:
        """What is below the open directory `fd`, which is closed."""
        try:
            deeper, files = self._listed(fd, finder, is_stopping)
            names, device = {entry.name for entry in files}, os.fstat(fd).st_dev
            # What a job says of its ranks comes before their logs: a listing has no order.
            for entry in sorted(files, key=lambda entry: not entry.name.startswith(log_layout.SOURCES)):
                origin = finder.origin(entry.name)
                if origin is not None or (device, entry.inode()) in known:
                    file = self._file(path, entry, origin, names)
                    if file is not None and (file.origin is not None or (file.device, file.inode) in known):
                        yield file
            for name, inner in deeper:
                try:
                    child = open_directory(fd, name)
                except OSError as error:
                    self._count(error)
                    continue
                walk = partial(self._walk, child, f"{path}/{name}", inner, known, is_stopping, is_top=False)
                yield from self._unless_old(child, f"{path}/{name}", walk) if is_top else walk()
        except OSError as error:
            self._count(error)
        finally:
            os.close(fd)

    def _listed(
        self, fd: int, finder: Finder, is_stopping: Callable[[], bool]
    ) -> tuple[list[tuple[str, Finder]], list[os.DirEntry[str]]]:
        """The directories of an open directory that are entered, and its other entries. Raises OSError."""
        deeper: list[tuple[str, Finder]] = []
        files: list[os.DirEntry[str]] = []
        with os.scandir(fd) as entries:
            for entry in entries:
                self._left -= 1
                if self._left <= 0 or is_stopping():
                    break
                if not entry.is_dir(follow_symlinks=False):
                    files.append(entry)
                elif (inner := finder.enter(entry.name)) is not None:
                    deeper.append((entry.name, inner))
        return deeper, files

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


def is_dump(file: FoundFile) -> bool:
    """Whether a flight recorder has written the file."""
    return file.origin is not None and file.origin.source == log_layout.FLIGHT_RECORDER


def is_rotated(name: str, names: Collection[str]) -> bool:
    """Whether a name is that of an older log, of which there is a newer one in the same directory, or of a packed
    one. Its lines were read under its first name."""
    if _PACKED.match(name):
        return True
    match = _ROTATED.match(name)
    return match is not None and match[1] in names
