"""Following of log files across restarts, renames and truncation, within budgets.

Files are polled: kernel notifications do not work over NFS. One thread reads, another scans: a directory may hang.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from datetime import datetime
from functools import partial
from operator import itemgetter
from typing import Any, Generic, Protocol, TypeVar

from msgspec import Struct
from msgspec.structs import replace

from trainmedic_agent.log_opening.node_files import LogRefused, NodeFiles, UnreadReason
from trainmedic_agent.log_opening.own_files import OwnFiles
from trainmedic_agent.log_reading.budgets import BudgetOwner, FairTurns
from trainmedic_agent.log_reading.cut_record import CutRecord
from trainmedic_agent.log_reading.discovery import Scan
from trainmedic_agent.log_reading.followed_file import KnownFile, known_file, microseconds
from trainmedic_agent.log_reading.log_files import FARTHEST_BEHIND, LARGEST_READ, FilePosition, GrowingFile, ReadSizes
from trainmedic_agent.log_reading.scan_units import FileKey, FoundFile
from trainmedic_logs.domain.finding import Origin
from trainmedic_logs.domain.log_cuts import CutKind
from trainmedic_logs.domain.log_sources import KERNEL_SOURCES

log = logging.getLogger(__name__)

CLOSED_AFTER = 3600.0  # idle seconds
_DELETED_CLOSED_AFTER = 60.0  # idle seconds until a deleted file is closed, to free its disk space
ROUND_SECONDS = 0.5  # limit of a round of reading
_SECONDS_PER_BYTE = 4e-7  # rules process about 35,000 lines of 70 bytes per second
_BUSY_SECONDS = 60.0  # seconds after new data in which a file is polled every round
_IDLE_POLL_SECONDS = 1.0  # between polls of other files
_FORGOTTEN_AFTER = 24 * 3600.0  # seconds for which scans miss a known file
NEW_SECONDS = 24 * 3600.0  # an unknown file is read if written within this time
FIRST_BYTES = 1024 * 1024  # bytes read from the end of files in the first scan ever; 64 MiB of the kernel's log


class Followed(Protocol):
    """An open file: `FollowedFile` for rules, `ShippedFile` for a log store."""

    file: GrowingFile
    origin: Origin

    @property
    def grown_at(self) -> float:
        """Monotonic time of the last new data."""
        ...

    def begin(self) -> None:
        """Have the position stored soon. Raises OSError."""
        ...

    def poll(self, now: datetime, monotonic: float) -> bool:
        """Process new data; return whether there is more. Raises OSError."""
        ...

    def known(self) -> KnownFile: ...

    def has_origin(self, origin: Origin) -> bool: ...

    def change_origin(self, origin: Origin) -> None:
        """Use a more precise origin from the next line on. Raises OSError."""
        ...

    def end(self, now: datetime) -> None:
        """Close it and forget its position. Raises OSError."""
        ...


FollowedT = TypeVar("FollowedT", bound=Followed)


class _FileToOpen(Struct):
    found: FoundFile
    since: float
    """Monotonic time of the choice."""
    is_of_first_scan: bool


_Turn = tuple[FileKey, FollowedT | _FileToOpen]


def _expected_seconds(turn: _Turn[FollowedT]) -> float:
    _, file = turn
    unread = min(file.found.size, LARGEST_READ) if isinstance(file, _FileToOpen) else file.file.next_read_bytes
    return unread * _SECONDS_PER_BYTE


class Positions(Protocol):
    """`RuleRunner` or `ShipPositions`."""

    is_first: bool  # True if none were stored when this process began

    @property
    def can_take(self) -> bool:
        """False while no lines can be processed."""
        ...

    def stored(self) -> Mapping[str, Any]: ...

    def forget(self, key: str) -> None: ...

    def store_if_overdue(self) -> None: ...


class FileCounts(Protocol):
    files: Mapping[str, int]
    """Followed files by source."""
    refused: Mapping[str, int]
    """Files that were not opened, by reason."""


class FileFollowing(Generic[FollowedT]):
    """Files followed for rules, or for shipping. One thread reads, another calls `take_scan`."""

    def __init__(
        self,
        positions: Positions,
        follow: Callable[[GrowingFile, KnownFile, float], FollowedT],
        counters: FileCounts,
        *,
        max_files: int,
        max_job_files: int,
        now: Callable[[], datetime],
        monotonic: Callable[[], float] = time.monotonic,
        sizes: ReadSizes = ReadSizes(),
        cuts: CutRecord | None = None,
        files: NodeFiles = OwnFiles(),
    ) -> None:
        """Raises JournalUnavailable."""
        self._positions = positions
        self._follow_file = follow
        self._counters = counters
        self._max_files, self._max_job_files = max_files, max_job_files
        self._cuts = cuts or CutRecord()
        self._turns = FairTurns(monotonic)
        self._sizes = sizes
        self._files = files
        self._now = now
        self._monotonic = monotonic
        self._lock = threading.Lock()
        self._scan: Scan | None = None
        self._followed: dict[FileKey, FollowedT] = {}
        self._polled_at: dict[FileKey, float] = {}
        self._to_open: dict[FileKey, _FileToOpen] = {}
        self._unopened: dict[FileKey, UnreadReason] = {}  # chosen files that could not be opened
        self._refused: Counter[UnreadReason] = Counter()  # by the last scan, or beyond the limits
        self._known: dict[FileKey, KnownFile] = {}  # closed files with their positions
        self._missing: dict[FileKey, float] = {}  # monotonic time since when scans miss a known file
        self._is_first_scan = positions.is_first
        self._restore()

    @property
    def known_keys(self) -> Collection[FileKey]:
        """Thread-safe."""
        with self._lock:
            return {*self._followed, *self._known}

    def take_scan(self, scan: Scan) -> None:
        with self._lock:
            self._scan = scan

    @property
    def followed(self) -> list[FollowedT]:
        return list(self._followed.values())

    def read(self) -> bool:
        """Open and read for up to `ROUND_SECONDS`; return whether there is more."""
        if not self._positions.can_take:
            return False
        with self._lock:
            scan, self._scan = self._scan, None
        if scan is not None:
            self._choose_files(scan)
        is_opening = bool(self._to_open)
        try:
            return self._take_turns()
        finally:
            if is_opening or scan is not None:
                self._update_counters()

    def _take_turns(self) -> bool:
        began = self._monotonic()
        has_more = False
        for _, (key, file) in self._turns.turns(self._due(began), _expected_seconds):
            monotonic = self._monotonic()
            if monotonic - began >= ROUND_SECONDS:
                return True
            followed = self._open_chosen(key, self._to_open.pop(key)) if isinstance(file, _FileToOpen) else file
            if followed is None:
                continue
            self._polled_at[key] = monotonic
            has_more |= self._poll(key, followed, monotonic)
            self._positions.store_if_overdue()
        return has_more

    def _due(self, now: float) -> Mapping[BudgetOwner, Sequence[_Turn[FollowedT]]]:
        """Return each owner's turns, the longest waiting first."""
        due: dict[BudgetOwner, list[tuple[float, _Turn[FollowedT]]]] = {}
        for key, file in self._followed.items():
            polled_at = self._polled_at.get(key, 0.0)
            if now - file.grown_at < _BUSY_SECONDS or now - polled_at >= _IDLE_POLL_SECONDS:
                due.setdefault(file.file.owner, []).append((polled_at, (key, file)))
        for key, chosen in self._to_open.items():
            due.setdefault(chosen.found.owner, []).append((chosen.since, (key, chosen)))
        return {owner: [turn for _, turn in sorted(turns, key=itemgetter(0))] for owner, turns in due.items()}

    def _update_counters(self) -> None:
        refused = self._refused + Counter(self._unopened.values())
        self._counters.refused = {reason.value: count for reason, count in refused.items() if count}
        self._counters.files = Counter(file.origin.source for file in self._followed.values())

    def close(self) -> None:
        for file in self._followed.values():
            file.file.close()
        self._followed.clear()

    def _poll(self, key: FileKey, file: FollowedT, monotonic: float) -> bool:
        try:
            if file.poll(self._now(), monotonic):
                return True
            quiet = monotonic - file.grown_at
            if quiet > _DELETED_CLOSED_AFTER and file.file.link_count == 0:
                self._drop(key)
                file.end(self._now())
            elif quiet > CLOSED_AFTER:
                self._close(key, file)
        except OSError as error:
            # The file system is gone or failing; the next scan finds the file again.
            log.warning("cannot continue reading a log", extra={"path": file.origin.stream, "reason": str(error)})
            self._close(key, file)
        return False

    def _drop(self, key: FileKey) -> None:
        with self._lock:
            self._followed.pop(key, None)
        self._polled_at.pop(key, None)

    def _choose_files(self, scan: Scan) -> None:
        """Choose files with new data to open: within each owner's share, the most recently written.

        They are opened in the order of their last writes: a failure belongs to the first attempt that shows it.
        """
        refused = Counter(scan.refused)
        now, monotonic = self._now().timestamp(), self._monotonic()
        wanted: list[FoundFile] = []
        for found in sorted(scan.files, key=lambda file: -file.written_ns):
            followed = self._followed.get(found.key)
            if followed is None:
                if self._is_to_read(found, now):
                    wanted.append(found)
                continue
            followed.file.owner = found.owner
            # A rename does not assign an open file to another job.
            is_in_place = found.origin is not None and found.origin.stream == followed.origin.stream
            if is_in_place and found.origin is not None and not followed.has_origin(found.origin):
                with contextlib.suppress(OSError):  # the next poll reports errors, and the next scan tries again
                    followed.change_origin(found.origin)
        owners = {key: file.file.owner for key, file in self._followed.items()}
        chosen = shares(owners, wanted, self._max_files, self._max_job_files)
        for key in chosen.closed:
            self._close(key, self._followed[key])
        earlier = self._to_open
        self._to_open = {}
        for found in sorted(chosen.opened, key=lambda file: file.written_ns):
            before = earlier.get(found.key) or _FileToOpen(found, monotonic, self._is_first_scan)
            self._to_open[found.key] = _FileToOpen(found, before.since, before.is_of_first_scan)
        self._unopened = {key: reason for key, reason in self._unopened.items() if key in self._to_open}
        for owner, count in chosen.left_out.items():
            refused[UnreadReason.TOO_MANY] += count
            self._cuts.set_count(owner, CutKind.FILES, count)
        self._forget_missing(scan)
        self._is_first_scan = False
        self._refused = refused

    def _close(self, key: FileKey, file: FollowedT) -> None:
        self._drop(key)
        with self._lock:
            self._known[key] = file.known()
        file.file.close()

    def _is_to_read(self, found: FoundFile, now: float) -> bool:
        known = self._known.get((found.device, found.inode))
        if known is not None:
            is_unchanged = (found.size, found.written_ns) == (known.position.offset, known.position.written_ns)
            has_pending_excerpts = bool(known.stream.get("excerpts"))  # of `LineStream`
            return has_pending_excerpts or not is_unchanged
        if found.origin is None:
            return False
        return now - found.written_ns / 1e9 < NEW_SECONDS or found.origin.source in KERNEL_SOURCES

    def _open_chosen(self, key: FileKey, chosen: _FileToOpen) -> FollowedT | None:
        """Return None if it cannot be opened; the next scan may choose it again."""
        found = chosen.found
        self._unopened.pop(key, None)
        try:
            file, known = self._open_at_position(key, found)
        except LogRefused as unread:
            self._unopened[key] = unread.reason
            return None
        except PermissionError:
            self._unopened[key] = UnreadReason.FORBIDDEN
            return None
        except OSError as error:  # other errors: vanished or replaced
            if error.errno in (errno.EMFILE, errno.ENFILE):  # this process's limit, or the node's
                self._unopened[key] = UnreadReason.TOO_MANY
            return None
        if chosen.is_of_first_scan and key not in self._known:
            is_whole = known.origin.source in KERNEL_SOURCES
            file.start_at(found.size - (FARTHEST_BEHIND if is_whole else FIRST_BYTES))
        file.owner = found.owner
        followed = self._follow_file(file, known, self._monotonic())
        with self._lock:
            self._known.pop(key, None)
            self._missing.pop(key, None)
            self._followed[key] = followed
        with contextlib.suppress(OSError):  # the next poll reports errors
            followed.begin()
        return followed

    def _open_at_position(self, key: FileKey, found: FoundFile) -> tuple[GrowingFile, KnownFile]:
        """Raises OSError, LogRefused."""
        known = self._known.get(key)
        if known is not None:
            origin = known.origin
            if found.origin is not None and found.path == known.position.path:
                origin = found.origin  # a sources file that was written later may state more of the rank
            file = self._open(found, known.position, origin)
            # Under its old path, the first poll notices another content.
            if found.path == known.position.path or file.look():
                return file, replace(known, origin=origin)
            file.close()  # a new file with a reused inode
            self._positions.forget(known.key)
            with self._lock:
                del self._known[key]
        if found.origin is None:
            raise FileNotFoundError(errno.ENOENT, "the followed file was replaced", found.path)
        position = FilePosition(found.path, *key, since=microseconds(self._now()))
        known = KnownFile(position, found.origin, {})
        return self._open(found, known.position, found.origin), known

    def _open(self, found: FoundFile, position: FilePosition, origin: Origin) -> GrowingFile:
        return GrowingFile.open(
            found.path,
            position,
            is_whole=origin.source in KERNEL_SOURCES,
            sizes=self._sizes,
            open_log=partial(self._files.open, named_by=found.named_by),
        )

    def _forget_missing(self, scan: Scan) -> None:
        """Forget known files after a day without them: file systems may be temporarily unavailable."""
        monotonic = self._monotonic()
        present = {(found.device, found.inode) for found in scan.files}
        self._missing = {key: self._missing.get(key, monotonic) for key in self._known if key not in present}
        for key, since in list(self._missing.items()):
            if monotonic - since > _FORGOTTEN_AFTER:
                with self._lock:
                    known = self._known.pop(key)
                self._positions.forget(known.key)

    def _restore(self) -> None:
        for kept in self._positions.stored().values():
            known = known_file(kept)
            if known is not None:
                self._known[known.position.device, known.position.inode] = known


