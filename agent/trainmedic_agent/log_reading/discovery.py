"""Search for log files below the policy's directories, without following symbolic links.

``finders`` identify logs and owners. Each job's directory is a unit (``scan_units``), scanned as often as its cost
allows; users and jobs take turns by used time.
"""

from __future__ import annotations

import errno
import logging
import re
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from itertools import chain

from msgspec import Struct
from msgspec.structs import replace

from trainmedic.wire import log_layout
from trainmedic.wire.log_limit import LogLimit
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
from trainmedic_agent.log_opening.own_files import OwnFiles
from trainmedic_agent.log_reading.budgets import NODE_ITSELF, BudgetOwner, FairTurns
from trainmedic_agent.log_reading.cut_record import CutRecord
from trainmedic_agent.log_reading.directory_names import DirectoryNames
from trainmedic_agent.log_reading.finders import Finder, LayoutFinder, NamedFiles, PatternFinder, PodFinder, readable
from trainmedic_agent.log_reading.job_sources import JobSources
from trainmedic_agent.log_reading.log_policy import LogsPolicy
from trainmedic_agent.log_reading.scan_units import (
    CHEAP_SECONDS,
    MOST_FOUND,
    MOST_OF_USER,
    USER_SECONDS,
    ScanBudget,
    ScanUnit,
    UnitTable,
    first_of_users,
    newest,
    newest_of_users,
    trim,
)
from trainmedic_agent.log_reading.scan_units import FoundFile as FoundFile
from trainmedic_logs.domain.finding import Origin
from trainmedic_logs.domain.log_cuts import CutKind
from trainmedic_logs.domain.log_sources import KERNEL_SOURCES

log = logging.getLogger(__name__)

PODS = "/var/log/pods"
MOST_ENTRIES = 2_000_000
"""Entries of a policy directory. Each job below it has its own bound."""
OLD_SECONDS = 6 * 3600.0
"""A job whose logs were not written for this long is scanned every `_OLD_EVERY` seconds."""
_OLD_EVERY = 60.0
FileKey = tuple[int, int]
"""Device and inode."""
_ROTATED = re.compile(r"(.+?)(?:\.\d{1,3}|-\d{8}(?:-?\d{1,6})?|\.\d{4}-?\d\d-?\d\d\S{0,16})\Z")
_PACKED = re.compile(r".+\.(?:gz|xz|bz2|zst|lz4|zip)\Z")


class Scan(Struct, frozen=True):
    files: tuple[FoundFile, ...]
    refused: Mapping[UnreadReason, int]
    dumps: tuple[FoundFile, ...] = ()
    """Flight recorder dumps, which are not logs."""
    is_cut: bool = False
    late: int = 0
    """Jobs whose directories were not scanned completely, for lack of time."""
    errors: int = 0
    is_stale: bool = False
    """True if this is an earlier scan, because the next one did not end in time."""


class _Top(Struct):
    path: str
    files: tuple[FoundFile, ...] = ()
    units: Mapping[str, ScanUnit] = {}


class _Look(Struct, frozen=True):
    path: str
    finder: Finder
    named_by: NamedBy | None = None


