"""Search for log files below the policy's directories, without following symbolic links.

Each job's directory is scanned as often as its cost allows. Users take turns by used time, a user's small jobs by
waiting time.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from itertools import chain

from msgspec import Struct
from msgspec.structs import replace

from trainmedic.wire import log_layout
from trainmedic_agent.log_opening.node_files import FileFacts, LogRefused, NodeFiles, UnreadReason
from trainmedic_agent.log_opening.own_files import OwnFiles
from trainmedic_agent.log_reading.budgets import BudgetOwner, FairTurns
from trainmedic_agent.log_reading.cut_record import CutRecord
from trainmedic_agent.log_reading.directory_look import DirectoryLook, LookPlace
from trainmedic_agent.log_reading.finders import Finder, LayoutFinder, NamedFiles, PatternFinder, PodFinder
from trainmedic_agent.log_reading.job_look import DueUnit, LargeLooks, Looked, look_at
from trainmedic_agent.log_reading.job_sources import JobSources
from trainmedic_agent.log_reading.log_policy import LogsPolicy
from trainmedic_agent.log_reading.scan_units import (
    CHEAP_SECONDS,
    MOST_FOUND,
    MOST_OF_USER,
    SMALL_ENTRIES,
    SMALL_SECONDS,
    USER_SECONDS,
    DirectoryNames,
    FileKey,
    FoundFile,
    ScanBudget,
    ScanUnit,
    UnitTable,
    first_of_users,
    newest,
    newest_of_users,
    trim,
)
from trainmedic_logs.domain.finding import Origin
from trainmedic_logs.domain.log_cuts import CutKind

PODS = "/var/log/pods"
_MOST_WAITING = 20.0  # see `FairTurns`; with the opener, a look takes two to ten times its processor time
_STOP_CHECK_SECONDS = 0.1  # between looks of a waiting search whether to stop
MOST_ENTRIES = 2_000_000  # entries directly in a policy directory; an opener lists at most `opener.MOST_LISTED`


class Scan(Struct, frozen=True):
    files: tuple[FoundFile, ...]  # logs without dumps
    refused: Mapping[UnreadReason, int]  # number of paths that are not read, by reason
    dumps: tuple[FoundFile, ...] = ()
    is_cut: bool = False  # True if a directory had too many entries
    late: int = 0
    """Jobs not scanned completely in time."""
    is_behind: bool = False
    """True if small jobs are late: scan again soon."""
    errors: int = 0  # unexpected ones, already logged
    is_stale: bool = False  # set by `SharedScan`, which returns an earlier scan if the next takes too long


class _Top(Struct):
    """A policy directory: files directly in it, and job directories by name."""

    path: str
    files: tuple[FoundFile, ...] = ()
    units: Mapping[str, ScanUnit] = {}


# Not thread-safe, except `large`, whose `look` has a thread of its own.
class Discovery:
    def __init__(
        self,
        policy: LogsPolicy,
        node: str,
        pods: str = PODS,
        kernel_file: str | None = None,
        cuts: CutRecord | None = None,
        files: NodeFiles = OwnFiles(),
    ) -> None:
        self._policy = policy
        self._node = node
        self._files = files
        self._cuts = cuts or CutRecord()
        # These finders' JobSources stay unused: each unit has its own.
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
        self._turns = FairTurns(most_waiting=_MOST_WAITING)
        names = DirectoryNames()
        self._units = [UnitTable(policy, node, self._cuts, files, names) for _ in self._tops]
        self.large = LargeLooks(files, policy.max_job_entries)  # looks at large jobs, made by another thread
        self._known: Collection[FileKey] = ()  # see `scan`
        self._late = 0
        self._is_behind = False
        self._errors = 0

    def scan(
        self,
        known: Collection[FileKey],
        is_stopping: Callable[[], bool],
        seconds: float | None = None,
        *,
        is_asked: bool = False,
    ) -> Scan:
        """Scan the due jobs; all, without time limits, if `seconds` is None. `known`: files followed under any name.

        It ends after about `seconds`, a small job's scan after `SMALL_SECONDS`. Jobs not reached keep their previous
        result. `is_asked`: a caller waits, so cheap units come first.
        """
        self._known, refused, is_cut, self._errors = known, Counter[UnreadReason](), False, 0
        tops: list[_Top] = []
        for (path, finder), units in zip(self._tops, self._units, strict=True):
            budget = ScanBudget(MOST_ENTRIES, is_stopping)
            tops.append(self._scan_top(path, finder, units, budget, refused))
            is_cut |= budget.is_cut
        self._late = 0
        is_cut |= self._look_at_units(tops, is_stopping, seconds, CHEAP_SECONDS if is_asked else 0.0)
        return self._merged(tops, refused, is_cut)

    def _merged(self, tops: Sequence[_Top], refused: Counter[UnreadReason], is_cut: bool) -> Scan:
        units = [unit for top in tops for unit in top.units.values()]
        for owner, count in trim(units, MOST_OF_USER, self._known).items():
            self._cuts.set_count(owner, CutKind.FILES, count)
        files: dict[FileKey, FoundFile] = {}
        for top in tops:
            for file in chain(top.files, *(unit.files for unit in top.units.values())):
                _add_once(files, file)
        for unit in units:
            for file in unit.named:
                _add_once(files, file)
            refused += unit.refused
        dumps = tuple(file for file in files.values() if is_dump(file))
        logs = tuple(file for file in files.values() if not is_dump(file))
        return Scan(logs, +refused, dumps, is_cut, self._late, self._is_behind, self._errors)

    # --- policy directories ---

    def _scan_top(
        self, path: str, finder: Finder, units: UnitTable, budget: ScanBudget, refused: Counter[UnreadReason]
    ) -> _Top:
        look, place = DirectoryLook(self._files, self._known, budget), LookPlace(path, finder)
        top = _Top(path)
        try:
            deeper, files, listing = look.listed(place, units.by_name)
            found = list(look.logs_among(place, files, listing.device))
            units.update(path, deeper, may_be_renamed=listing.may_be_renamed)
            top = _Top(path, tuple(newest_of_users(found, MOST_OF_USER, self._known)), units.by_name)
        except (OSError, LogRefused) as error:
            look.count_error(error)
            units.by_name.clear()  # `FileFollowing` remembers the files for a day
        if budget.is_cut:
            self._cuts.add(BudgetOwner(None, path), CutKind.ENTRIES)  # reported in place of a job
        refused += look.refused
        return top

    # --- job directories ---

    def _look_at_units(
        self,
        tops: Sequence[_Top],
        is_stopping: Callable[[], bool],
        seconds: float | None,
        cheap: float,
    ) -> bool:
        """Return whether a unit had too many entries."""
        now = time.monotonic()
        count = sum(len(top.units) for top in tops)
        is_cut = False
        for looked in self.large.results():
            is_cut |= self._store_result(looked, count)
            self._late += self._is_partial(looked)
        small, large = self._due_units(tops, now, seconds, cheap)
        self.large.wait_for(large, self._known, is_stopping)
        entries = self._policy.max_job_entries if seconds is None else min(SMALL_ENTRIES, self._policy.max_job_entries)
        self._is_behind = False
        for _, (unit, changed_ns) in self._turns.turns(small, lambda item: item[0].cost):
            if is_stopping() or (seconds is not None and time.monotonic() - now >= seconds):
                self._is_behind = True
                break
            budget = ScanBudget(entries, is_stopping, None if seconds is None else SMALL_SECONDS)
            looked = look_at(unit, changed_ns, self._files, self._known, budget, is_stopping)
            is_cut |= self._store_result(looked, count)
            self._late -= not self._is_partial(looked)
            self._is_behind |= budget.is_late
        return is_cut

    def _due_units(
        self, tops: Sequence[_Top], now: float, seconds: float | None, cheap: float
    ) -> tuple[Mapping[BudgetOwner, Sequence[DueUnit]], Mapping[BudgetOwner, Sequence[DueUnit]]]:
        """Return the units to look at here, by user, and for the other thread, by job. All count as late until then."""
        small: dict[BudgetOwner, list[DueUnit]] = {}
        large: dict[BudgetOwner, list[DueUnit]] = {}
        for top, table in zip(tops, self._units, strict=True):
            every = [unit for unit in top.units.values() if seconds is None or unit.due <= now or unit.cost < cheap]
            self._late += len(every)
            # Exclude units that would be skipped: they must not displace others of their user.
            due = every if seconds is None else first_of_users(list(filter(self._may_look_at, every)))
            for unit, facts in zip(due, self._facts_of_units(top.path, due), strict=True):
                current = table.current_unit(top.path, unit, facts) if facts is not None else unit
                due_unit = current, facts.written_ns if facts is not None else -1
                if current.is_large and seconds is not None:
                    large.setdefault(current.owner, []).append(due_unit)
                else:
                    small.setdefault(BudgetOwner(current.owner.uid), []).append(due_unit)
        for units in small.values():
            units.sort(key=lambda due_unit: due_unit[0].due)
        return small, large

    def _may_look_at(self, unit: ScanUnit) -> bool:
        if not unit.is_large:
            return True
        if unit.is_in_progress:
            return False
        if self.large.used_by(unit.owner.uid) <= USER_SECONDS:
            return True
        self._cuts.add(unit.owner, CutKind.SECONDS)
        return False

    def _facts_of_units(self, path: str, units: Sequence[ScanUnit]) -> Sequence[FileFacts | None]:
        if not units:
            return []
        try:
            return self._files.facts(path, [unit.name for unit in units])
        except (OSError, LogRefused):
            return [None] * len(units)

    def _is_partial(self, looked: Looked) -> bool:
        budget = looked.budget
        return budget.is_late or (budget.is_cut and budget.most < self._policy.max_job_entries)

    def _store_result(self, looked: Looked, units: int) -> bool:
        """Store a look's result; return whether it had too many entries. `units`: number of all."""
        unit, budget = looked.unit, looked.budget
        if looked.is_stopped:
            return False  # earlier results still hold, and the next look is due
        if looked.changed_ns < 0:  # the directory is gone or unreadable
            unit.files, unit.named, unit.refused = (), (), looked.refused
            return False
        unit.record_look(looked.began, looked.ended, units, is_late=budget.is_late)
        if looked.is_failed:
            self._errors += 1
            return False
        is_partial = self._is_partial(looked)
        is_crowded = (budget.is_cut and is_partial) or budget.taken > SMALL_ENTRIES
        unit.is_large = is_crowded or unit.cost > SMALL_SECONDS
        if looked.is_unchanged:
            return False
        files, named = looked.files, looked.named
        if is_partial:  # files not reached may still exist
            files, named = _joined(unit.files, files), _joined(unit.named, named)
        if budget.is_late:
            self._cuts.add(unit.owner, CutKind.SECONDS)
        is_cut = budget.is_cut and not is_partial
        if is_cut:
            self._cuts.add(unit.owner, CutKind.ENTRIES)
        dropped = sum(max(len(found) - MOST_FOUND, 0) for found in (files, named))
        self._cuts.set_count(unit.owner, CutKind.FILES, dropped)
        unit.files, unit.named = newest(files, MOST_FOUND, self._known), newest(named, MOST_FOUND, self._known)
        unit.changed_ns, unit.looked_at, unit.refused = looked.changed_ns, looked.began, looked.refused
        unit.written_ns = max((looked.changed_ns, *(file.written_ns for file in unit.all_files)))
        return is_cut


