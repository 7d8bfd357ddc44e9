"""Shipping thread: merges lines by time into batches, and pushes each until the store has it.

Loki rejects lines far behind others with the same labels, so the oldest line of all files goes next.
"""

from __future__ import annotations

import contextlib
import heapq
import logging
import random
import re
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Collection, Sequence

from msgspec.structs import replace

from trainmedic.wire.log_limit import LogLimit
from trainmedic_agent.log_opening.node_files import NodeFiles
from trainmedic_agent.log_opening.own_files import OwnFiles
from trainmedic_agent.log_reading import kernel_log
from trainmedic_agent.log_reading.discovery import Scan
from trainmedic_agent.log_reading.files import FileFollowing
from trainmedic_agent.log_reading.followed_file import KnownFile
from trainmedic_agent.log_reading.log_files import GrowingFile
from trainmedic_agent.log_reading.log_policy import KernelReading, LogsPolicy
from trainmedic_agent.log_reading.log_store import NodeBoot
from trainmedic_agent.log_reading.reading_context import ReadingContext
from trainmedic_agent.log_shipping.entries import Labels, ShippedLines, StoreEntry
from trainmedic_agent.log_shipping.ship_counters import LostReason, ShipCounters
from trainmedic_agent.log_shipping.ship_policy import ShipPolicy
from trainmedic_agent.log_shipping.ship_positions import ShipPositions
from trainmedic_agent.log_shipping.shipped_file import SIZES, ShippedFile
from trainmedic_agent.log_shipping.shipped_kernel import KEY, ShippedKernel
from trainmedic_agent.log_shipping.store_push import Answer, Outcome, StorePush
from trainmedic_logs.domain.finding import Origin

log = logging.getLogger(__name__)

BATCH_SECONDS = 1.0  # between batches without backlog
MOST_BYTES = 1024 * 1024  # per push, uncompressed, as `StoreEntry.size` estimates it (a character counts as a byte)
_LEAST_BYTES = 16 * 1024  # of a push after rate limits
MOST_JOBS = 100  # per hour, because each adds labels to the store's index
_JOB_SECONDS = 3600.0  # for which a job counts
_STORE_SECONDS = 2.0  # between writes of positions
_FIRST_PAUSE, _LONGEST_PAUSE = 1.0, 60.0  # seconds between failing pushes
_MOST_REFUSALS = 25  # bisecting a full batch needs half as many
_KERNEL_RETRY_SECONDS = 60.0  # between attempts to open the kernel's log
_PAUSE_AFTER_ERROR = 1.0  # seconds
_NUMBER = re.compile(r"\S*\d\S*")  # counts, times and IDs, which differ in each answer


