"""Scan units: job directories with owner, last result and next scan time.

A unit that exceeds the bounds of a small one is looked at rarely, in another thread, so that it delays only its own
logs.
"""

from __future__ import annotations

import heapq
import time
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence

from msgspec import Struct, field
from msgspec.structs import replace

from trainmedic.wire import log_layout
from trainmedic_agent.log_opening.node_files import FileFacts, Listing, NamedBy, NodeFiles, UnreadReason
from trainmedic_agent.log_reading.budgets import NODE_ITSELF, BudgetOwner
from trainmedic_agent.log_reading.cut_record import CutRecord
from trainmedic_agent.log_reading.finders import Finder, LayoutFinder, PodFinder, readable
from trainmedic_agent.log_reading.job_sources import JobSources
from trainmedic_agent.log_reading.log_policy import LogsPolicy
from trainmedic_logs.domain.finding import Origin
from trainmedic_logs.domain.log_cuts import CutKind

SMALL_SECONDS = 0.5  # limit of a look at a small unit
SMALL_ENTRIES = 2_000  # entries of a small unit
LARGE_SECONDS = 3.0  # limit of a look at a large unit
CHEAP_SECONDS = 0.02  # quicker looks are repeated early for a waiting caller
# Above this used time, which halves every minute, a user's large units wait: they get about 1/17 of the time.
USER_SECONDS = 5.0
MOST_DUE = 2_000  # units per user, directory and scan, longest due first
MOST_JOBS = 10_000  # units per user and directory, of new ones the most recently changed
MOST_FOUND = 2_000  # files in a job's directory, and named by it, most recently written
MOST_OF_USER = 10_000  # files per user
_PAUSE_PER_COST = 50  # so a job's scans take at most a fiftieth of the time
_LEAST_PAUSE = 1.0  # seconds between looks at a unit
_UNITS_PER_SECOND = 1000  # most looks per second at all units together
_MOST_DIRECTORIES = 50_000  # remembered names
_QUIET_SECONDS = 60.0  # units without a write for this long get half of `_UNITS_PER_SECOND`

FileKey = tuple[int, int]  # device and inode


class FoundFile(Struct, frozen=True):
    path: str
    device: int
    inode: int
    size: int
    written_ns: int
    """Nanoseconds since 1970."""
    origin: Origin | None  # None: no log by its path, but a followed file that was renamed, as by rotation
    owner: BudgetOwner = NODE_ITSELF
    named_by: NamedBy | None = None  # the job's sources file that names it; None for files in the job's directory

    @property
    def key(self) -> FileKey:
        return self.device, self.inode


class ScanBudget:
    def __init__(self, entries: int, is_stopping: Callable[[], bool], seconds: float | None = None) -> None:
        self._left = self.most = entries
        self._is_stopping = is_stopping
        self._ends_at = None if seconds is None else time.monotonic() + seconds
        self.is_late = False  # True if the time ran out
        self._has_more = False  # True if a directory has entries that were not listed

    @property
    def is_cut(self) -> bool:
        """True if there are `most` entries or more, or more than one listing may have."""
        return self._left <= 0 or self._has_more

    @property
    def taken(self) -> int:
        return self.most - self._left

    @property
    def room(self) -> int:
        """Entries that may be listed; the last one left shows that a directory has more."""
        return max(self._left - 1, 0)

    def take(self, listing: Listing) -> None:
        self._left -= len(listing.entries) + listing.is_cut
        self._has_more |= listing.is_cut

    def may_continue(self) -> bool:
        """Return False after a stop, or when the time is up, which sets `is_late`."""
        if self._ends_at is not None and time.monotonic() >= self._ends_at:
            self.is_late = True
        return not self.is_late and not self._is_stopping()