class Discovery:
    """Scanner for log files. Not thread-safe."""

    def __init__(
        self,
        policy: LogsPolicy,
        node: str,
        pods: str = PODS,
        kernel_file: str | None = None,
        cuts: CutRecord | None = None,
        files: NodeFiles = OwnFiles(),
        names: DirectoryNames | None = None,
    ) -> None:
        """`names` are first names shared with other scanners."""
        self._policy = policy
        self._node = node
        self._files = files
        self._cuts = cuts or CutRecord()
        # The first finder's sources files are never read: each unit has its own.
        self._tops: list[tuple[str, Finder]] = [
            (root, LayoutFinder(root, node, JobSources(policy, node))) for root in policy.roots
        ]
        for named in policy.files:
            self._tops.append((named.path.base, PatternFinder(named.path, named.source, node)))
        for pattern in policy.slurm:
            self._tops.append((pattern.base, PatternFinder(pattern, "slurm", node)))
        if policy.pods:
            self._tops.append((pods, PodFinder(policy, node)))
        if kernel_file is not None:
            directory, _, name = kernel_file.rpartition("/")
            self._tops.append((directory, NamedFiles({name: Origin("kernel", node)})))
        self._turns = FairTurns()
        shared = names or DirectoryNames()
        self._units = [UnitTable(policy, node, self._cuts, files, shared) for _ in self._tops]
        self._refused: Counter[UnreadReason] = Counter()
        self._budget = ScanBudget(0, lambda: False)
        self._owner: BudgetOwner | None = None
        self._sources: JobSources | None = None
        self._known: Collection[FileKey] = ()
        self._late = 0
        self._errors = 0
        self._log_limit = LogLimit()

    def scan(
        self,
        known: Collection[FileKey],
        is_stopping: Callable[[], bool],
        seconds: float | None = None,
        job_seconds: float = 0.0,
        *,
        is_asked: bool = False,
    ) -> Scan:
        """Scan everything once. `known` are device and inode of files followed under any name.

        With `seconds` it ends about then; for jobs not reached, the previous result counts. One job may take
        `job_seconds` or longer. `is_asked` states that a caller waits: cheap units are then scanned early.
        """
        self._known, refused, is_cut, self._errors = known, Counter[UnreadReason](), False, 0
        tops: list[_Top] = []
        for (path, finder), units in zip(self._tops, self._units, strict=True):
            self._refused, self._owner, self._sources = refused, None, None
            self._budget = ScanBudget(MOST_ENTRIES, is_stopping)
            tops.append(self._top(path, finder, units))
            is_cut |= self._budget.is_cut
        self._late = 0
        is_cut |= self._look_at_units(tops, is_stopping, seconds, job_seconds, CHEAP_SECONDS if is_asked else 0.0)
        return self._assembled(tops, refused, is_cut)

    def _assembled(self, tops: Sequence[_Top], refused: Counter[UnreadReason], is_cut: bool) -> Scan:
        units = [unit for top in tops for unit in top.units.values()]
        for owner, count in trim(units, MOST_OF_USER, self._known).items():
            self._cuts.stands_at(owner, CutKind.FILES, count)
        files: dict[FileKey, FoundFile] = {}
        for top in tops:
            for file in chain(top.files, *(unit.files for unit in top.units.values())):
                self._keep(files, file)
        for unit in units:
            for file in unit.named:
                self._keep(files, file)
            refused += unit.refused
            if unit.sources is not None:
                refused[UnreadReason.OUTSIDE] += unit.sources.outside
        dumps = tuple(file for file in files.values() if is_dump(file))
        logs = tuple(file for file in files.values() if not is_dump(file))
        return Scan(logs, +refused, dumps, is_cut, self._late, self._errors)

    def _keep(self, files: dict[FileKey, FoundFile], file: FoundFile) -> None:
        if file.key not in files or files[file.key].origin is None:
            files[file.key] = file

    # --- policy directories ---

    def _top(self, path: str, finder: Finder, units: UnitTable) -> _Top:
        look = _Look(path, finder)
        try:
            deeper, files, listing = self._listed(look, units.by_name)
            found = list(self._logs_among(look, files, listing.device))
            units.renew(path, deeper, may_be_renamed=listing.may_be_renamed)
        except (OSError, LogRefused) as error:
            self._count(error)
            units.by_name.clear()
            return _Top(path)
        if self._budget.is_cut:
            self._cuts.add(BudgetOwner(None, path), CutKind.ENTRIES)
        return _Top(path, tuple(newest_of_users(found, MOST_OF_USER, self._known)), units.by_name)

    # --- job directories ---

    def _look_at_units(
        self,
        tops: Sequence[_Top],
        is_stopping: Callable[[], bool],
        seconds: float | None,
        job_seconds: float,
        cheap: float,
    ) -> bool:
        now, is_cut = time.monotonic(), False
        count = sum(len(top.units) for top in tops)
        waiting: dict[BudgetOwner, list[tuple[ScanUnit, int]]] = {}
        for top, table in zip(tops, self._units, strict=True):
            every = [unit for unit in top.units.values() if seconds is None or unit.due <= now or unit.cost < cheap]
            self._late += len(every)
            # Exclude units that would be skipped: they must not displace others of their user.
            due = every if seconds is None else first_of_users(list(filter(self._may_look_at, every)))
            for unit, facts in zip(due, self._facts(top.path, due), strict=True):
                seen = table.renew_changed(top.path, unit, facts) if facts is not None else unit
                waiting.setdefault(seen.owner, []).append((seen, facts.written_ns if facts is not None else -1))
        for _, (unit, changed_ns) in self._turns.turns(waiting, lambda item: item[0].cost):
            if is_stopping() or (seconds is not None and time.monotonic() - now >= seconds):
                break
            if seconds is not None and not self._may_look_at(unit):
                continue
            allowed = None if seconds is None else max(unit.allowed, job_seconds)
            try:
                self._look_at(unit, changed_ns, is_stopping, count, allowed)
            except Exception:  # boundary of one job: its files must not hide other logs
                self._errors += 1
                unit.looked(now, self._budget, count)
                if self._log_limit.lets_through():
                    log.exception("scanning a job's logs failed unexpectedly", extra={"path": unit.path})
            is_cut |= self._budget.is_cut
            self._late -= not self._budget.is_late
        return is_cut

    def _may_look_at(self, unit: ScanUnit) -> bool:
        if unit.cost <= CHEAP_SECONDS or self._turns.used_by(unit.owner.uid) <= USER_SECONDS:
            return True
        self._cuts.add(unit.owner, CutKind.SECONDS)
        return False

    def _facts(self, path: str, units: Sequence[ScanUnit]) -> Sequence[FileFacts | None]:
        if not units:
            return []
        try:
            return self._files.facts(path, [unit.name for unit in units])
        except (OSError, LogRefused) as error:
            self._count(error)
            return [None] * len(units)

    def _look_at(
        self, unit: ScanUnit, changed_ns: int, is_stopping: Callable[[], bool], units: int, seconds: float | None
    ) -> None:
        began = time.monotonic()
        self._owner, self._refused, self._sources = unit.owner, Counter(), unit.sources
        budget = self._budget = ScanBudget(self._policy.max_job_entries, is_stopping, seconds)
        if changed_ns < 0:
            unit.files, unit.named, unit.refused = (), (), self._refused
            return
        if unit.is_old and unit.changed_ns == changed_ns and began - unit.looked_at < _OLD_EVERY:
            unit.looked(began, budget, units)
            return
        if unit.sources is not None:
            unit.sources.begin_scan()
        # The newest attempt is scanned first, in case time runs out. Lines are read in the order of attempts.
        files, named = sorted(self._walk(_Look(unit.path, unit.finder)), key=_attempt_of), list(self._named(unit))
        if is_stopping():
            return  # earlier results still hold, and the next look is due
        if budget.is_late:  # files not reached may still exist
            files, named = _joined(unit.files, files), _joined(unit.named, named)
            self._cuts.add(unit.owner, CutKind.SECONDS)
        if budget.is_cut:
            self._cuts.add(unit.owner, CutKind.ENTRIES)
        self._cuts.stands_at(unit.owner, CutKind.FILES, len(files) + len(named) - 2 * MOST_FOUND)
        unit.files, unit.named = newest(files, MOST_FOUND, self._known), newest(named, MOST_FOUND, self._known)
        unit.changed_ns, unit.looked_at, unit.refused = changed_ns, began, self._refused
        newest_ns = max((changed_ns, *(file.written_ns for file in unit.all_files)))
        unit.is_old = time.time() - newest_ns / 1e9 > OLD_SECONDS
        unit.looked(began, budget, units)

    def _named(self, unit: ScanUnit) -> Iterator[FoundFile]:
        directories: dict[tuple[str, NamedBy], dict[str, Origin]] = {}
        for path, origin, named_by in unit.sources.named_files() if unit.sources is not None else ():
            directory, _, name = path.rpartition("/")
            directories.setdefault((directory, named_by), {}).setdefault(name, origin)
        for (directory, named_by), origins in directories.items():
            if not self._budget.goes_on() or self._budget.is_cut:
                return
            yield from self._walk(_Look(directory, NamedFiles(origins), named_by))

    def _walk(self, look: _Look) -> Iterator[FoundFile]:
        try:
            deeper, files, listing = self._listed(look)
            yield from self._logs_among(look, files, listing.device)
        except (OSError, LogRefused) as error:
            self._count(error)
            return
        for name, inner in sorted(deeper, key=_newest_attempt_first):
            if not self._budget.goes_on():
                return
            yield from self._walk(_Look(f"{look.path}/{name}", inner, look.named_by))

    def _logs_among(self, look: _Look, files: Sequence[ListedName], device: int) -> Iterator[FoundFile]:
        sources = [entry.name for entry in files if entry.name.startswith(log_layout.SOURCES)]
        if sources and self._sources is not None:
            self._sources.look_at(look.path, sources)
        logs: list[tuple[str, Origin | None]] = []
        # Sources files come first, because they describe the ranks' logs.
        for entry in sorted(files, key=lambda entry: not entry.name.startswith(log_layout.SOURCES)):
            if not self._budget.goes_on():
                break
            origin = look.finder.origin(entry.name)
            if origin is not None or (device, entry.inode) in self._known:
                logs.append((entry.name, origin))
        if not logs:
            return
        names = {entry.name for entry in files}
        every = self._files.facts(look.path, [name for name, _ in logs], look.named_by)
        for (name, origin), facts in zip(logs, every, strict=True):
            file = self._file(look, name, facts, origin, names) if facts is not None else None
            if file is not None and (file.origin is not None or file.key in self._known):
                yield file

    def _listed(
        self, look: _Look, units: Mapping[str, ScanUnit] = {}
    ) -> tuple[list[tuple[str, Finder]], list[ListedName], Listing]:
        deeper: list[tuple[str, Finder]] = []
        files: list[ListedName] = []
        listing = self._files.listing(look.path, self._budget.room, look.named_by)
        self._budget.take_entries(len(listing.entries) + listing.is_cut)
        for entry in listing.entries if self._budget.goes_on() else ():
            if not entry.is_directory:
                files.append(entry)
            elif (unit := units.get(entry.name)) is not None:
                deeper.append((entry.name, unit.found_by))
            elif (inner := look.finder.enter(entry.name)) is not None:
                deeper.append((entry.name, inner))
        return deeper, files, listing

    def _file(
        self, look: _Look, name: str, facts: FileFacts, origin: Origin | None, names: Collection[str]
    ) -> FoundFile | None:
        try:
            check_readable(facts.mode, facts.links)
        except LogRefused as refused:
            self._refused[refused.reason] += 1
            return None
        whole = f"{look.path}/{name}"
        owner = self._owner or BudgetOwner(facts.uid, origin.job if origin is not None else None)
        if origin is not None:
            owner = NODE_ITSELF if origin.source in KERNEL_SOURCES else owner
            origin = None if is_rotated(name, names) else replace(origin, stream=readable(whole))
        return FoundFile(whole, facts.device, facts.inode, facts.size, facts.written_ns, origin, owner, look.named_by)

    def _count(self, error: OSError | LogRefused) -> None:
        if isinstance(error, LogRefused):
            self._refused[error.reason] += 1
        elif isinstance(error, PermissionError):
            self._refused[UnreadReason.FORBIDDEN] += 1
        elif isinstance(error, NotADirectoryError) or error.errno == errno.ELOOP:
            self._refused[UnreadReason.LINK] += 1


def _joined(before: Sequence[FoundFile], found: Sequence[FoundFile]) -> list[FoundFile]:
    return list(({file.key: file for file in before} | {file.key: file for file in found}).values())


def _attempt_of(file: FoundFile) -> int:
    return (file.origin.attempt or 0) if file.origin is not None else 0


def _newest_attempt_first(entry: tuple[str, Finder]) -> int:
    return -(log_layout.attempt_number(entry[0]) or 0)


def is_dump(file: FoundFile) -> bool:
    return file.origin is not None and file.origin.source == log_layout.FLIGHT_RECORDER


def is_rotated(name: str, names: Collection[str]) -> bool:
    """Return whether this is a packed log, or a rotated one next to its successor. Its lines were read already."""
    if _PACKED.match(name):
        return True
    match = _ROTATED.match(name)
    return match is not None and match[1] in names