class FileShares(Struct, frozen=True):
    opened: Sequence[FoundFile]  # wanted files to open
    closed: Sequence[FileKey]  # followed files to close
    left_out: Mapping[BudgetOwner, int]  # number of files neither opened nor kept open


def shares(
    followed: Mapping[FileKey, BudgetOwner], wanted: Iterable[FoundFile], most: int, most_of_job: int
) -> FileShares:
    """Choose at most `most` files, and `most_of_job` per job, from users and their jobs in turn.

    A job's followed files precede its `wanted` ones, which are in order of importance.
    """
    queues: dict[BudgetOwner, deque[FoundFile | FileKey]] = {}
    for key, owner in followed.items():
        queues.setdefault(owner, deque()).append(key)
    for file in wanted:
        queues.setdefault(file.owner, deque()).append(file)
    left_out: Counter[BudgetOwner] = Counter()
    closed: list[FileKey] = []
    for owner, queue in queues.items():
        if owner.job is not None and len(queue) > most_of_job:
            _leave_out([queue.pop() for _ in range(len(queue) - most_of_job)], owner, closed, left_out)
    opened: list[FoundFile] = []
    room = most
    users: dict[int | None, deque[BudgetOwner]] = {}
    for owner in queues:
        users.setdefault(owner.uid, deque()).append(owner)
    waiting = deque(users.values())
    while waiting and room > 0:
        jobs = waiting.popleft()
        owner = jobs.popleft()
        queue = queues[owner]
        if not queue:
            if jobs:
                waiting.appendleft(jobs)
            continue
        chosen = queue.popleft()
        room -= 1
        if isinstance(chosen, FoundFile):
            opened.append(chosen)
        jobs.append(owner)
        waiting.append(jobs)
    for owner, queue in queues.items():
        _leave_out(queue, owner, closed, left_out)
    return FileShares(opened, closed, left_out)


def _leave_out(
    files: Collection[FoundFile | FileKey], owner: BudgetOwner, closed: list[FileKey], left_out: Counter[BudgetOwner]
) -> None:
    if files:
        left_out[owner] += len(files)
        closed.extend(file for file in files if not isinstance(file, FoundFile))