class ScanUnit(Struct):
    name: str
    path: str
    owner: BudgetOwner
    finder: Finder
    sources: JobSources | None
    """None if the layout has none."""
    found_by: Finder
    """The finder without this directory's specifics."""
    identity: tuple[int, int, int]
    """Device, inode and owner."""
    first_name: str
    """Name before renames."""
    files: tuple[FoundFile, ...] = ()
    named: tuple[FoundFile, ...] = ()  # files that the job's sources files name
    refused: Counter[UnreadReason] = field(default_factory=Counter)
    changed_ns: int = -1
    """Directory's last change, in nanoseconds since 1970; -1 before the first look."""
    looked_at: float = float("-inf")
    """Monotonic time at which the last search began."""
    written_ns: int = 0
    """Last known write, in nanoseconds since 1970."""
    costs: tuple[float, float, float] = (0.0, 0.0, 0.0)
    """Seconds of the latest looks."""
    is_large: bool = False  # True if another thread looks at it, see `LargeLooks`
    is_in_progress: bool = False
    """True until the other thread's result is taken."""
    due: float = float("-inf")
    """Monotonic time of the next look."""

    def record_look(self, began: float, ended: float, units: int, *, is_late: bool) -> None:
        """Record a look and schedule the next. `units`: number of all units.

        A look that ran out of time is repeated in the next scan, unless this unit is always slow.
        """
        _, second, third = self.costs
        self.costs = second, third, ended - began
        wait = _PAUSE_PER_COST * self.cost
        if not is_late:
            quiet = min(max(self.quiet_seconds(time.time()) / _QUIET_SECONDS, 0.0), 1.0)
            wait = max(_LEAST_PAUSE, wait, (1.0 + quiet) * units / _UNITS_PER_SECOND)
        self.due = ended + wait

    def quiet_seconds(self, now: float) -> float:
        """Return the seconds since the last known write. `now` is UNIX time."""
        return now - self.written_ns / 1e9

    @property
    def cost(self) -> float:
        """Seconds of the shortest of the latest looks: a busy machine can interrupt any."""
        return min(self.costs)

    @property
    def all_files(self) -> tuple[FoundFile, ...]:
        return (*self.files, *self.named)


class _KnownDirectory(Struct, frozen=True):
    first_name: str
    latest_name: str
    uid: int
    written_ns: int


class DirectoryNames:
    """First names of job directories, so that a rename does not assign logs to another job.

    Writers of a non-sticky directory can rename others' directories. One is identified by device, inode and owner, if
    renamed also by its last change.
    """

    def __init__(self) -> None:
        self._known: dict[tuple[int, int], _KnownDirectory] = {}

    def first_of(self, name: str, facts: FileFacts) -> str:
        """Record a directory's present name; return its first one."""
        key = (facts.device, facts.inode)
        known = self._known.pop(key, None)
        # With another name and another time, it may be a new directory with the inode of a deleted one.
        is_same = (
            known is not None
            and known.uid == facts.uid
            and (known.written_ns == facts.written_ns or known.latest_name == name)
        )
        first = known.first_name if known is not None and is_same else name
        self._known[key] = _KnownDirectory(first, name, facts.uid, facts.written_ns)
        if len(self._known) > _MOST_DIRECTORIES:
            del self._known[next(iter(self._known))]
        return first


