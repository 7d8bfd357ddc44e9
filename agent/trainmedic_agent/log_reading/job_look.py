"""Looks at jobs' directories, and the thread for large ones."""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence

from msgspec import Struct, field

from trainmedic.wire.log_limit import LogLimit
from trainmedic_agent.log_opening.node_files import NodeFiles, UnreadReason
from trainmedic_agent.log_reading.budgets import BudgetOwner, FairTurns
from trainmedic_agent.log_reading.directory_look import DirectoryLook, LookPlace
from trainmedic_agent.log_reading.scan_units import LARGE_SECONDS, FileKey, FoundFile, ScanBudget, ScanUnit

log = logging.getLogger(__name__)

OLD_SECONDS = 6 * 3600.0  # seconds without a write until scans are rare
_OLD_PAUSE = 60.0  # seconds between scans of an old job, unless its directory changes
_IDLE_SECONDS = 0.5  # pause without a large job to look at
_log_limit = LogLimit()

DueUnit = tuple[ScanUnit, int]  # unit, and its directory's last change in ns since 1970, -1 if gone or unreadable


class Looked(Struct):
    unit: ScanUnit
    changed_ns: int  # as in `DueUnit`
    budget: ScanBudget
    began: float  # monotonic, as `ended`
    ended: float = 0.0
    files: Sequence[FoundFile] = ()
    named: Sequence[FoundFile] = ()  # files that the job's sources files name
    refused: Counter[UnreadReason] = field(default_factory=Counter)
    is_unchanged: bool = False
    """True if an old job was not searched."""
    is_stopped: bool = False  # True if a stop may have interrupted it
    is_failed: bool = False  # True after an unexpected error


def look_at(
    unit: ScanUnit,
    changed_ns: int,
    files: NodeFiles,
    known: Collection[FileKey],
    budget: ScanBudget,
    is_stopping: Callable[[], bool],
) -> Looked:
    """Look at a job, unless it is old and unchanged. Log unexpected errors, so that they hide no other job's logs."""
    looked = Looked(unit, changed_ns, budget, time.monotonic())
    try:
        is_old = unit.quiet_seconds(time.time()) > OLD_SECONDS
        if is_old and unit.changed_ns == changed_ns and looked.began - unit.looked_at < _OLD_PAUSE:
            looked.is_unchanged = True
        elif changed_ns >= 0:
            _look(looked, DirectoryLook(files, known, budget, unit.owner, unit.sources))
        looked.is_stopped = is_stopping()
    except Exception:  # boundary of one job
        looked.is_failed = True
        if _log_limit.lets_through():
            log.exception("scanning a job's logs failed unexpectedly", extra={"path": unit.path})
    looked.ended = time.monotonic()
    return looked


def _look(looked: Looked, look: DirectoryLook) -> None:
    unit = looked.unit
    if unit.sources is not None:
        unit.sources.begin_scan()
    # The newest attempt is scanned first, in case time runs out. Equally old files are read in the order of attempts.
    looked.files = sorted(look.walk(LookPlace(unit.path, unit.finder)), key=_attempt_of)
    looked.named = list(look.named())
    looked.refused = look.refused
    if unit.sources is not None and unit.sources.outside:
        looked.refused[UnreadReason.OUTSIDE] += unit.sources.outside


class LargeLooks:
    def __init__(self, files: NodeFiles, most_entries: int) -> None:
        self._files = files
        self._most_entries = most_entries
        self._lock = threading.Lock()
        self._turns = FairTurns()
        self._waiting: Mapping[BudgetOwner, Sequence[DueUnit]] = {}
        self._known: Collection[FileKey] = ()
        self._is_stopping: Callable[[], bool] = lambda: False
        self._results: list[Looked] = []

    # --- called by the scanning thread ---

    def used_by(self, uid: int | None) -> float:
        return self._turns.used_by(uid)

    def wait_for(
        self,
        due: Mapping[BudgetOwner, Sequence[DueUnit]],
        known: Collection[FileKey],
        is_stopping: Callable[[], bool],
    ) -> None:
        """Replace the jobs to look at."""
        with self._lock:
            self._waiting, self._known, self._is_stopping = due, known, is_stopping

    def results(self) -> list[Looked]:
        """Return and remove the results."""
        with self._lock:
            results, self._results = self._results, []
            for looked in results:
                looked.unit.is_in_progress = False
            return results

    # --- called by the thread for large jobs ---

    def look(self) -> float:
        """Look at the next job; return the seconds until the next call."""
        with self._lock:
            known, is_stopping = self._known, self._is_stopping
            waiting = {
                owner: left
                for owner, due in self._waiting.items()
                if (left := [each for each in due if not each[0].is_in_progress])
            }
        for _, (unit, changed_ns) in self._turns.turns(waiting, lambda due: due[0].cost):
            with self._lock:
                unit.is_in_progress = True
            budget = ScanBudget(self._most_entries, is_stopping, LARGE_SECONDS)
            used = time.thread_time()
            looked = look_at(unit, changed_ns, self._files, known, budget, is_stopping)
            with self._lock:
                self._results.append(looked)
            return time.thread_time() - used  # so it uses at most half of a core's time
        return _IDLE_SECONDS


def _attempt_of(file: FoundFile) -> int:
    return (file.origin.attempt or 0) if file.origin is not None else 0