def _joined(before: Sequence[FoundFile], found: Sequence[FoundFile]) -> list[FoundFile]:
    return list(({file.key: file for file in before} | {file.key: file for file in found}).values())


def _add_once(files: dict[FileKey, FoundFile], file: FoundFile) -> None:
    # Two directories may list a file, one without origin (see `FoundFile`).
    if file.key not in files or files[file.key].origin is None:
        files[file.key] = file


def is_dump(file: FoundFile) -> bool:
    return file.origin is not None and file.origin.source == log_layout.FLIGHT_RECORDER


class SharedScan:
    """The latest scan, shared with searches, which request the next one."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._begun = self._ended = 0
        self._is_wanted = self._is_stopped = False
        self._latest = Scan((), {})

    # --- called by the scanning thread ---

    def begin(self) -> bool:
        """Return whether a search waits."""
        with self._changed:
            self._begun += 1
            is_wanted, self._is_wanted = self._is_wanted, False
            return is_wanted

    def end(self, scan: Scan) -> None:
        with self._changed:
            self._ended, self._latest = self._begun, scan
            self._changed.notify_all()

    def pause(self, seconds: float) -> None:
        """Wait up to `seconds` until a search requests a scan."""
        with self._changed:
            self._changed.wait_for(lambda: self._is_wanted or self._is_stopped, seconds)

    def stop(self) -> None:
        with self._changed:
            self._is_stopped = True
            self._changed.notify_all()

    # --- called by the searching thread ---

    def scan(self, is_stopping: Callable[[], bool], seconds: float) -> Scan:
        """Return a scan that began after this call; after `seconds` or a stop the last one, marked as stale."""
        until = time.monotonic() + seconds
        with self._changed:
            begun, self._is_wanted = self._begun, True
            self._changed.notify_all()
            while self._ended <= begun:
                if is_stopping() or self._is_stopped or time.monotonic() > until:
                    return replace(self._latest, is_stale=True)
                self._changed.wait(_STOP_CHECK_SECONDS)
            return self._latest