class UnitTable:
    """Units of a policy directory."""

    def __init__(self, policy: LogsPolicy, node: str, cuts: CutRecord, files: NodeFiles, names: DirectoryNames) -> None:
        self._names = names
        self._may_be_renamed = False  # see `Listing`
        self.by_name: dict[str, ScanUnit] = {}
        self._policy = policy
        self._node = node
        self._cuts = cuts
        self._files = files

    def update(self, path: str, present: Sequence[tuple[str, Finder]], *, may_be_renamed: bool) -> None:
        """Make the units match the directories `present`. Raises OSError, LogRefused."""
        self._may_be_renamed = may_be_renamed
        units, finders = self.by_name, dict(present)
        for name in [name for name in units if name not in finders]:
            del units[name]
        new: dict[int, list[tuple[int, str, FileFacts]]] = {}
        names = sorted(finders.keys() - units.keys())
        for name, facts in zip(names, self._files.facts(path, names) if names else (), strict=True):
            if facts is not None:
                new.setdefault(facts.uid, []).append((facts.written_ns, name, facts))
        for uid, named in new.items():
            room = max(MOST_JOBS - sum(unit.owner.uid == uid for unit in units.values()), 0)
            self._cuts.set_count(BudgetOwner(uid), CutKind.JOBS, len(named) - room)
            for _, name, facts in heapq.nlargest(room, named):
                units[name] = self._unit(name, f"{path}/{name}", facts, finders[name])

    def current_unit(self, path: str, unit: ScanUnit, facts: FileFacts) -> ScanUnit:
        """Return `unit`, or its replacement if another directory or owner has its name."""
        first = self._first_name(unit.name, facts)
        if (facts.device, facts.inode, facts.uid) == unit.identity and first == unit.first_name:
            return unit
        made = self._unit(unit.name, f"{path}/{unit.name}", facts, unit.found_by)
        self.by_name[unit.name] = made
        return made

    def _first_name(self, name: str, facts: FileFacts) -> str:
        # If only the owner can rename the directory, the new name is intended.
        return self._names.first_of(name, facts) if self._may_be_renamed else name

    def _unit(self, name: str, path: str, facts: FileFacts, found_by: Finder) -> ScanUnit:
        first, finder, uid = self._first_name(name, facts), found_by, facts.uid
        sources, job = None, readable(log_layout.decoded(first) or first)
        if isinstance(finder, LayoutFinder):
            sources = JobSources(self._policy, self._node, self._files)
            finder = replace(finder, sources=sources, first_name=first)
        elif isinstance(finder, PodFinder):
            job = finder.pod or job
        identity = (facts.device, facts.inode, uid)
        return ScanUnit(name, path, BudgetOwner(uid, job), finder, sources, found_by, identity, first)


def first_of_users(due: Sequence[ScanUnit]) -> list[ScanUnit]:
    """Return at most `MOST_DUE` units per user, so that one user's directories do not delay others."""
    if len(due) <= MOST_DUE:
        return list(due)
    by_user: dict[int | None, list[ScanUnit]] = {}
    for unit in due:
        by_user.setdefault(unit.owner.uid, []).append(unit)
    return [unit for units in by_user.values() for unit in heapq.nsmallest(MOST_DUE, units, key=lambda each: each.due)]


def newest(files: Collection[FoundFile], most: int, known: Collection[FileKey]) -> tuple[FoundFile, ...]:
    """Return at most `most` files: `known` ones, then the most recently written."""
    if len(files) <= most:
        return tuple(files)
    return tuple(heapq.nlargest(most, files, key=lambda file: (file.key in known, file.written_ns)))


def newest_of_users(files: Sequence[FoundFile], most: int, known: Collection[FileKey]) -> list[FoundFile]:
    if len(files) <= most:
        return list(files)
    by_user: dict[int | None, list[FoundFile]] = {}
    for file in files:
        by_user.setdefault(file.owner.uid, []).append(file)
    return [file for of_user in by_user.values() for file in newest(of_user, most, known)]


def trim(units: Sequence[ScanUnit], most: int, known: Collection[FileKey]) -> Mapping[BudgetOwner, int]:
    """Drop the oldest files of each user's largest units, down to `most`; return counts by owner."""
    lost: Counter[BudgetOwner] = Counter()
    totals: Counter[int | None] = Counter()
    for unit in units:
        totals[unit.owner.uid] += len(unit.files) + len(unit.named)
    for uid in [uid for uid, total in totals.items() if total > most]:
        sizes = sorted(len(unit.all_files) for unit in units if unit.owner.uid == uid)
        bound = _common_bound(sizes, most)
        for unit in units:
            if unit.owner.uid == uid and len(unit.all_files) > bound:
                lost[unit.owner] += len(unit.all_files) - bound
                unit.files = newest(unit.files, bound, known)
                unit.named = newest(unit.named, bound - len(unit.files), known)
    return lost


def _common_bound(sizes: Sequence[int], most: int) -> int:
    """Return the largest bound of each of the ascending `sizes` that keeps the sum within `most`."""
    left = most
    for number, size in enumerate(sizes):
        share = left // (len(sizes) - number)
        if size > share:
            return share
        left -= size
    return sizes[-1] if sizes else 0
