"""Looks at directories for log files."""

from __future__ import annotations

import errno
import re
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence

from msgspec import Struct
from msgspec.structs import replace

from trainmedic.wire import log_layout
from trainmedic_agent.log_opening.node_files import (
    FileFacts,
    ListedName,
    Listing,
    LogRefused,
    NamedBy,
    NodeFiles,
    UnreadReason,
    check_readable,
)
from trainmedic_agent.log_reading.budgets import NODE_ITSELF, BudgetOwner
from trainmedic_agent.log_reading.finders import Finder, NamedFiles, readable
from trainmedic_agent.log_reading.job_sources import JobSources
from trainmedic_agent.log_reading.scan_units import FileKey, FoundFile, ScanBudget, ScanUnit
from trainmedic_logs.domain.finding import Origin
from trainmedic_logs.domain.log_sources import KERNEL_SOURCES

_FACTS_AT_ONCE = 2000  # so that the time is checked in between
_ROTATED = re.compile(r"(.+?)(?:\.\d{1,3}|-\d{8}(?:-?\d{1,6})?|\.\d{4}-?\d\d-?\d\d\S{0,16})\Z")
_PACKED = re.compile(r".+\.(?:gz|xz|bz2|zst|lz4|zip)\Z")


class LookPlace(Struct, frozen=True):
    path: str
    finder: Finder
    named_by: NamedBy | None = None


class DirectoryLook:
    """`known`: files followed under any name. Without `owner`, files belong to their users."""

    def __init__(
        self,
        files: NodeFiles,
        known: Collection[FileKey],
        budget: ScanBudget,
        owner: BudgetOwner | None = None,
        sources: JobSources | None = None,
    ) -> None:
        self._files = files
        self._known = known
        self._budget = budget
        self._owner = owner
        self._sources = sources
        self.refused: Counter[UnreadReason] = Counter()

    def listed(
        self, place: LookPlace, units: Mapping[str, ScanUnit] = {}
    ) -> tuple[list[tuple[str, Finder]], list[ListedName], Listing]:
        """Return directories to enter, those of `units` included; other entries; and the listing.

        Raises OSError, LogRefused.
        """
        deeper: list[tuple[str, Finder]] = []
        files: list[ListedName] = []
        listing = self._files.listing(place.path, self._budget.room, place.named_by)
        self._budget.take(listing)
        for entry in listing.entries if self._budget.may_continue() else ():
            if not entry.is_directory:
                files.append(entry)
            elif (unit := units.get(entry.name)) is not None:
                deeper.append((entry.name, unit.found_by))
            elif (inner := place.finder.enter(entry.name)) is not None:
                deeper.append((entry.name, inner))
        return deeper, files, listing

    def logs_among(self, place: LookPlace, files: Sequence[ListedName], device: int) -> Iterator[FoundFile]:
        """Yield the logs and known files of `files`. Raises OSError, LogRefused."""
        sources = [entry.name for entry in files if entry.name.startswith(log_layout.SOURCES)]
        if sources and self._sources is not None:
            self._sources.read_metadata(place.path, sources)
        logs: list[tuple[str, Origin | None]] = []
        # Sources files come first, because they describe the ranks' logs.
        for entry in sorted(files, key=lambda entry: not entry.name.startswith(log_layout.SOURCES)):
            if not self._budget.may_continue():
                break
            origin = place.finder.origin(entry.name)
            if origin is not None or (device, entry.inode) in self._known:
                logs.append((entry.name, origin))
        names = {entry.name for entry in files}
        for begin in range(0, len(logs), _FACTS_AT_ONCE):
            if begin and not self._budget.may_continue():
                return
            part = logs[begin : begin + _FACTS_AT_ONCE]
            every = self._files.facts(place.path, [name for name, _ in part], place.named_by)
            for (name, origin), facts in zip(part, every, strict=True):
                file = self._file(place, name, facts, origin, names) if facts is not None else None
                if file is not None and (file.origin is not None or file.key in self._known):
                    yield file

    def walk(self, place: LookPlace) -> Iterator[FoundFile]:
        """Yield logs and known files here and below. Errors go to `count_error`."""
        try:
            deeper, files, listing = self.listed(place)
            yield from self.logs_among(place, files, listing.device)
        except (OSError, LogRefused) as error:
            self.count_error(error)
            return
        for name, inner in sorted(deeper, key=_newest_attempt_first):
            if not self._budget.may_continue():
                return
            yield from self.walk(LookPlace(f"{place.path}/{name}", inner, place.named_by))

    def named(self) -> Iterator[FoundFile]:
        """Yield files named by the job's sources files, which `walk` has read."""
        directories: dict[tuple[str, NamedBy], dict[str, Origin]] = {}
        for path, origin, named_by in self._sources.named_files() if self._sources is not None else ():
            directory, _, name = path.rpartition("/")
            directories.setdefault((directory, named_by), {}).setdefault(name, origin)
        for (directory, named_by), origins in directories.items():
            if not self._budget.may_continue() or self._budget.is_cut:
                return
            yield from self.walk(LookPlace(directory, NamedFiles(origins), named_by))

    def count_error(self, error: OSError | LogRefused) -> None:
        """Count an error, unless the directory vanished or its file system fails."""
        if isinstance(error, LogRefused):
            self.refused[error.reason] += 1
        elif isinstance(error, PermissionError):
            self.refused[UnreadReason.FORBIDDEN] += 1
        elif isinstance(error, NotADirectoryError) or error.errno == errno.ELOOP:
            self.refused[UnreadReason.LINK] += 1

    def _file(
        self, place: LookPlace, name: str, facts: FileFacts, origin: Origin | None, names: Collection[str]
    ) -> FoundFile | None:
        """Return the file, without origin if rotated. None if refused. `names`: all of the directory."""
        try:
            check_readable(facts.mode, facts.links)
        except LogRefused as refused:
            self.refused[refused.reason] += 1
            return None
        path = f"{place.path}/{name}"
        owner = self._owner or BudgetOwner(facts.uid, origin.job if origin is not None else None)
        if origin is not None:
            owner = NODE_ITSELF if origin.source in KERNEL_SOURCES else owner
            origin = None if is_rotated(name, names) else replace(origin, stream=readable(path))
        return FoundFile(path, facts.device, facts.inode, facts.size, facts.written_ns, origin, owner, place.named_by)


def _newest_attempt_first(entry: tuple[str, Finder]) -> int:
    return -(log_layout.attempt_number(entry[0]) or 0)


def is_rotated(name: str, names: Collection[str]) -> bool:
    """Return whether a file is a rotated log, whose lines were read before.

    Its name ends like a packed file's, or like a rotated one's and `names` has the log.
    """
    if _PACKED.match(name):
        return True
    match = _ROTATED.match(name)
    return match is not None and match[1] in names
