"""Which log files there are: looked for below the directories that the policy names, through no symbolic link.

What is a log, and whose, ``finders`` says. A scan costs one listing for each directory, so it is made as often as its
own duration allows (``log_reader``).

Not here: opening files and reading them (``log_files``).
"""

from __future__ import annotations

import errno
import re
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence

from msgspec import Struct
from msgspec.structs import replace

from trainmedic.wire import log_layout
from trainmedic_server.agent.log_opening.node_files import (
    FileFacts,
    ListedName,
    LogRefused,
    NamedBy,
    NodeFiles,
    UnreadReason,
    check_readable,
)
from trainmedic_server.agent.log_opening.own_files import OwnFiles
from trainmedic_server.agent.log_reading.finders import (
    Finder,
    LayoutFinder,
    NamedFile,
    PatternFinder,
    PodFinder,
    readable,
)
from trainmedic_server.agent.log_reading.job_sources import JobSources
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
    named_by: NamedBy | None = None
    """The file of a job that names it. None for what the policy names, and what lies in a job's directory."""


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


class _Look(Struct, frozen=True):
    """A directory to look at."""

    path: str
    finder: Finder
    known: Collection[tuple[int, int]]
    is_stopping: Callable[[], bool]
    named_by: NamedBy | None = None

    def at(self, name: str, finder: Finder) -> _Look:
        """The look at a directory in this one."""
        return replace(self, path=f"{self.path}/{name}", finder=finder)


class Discovery:
    """Looks for log files. One thread uses it."""

    def __init__(
        self,
        policy: LogsPolicy,
        node: str,
        pods: str = PODS,
        kernel_file: str | None = None,
        files: NodeFiles = OwnFiles(),
    ) -> None:
        self._policy = policy
        self._node = node
        self._files = files
        self._sources = JobSources(policy, node, files)
        self._tops: list[tuple[str, Finder]] = [
            (root, LayoutFinder(root, node, self._sources)) for root in policy.roots
        ]
        for named in policy.files:
            self._tops.append((named.path.base, PatternFinder(named.path, named.source, node)))
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
            for file in self._walk(_Look(top, finder, known, is_stopping)):
                self._keep(files, file)
        for path, origin, named_by in self._sources.named_files():
            directory, _, name = path.rpartition("/")
            for file in self._walk(_Look(directory, NamedFile(name, origin), known, is_stopping, named_by)):
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

    def _unless_old(self, look: _Look, changed_ns: int) -> Iterator[FoundFile]:
        """What a look at a directory finds, or what it found a moment ago, if that was old."""
        now = time.monotonic()
        old = self._old.pop(look.path, None)
        if old is not None and old.changed_ns == changed_ns and now - old.looked_at < _OLD_EVERY:
            self._sources.keep(look.path)
            files = old.files
        else:
            files = tuple(self._walk(look, is_top=False))
            old = _OldDirectory(now, changed_ns, files)
        newest_ns = max((changed_ns, *(file.written_ns for file in files)))
        if time.time() - newest_ns / 1e9 > OLD_SECONDS and len(self._old) < MOST_ENTRIES:
            self._old[look.path] = old
        yield from files

    def _walk(self, look: _Look, *, is_top: bool = True) -> Iterator[FoundFile]:
        """What is below a directory."""
        try:
            deeper, files, device = self._listed(look)
            if sources := [entry.name for entry in files if entry.name.startswith(log_layout.SOURCES)]:
                self._sources.look_at(look.path, sources)
            logs: list[tuple[str, Origin | None]] = []
            # What a job says of its ranks comes before their logs: a listing has no order.
            for entry in sorted(files, key=lambda entry: not entry.name.startswith(log_layout.SOURCES)):
                origin = look.finder.origin(entry.name)
                if origin is not None or (device, entry.inode) in look.known:
                    logs.append((entry.name, origin))
            yield from self._found(look, logs, {entry.name for entry in files})
            changed = self._changed(look.path, [name for name, _ in deeper]) if is_top and deeper else {}
            for name, inner in deeper:
                below = look.at(name, inner)
                if is_top:
                    yield from self._unless_old(below, changed[name]) if name in changed else ()
                else:
                    yield from self._walk(below, is_top=False)
        except (OSError, LogRefused) as error:
            self._count(error)

    def _listed(self, look: _Look) -> tuple[list[tuple[str, Finder]], list[ListedName], int]:
        """The directories of a directory that are entered, its other entries, and its device. Raises OSError."""
        deeper: list[tuple[str, Finder]] = []
        files: list[ListedName] = []
        listing = self._files.listing(look.path, max(self._left, 0), look.named_by)
        self._left -= len(listing.entries) + listing.is_cut
        for entry in listing.entries if not look.is_stopping() else ():
            if not entry.is_directory:
                files.append(entry)
            elif (inner := look.finder.enter(entry.name)) is not None:
                deeper.append((entry.name, inner))
        return deeper, files, listing.device

    def _changed(self, path: str, names: Sequence[str]) -> dict[str, int]:
        """When each of these directories was last changed. Raises OSError, LogRefused."""
        facts = zip(names, self._files.facts(path, names), strict=True)
        return {name: each.written_ns for name, each in facts if each is not None}

    def _found(
        self, look: _Look, logs: Sequence[tuple[str, Origin | None]], names: Collection[str]
    ) -> Iterator[FoundFile]:
        if not logs:
            return
        every = self._files.facts(look.path, [name for name, _ in logs], look.named_by)
        for (name, origin), facts in zip(logs, every, strict=True):
            file = self._file(look, name, facts, origin, names) if facts is not None else None
            if file is not None and (file.origin is not None or (file.device, file.inode) in look.known):
                yield file

    def _file(
        self, look: _Look, name: str, facts: FileFacts, origin: Origin | None, names: Collection[str]
    ) -> FoundFile | None:
        try:
            check_readable(facts.mode, facts.links)
        except LogRefused as refused:
            self._refused[refused.reason] += 1
            return None
        whole = f"{look.path}/{name}"
        if origin is not None:
            origin = None if is_rotated(name, names) else replace(origin, stream=readable(whole))
        return FoundFile(whole, facts.device, facts.inode, facts.size, facts.written_ns, origin, look.named_by)

    def _count(self, error: OSError | LogRefused) -> None:
        if isinstance(error, LogRefused):
            self._refused[error.reason] += 1
        elif isinstance(error, PermissionError):
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