# The scanning thread calls `known_keys` and `take_scan`. `round` and what it calls run in the thread ``log-ship``.
class LogShipping:
    def __init__(
        self,
        context: ReadingContext,
        policy: LogsPolicy,
        ship: ShipPolicy,
        boot: NodeBoot,
        push: StorePush,
        *,
        files: NodeFiles = OwnFiles(),
        monotonic: Callable[[], float] = time.monotonic,
        kmsg: str = kernel_log.KMSG,
    ) -> None:
        """Raises JournalUnavailable."""
        self.counters = ShipCounters()
        self._context = context
        self._policy, self._ship, self._boot, self._kmsg = policy, ship, boot, kmsg
        self._push = push
        self._monotonic = monotonic
        self._positions = ShipPositions(context.database)
        self._booted_at = boot.booted_at or context.now()
        self._following: FileFollowing[ShippedFile] = FileFollowing(
            self._positions,
            self._followed,
            self.counters,
            max_files=policy.max_files,
            max_job_files=policy.max_job_files,
            now=context.now,
            monotonic=monotonic,
            sizes=SIZES,
            files=files,
        )
        self._kernel: ShippedKernel | None = None
        self._kernel_due = 0.0
        self._kernel_kept = self._positions.stored().get(KEY, {})
        self._batch: deque[tuple[ShippedLines, StoreEntry]] = deque()  # oldest first, until accepted or rejected
        self._most_bytes = MOST_BYTES  # of the next push: less after a refusal or rate limit, doubled after a success
        self._pause = _FIRST_PAUSE
        self._retry_at = self._store_at = 0.0  # monotonic: earliest push after a failure; write of positions
        self._has_more = False  # True if logs had more lines than the batch takes
        self._refusals = 0  # since the last accepted push
        self._jobs: dict[str, float] = {}  # by job, the monotonic time of its last line
        self._log_limit = LogLimit()
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="log-ship", daemon=True)

    @property
    def known_keys(self) -> Collection[tuple[int, int]]:
        return self._following.known_keys

    def take_scan(self, scan: Scan) -> None:
        files = [file for file in scan.files if file.origin is None or self._wants(file.origin.source)]
        self._following.take_scan(replace(scan, files=tuple(files)))

    def start(self) -> None:
        self._thread.start()

    def stop(self, timeout: float) -> None:
        self._stopping.set()
        self._thread.join(timeout)

    def round(self) -> float:
        """Poll all files and push; return the seconds until the next round."""
        began = self._monotonic()
        self._following.read()
        self._poll_kernel(began)
        if not self._batch:
            self._batch = self._next_batch(began)
        is_due = bool(self._batch) and began >= self._retry_at
        wait = self._push_piece() if is_due else BATCH_SECONDS
        if began >= self._store_at or self._positions.has_new_file:
            self.store_positions()
            self._store_at = began + _STORE_SECONDS
        took = self._monotonic() - began
        return max(wait, took)  # at most half of a core's time

    def store_positions(self) -> None:
        files = self._following.followed
        self.counters.behind = sum(file.behind for file in files)
        self._positions.store([*files, *filter(None, [self._kernel])], self._context.now())

    # --- thread ---

    def _run(self) -> None:
        with contextlib.closing(self._push):
            while not self._stopping.is_set():
                try:
                    wait = self.round()
                except Exception:  # thread boundary: one log's error must not stop the others
                    log.exception("shipping logs continues after an unexpected error")
                    self._context.counters.loop_errors.add("log-ship")
                    wait = _PAUSE_AFTER_ERROR
                self._stopping.wait(wait)
            self.store_positions()

    # --- filling batches ---

    def _wants(self, source: str) -> bool:
        return not self._ship.sources or source in self._ship.sources

    def _followed(self, file: GrowingFile, known: KnownFile, monotonic: float) -> ShippedFile:
        return ShippedFile(file, known, self._positions, self._booted_at, self._ship.oldest, self.counters)

    def _poll_kernel(self, now: float) -> None:
        if self._kernel is not None:
            self._kernel.poll(self._context.now())
            return
        if self._policy.kernel is None or not self._wants("kernel") or now < self._kernel_due:
            return
        self._kernel_due = now + _KERNEL_RETRY_SECONDS
        way = kernel_log.choose_reading(self._policy.kernel, self._kmsg)
        if way is KernelReading.FILE:  # the scans contain it
            return
        kept = self._kernel_kept
        is_same = kept.get("place", {}).get("boot") == self._boot.boot
        origin = Origin("kernel", self._boot.node, generation=self._boot.boot)
        try:
            reader = kernel_log.open_reader(way, kept.get("place", {}), self._boot.boot, self._kmsg)
        except OSError as error:
            log.warning("cannot ship the kernel's log", extra={"reason": str(error)})
            return
        stream = kept.get("stream", {}) if is_same else {}
        self._kernel = ShippedKernel(reader, origin, self._booted_at, self._ship.oldest, stream, self.counters)
        self._kernel.poll(self._context.now())

    def _next_batch(self, now: float) -> deque[tuple[ShippedLines, StoreEntry]]:
        files = self._following.followed
        # The launcher's log repeats lines of ranks that have their own files, in torchrun's folder ``ranks-<node>``.
        own = {(file.origin.job, file.origin.attempt) for file in files if "/ranks-" in file.origin.stream}
        for file in files:
            origin = file.origin
            file.maker.skips_ranks = origin.source == "launcher" and (origin.job, origin.attempt) in own
        sources: list[ShippedLines] = [*files, *filter(None, [self._kernel])]
        heads = [(head.at, number) for number, source in enumerate(sources) if (head := _head(source)) is not None]
        heapq.heapify(heads)
        batch: deque[tuple[ShippedLines, StoreEntry]] = deque()
        seen: set[tuple[int, Labels, str]] = set()
        size = 0
        while heads and size < MOST_BYTES:
            number = heads[0][1]
            source = sources[number]
            entry = _head(source)
            assert entry is not None
            source.pop_head()
            batch.append((source, self._admitted(_made_unique(entry, seen), now)))
            size += entry.size
            following = _head(source)
            if following is None:
                heapq.heappop(heads)
            else:
                heapq.heapreplace(heads, (following.at, number))
        self._has_more = bool(heads)
        return batch

    def _admitted(self, entry: StoreEntry, now: float) -> StoreEntry:
        job = dict(entry.labels).get("job")
        if job is None or entry.lost is not None:
            return entry
        if job not in self._jobs and len(self._jobs) >= MOST_JOBS:
            self._jobs = {name: at for name, at in self._jobs.items() if now - at < _JOB_SECONDS}
            if len(self._jobs) >= MOST_JOBS:
                return replace(entry, lost=LostReason.TOO_MANY_JOBS)
        self._jobs[job] = now
        return entry

    # --- pushing ---

    def _push_piece(self) -> float:
        """Return the seconds until the next push."""
        piece = self._piece()
        entries = [entry for _, entry in piece if entry.lost is None]
        if entries:
            answer = self._push.push(entries)
            if not self._handle_answer(answer, entries):
                return 0.0 if answer.outcome is Outcome.REFUSED else BATCH_SECONDS
            self._count_lines(entries, answer)
        lost = Counter(entry.lost for _, entry in piece if entry.lost is not None)
        for reason, count in lost.items():
            self.counters.lost_lines.add(reason, count)
        for source, _ in piece:
            self._batch.popleft()
            source.confirm_oldest()
        return 0.0 if self._batch or self._has_more else BATCH_SECONDS

    def _handle_answer(self, answer: Answer, entries: Sequence[StoreEntry]) -> bool:
        """Return True if the entries are done: accepted or permanently refused. Otherwise prepare the next attempt."""
        if answer.outcome is Outcome.TAKEN:
            self._recovered()
            return True
        if answer.outcome is Outcome.REFUSED:
            self._refusals += 1
            if self._refusals > _MOST_REFUSALS:  # no single line is the cause
                self._failed(answer)
            if len(entries) == 1:
                return True
            self._most_bytes = max(sum(entry.size for entry in entries) // 2, 1)
            return False
        if answer.outcome is Outcome.SMALLER:
            self._most_bytes = max(self._most_bytes // 2, _LEAST_BYTES)
        self._failed(answer)
        return False

    def _piece(self) -> list[tuple[ShippedLines, StoreEntry]]:
        piece: list[tuple[ShippedLines, StoreEntry]] = []
        size = 0
        for each in self._batch:
            size += each[1].size if each[1].lost is None else 0
            if piece and size > self._most_bytes:
                break
            piece.append(each)
        return piece

    def _count_lines(self, entries: Sequence[StoreEntry], answer: Answer) -> None:
        lost = answer.lost
        if answer.outcome is Outcome.REFUSED:
            lost = {LostReason.TOO_LARGE if answer.reason == "too_large" else LostReason.REFUSED: len(entries)}
        for reason, count in lost.items():
            self.counters.lost_lines.add(reason, count)
        if lost and self._log_limit.lets_through():
            log.warning("log store rejected lines", extra={"answer": answer.text})
        # The answer names no lines: assume the oldest.
        for source, count in Counter(entry.source for entry in entries[sum(lost.values()) :]).items():
            self.counters.lines.add(source, count)

    def _recovered(self) -> None:
        self._most_bytes, self._pause, self._refusals = min(self._most_bytes * 2, MOST_BYTES), _FIRST_PAUSE, 0
        if self.counters.problem:
            log.info("log store accepts lines again")
            self.counters.problem = ""

    def _failed(self, answer: Answer) -> None:
        self.counters.failures.add(answer.reason)
        problem = f"{answer.reason}: {answer.text}"
        # Log each new reason, also soon after another, but not each answer.
        if _NUMBER.sub("", problem) != _NUMBER.sub("", self.counters.problem):
            log.warning("log store accepts no lines; retrying", extra={"answer": answer.text})
        self.counters.problem = problem
        pause = answer.retry_after or self._pause * random.uniform(0.75, 1.25)  # noqa: S311
        self._retry_at = self._monotonic() + pause
        self._pause = min(self._pause * 2, _LONGEST_PAUSE)


def _made_unique(entry: StoreEntry, seen: set[tuple[int, Labels, str]]) -> StoreEntry:
    while (same := (entry.at, entry.labels, entry.text)) in seen:
        entry = replace(entry, at=entry.at + 1)  # the store would merge them
    seen.add(same)
    return entry


def _head(source: ShippedLines) -> StoreEntry | None:
    try:
        head = source.head()
    except OSError as error:
        if not source.is_failing:  # each look fails alike
            name = source.origin.stream or source.origin.source
            log.warning("cannot continue shipping a log", extra={"path": name, "reason": str(error)})
        source.is_failing = True
        return None
    source.is_failing = False
    return head
