"""Log reading as a whole.

The kernel's log has its own thread: a hanging file system must not delay messages about it.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Collection
from typing import Protocol

from msgspec.structs import replace

from trainmedic_agent.log_opening.node_files import NodeFiles
from trainmedic_agent.log_reading import kernel_log, pstore
from trainmedic_agent.log_reading.arrivals import ArrivalIndex
from trainmedic_agent.log_reading.discovery import Discovery, Scan, SharedScan
from trainmedic_agent.log_reading.dumps import DumpReading, ReadDumps
from trainmedic_agent.log_reading.files import FileFollowing
from trainmedic_agent.log_reading.finding_sender import FindingPort, FindingSender
from trainmedic_agent.log_reading.followed_file import FollowedFile, followed_by
from trainmedic_agent.log_reading.job_budgets import FindingsOfJobs, LinesOfJobs
from trainmedic_agent.log_reading.kernel_log import KernelStream
from trainmedic_agent.log_reading.log_counters import LogCounters
from trainmedic_agent.log_reading.log_policy import KernelReading, LogsPolicy
from trainmedic_agent.log_reading.log_store import LogStore, NodeBoot
from trainmedic_agent.log_reading.reading_context import ReadingContext
from trainmedic_agent.log_reading.rule_runner import RuleRunner, RulesInForce
from trainmedic_agent.log_reading.scan_units import FileKey
from trainmedic_logs.domain.finding import Origin

log = logging.getLogger(__name__)

POLL_SECONDS = 0.25  # between polls of files
SCAN_SECONDS = 1.0  # pause between scans
BEHIND_SECONDS = 0.1  # the same, if the last scan left small jobs out
TURN_SECONDS = 0.5  # limit of a scan
HUNG_SECONDS = 30.0  # age at which a round counts as hung
_HUNG = "reading log files has not ended for {:g} s: a file system, or the process that opens files, does not respond"
_FILE_LOOPS = ("log-files", "log-scan", "log-large-jobs")
_PAUSE_AFTER_ERROR = 1.0  # seconds
_KERNEL_WAIT = 0.5  # longest wait for kernel lines


class ShipsLines(Protocol):
    """`LogShipping`, loaded only if the policy has ``logs.ship``."""

    @property
    def known_keys(self) -> Collection[FileKey]: ...

    def take_scan(self, scan: Scan) -> None: ...
    def start(self) -> None: ...
    def stop(self, timeout: float) -> None: ...


class LogReader:
    def __init__(
        self,
        context: ReadingContext,
        policy: LogsPolicy,
        boot: NodeBoot,
        gpu_of: Callable[[str], str | None],
        *,
        read_dumps: ReadDumps,
        port: FindingPort,
        files: NodeFiles,
        arrivals: ArrivalIndex,
        shipping: ShipsLines | None = None,
        kmsg: str = kernel_log.KMSG,
        records: tuple[str, ...] = pstore.DIRECTORIES,
    ) -> None:
        """`gpu_of`: UUID by PCI address. `records`: directories of panic records. Raises JournalUnavailable."""
        self.counters = LogCounters()
        self._context = context
        self._policy = policy
        self._boot = boot
        self._records = records
        self._files = files
        self._arrivals = arrivals
        self._shipping = shipping
        self._kmsg = kmsg
        self._stopping = threading.Event()
        self._began: dict[str, float] = {}  # monotonic times at which current rounds began, by loop
        self._store = LogStore(context.database, boot, self.counters)
        cuts = self.counters.cuts
        of_jobs = FindingsOfJobs(policy.max_job_findings, cuts)
        self.runner = RuleRunner(self._store, gpu_of, self.counters, context.now, of_jobs)
        self.rules = RulesInForce(self._store, self.runner)
        self._kept = self._store.positions()  # an earlier process's, by log; an error updates the kernel's
        self.kernel_way = kernel_log.choose_reading(policy.kernel, kmsg) if policy.kernel is not None else None
        kernel_file = policy.kernel.path if policy.kernel and self.kernel_way is KernelReading.FILE else None
        self.scans = SharedScan()
        self._discovery = Discovery(policy, context.node, kernel_file=kernel_file, cuts=cuts, files=files)
        self._following = FileFollowing(
            self.runner,
            followed_by(
                self.runner, self.counters, policy.max_lines, arrivals, LinesOfJobs(policy.max_job_lines, cuts)
            ),
            self.counters,
            max_files=policy.max_files,
            now=context.now,
            max_job_files=policy.max_job_files,
            cuts=cuts,
            files=files,
        )
        self._sender = FindingSender(port, self._store, self.runner.has_findings, context.counters)
        self._dumps = DumpReading(self.runner, read_dumps, context.now, cuts, files=files)
        loops: dict[str, Callable[[], float]] = {"log-files": self._read_files, "log-scan": self._scan}
        loops["log-large-jobs"] = self._discovery.large.look
        if policy.kernel is not None:
            loops["log-kernel"] = self._read_kernel
        if policy.roots:
            loops["log-dumps"] = self._dumps.read
        self._threads = [
            threading.Thread(target=self._loop, args=(name, run), name=name, daemon=True) for name, run in loops.items()
        ]
        self._kernel: KernelStream | None = None
        self._kernel_problem = ""  # why the kernel's log cannot be read, otherwise empty
        self._has_read_records = False  # panic records, once per process

    def start(self) -> None:
        """Raises JournalUnavailable."""
        self.rules.restore()
        for thread in self._threads:
            thread.start()
        self._sender.start()
        if self._shipping is not None:
            self._shipping.start()

    def stop(self, timeout: float) -> None:
        """Stop. Findings that cannot be sent in time are sent after the next start."""
        deadline = time.monotonic() + timeout
        self._stopping.set()
        self.scans.stop()
        if self._shipping is not None:
            self._shipping.stop(timeout / 2)
        for thread in self._threads:
            thread.join(max(deadline - time.monotonic(), 0.0))
        self.runner.store_due(is_last=True)
        self._arrivals.store_due(time.monotonic(), is_last=True)
        self._sender.stop(max(deadline - time.monotonic(), 0.5))

    @property
    def problem(self) -> str:
        """Why this node's logs are not read, otherwise empty."""
        now = time.monotonic()
        is_hung = any(now - self._began.get(name, now) > HUNG_SECONDS for name in _FILE_LOOPS)
        return self.counters.problem or (_HUNG.format(HUNG_SECONDS) if is_hung else "") or self._kernel_problem

    # --- threads ---

    def _loop(self, name: str, run: Callable[[], float]) -> None:
        """Repeat `run`, which returns the seconds to pause."""
        while not self._stopping.is_set():
            self._began[name] = time.monotonic()
            try:
                wait = run()
            except Exception:  # thread boundary: one log's error must not stop the others
                log.exception("reading logs continues after an unexpected error", extra={"loop": name})
                self._context.counters.loop_errors.add(name)
                wait = _PAUSE_AFTER_ERROR
            self._began.pop(name)
            if wait > 0:
                self._stopping.wait(wait)

    def _read_files(self) -> float:
        began, used = time.monotonic(), time.thread_time()
        has_more = self._following.read()
        self.runner.store_due()
        self._arrivals.store_due(began)
        # At most half of a core's time. Time spent waiting for a core or a file system is no reason to wait longer.
        used = time.thread_time() - used
        return used if has_more else max(POLL_SECONDS, used)

    def _scan(self) -> float:
        used = time.thread_time()
        users: list[FileFollowing[FollowedFile] | ShipsLines] = [self._following]
        if self._shipping is not None:
            users.append(self._shipping)
        known = {key for user in users for key in user.known_keys}
        began_at = self._context.now()
        is_asked = self.scans.begin()
        scan = self._discovery.scan(known, self._stopping.is_set, TURN_SECONDS, is_asked=is_asked)
        if scan.errors:
            self._context.counters.loop_errors.add("log-scan", scan.errors)
        if not self._stopping.is_set():
            self.scans.end(scan)
            self._arrivals.record_scan(scan.files, began_at, self._context.now())
            for user in (*users, self._dumps):
                user.take_scan(scan)
        self.scans.pause(max(BEHIND_SECONDS if scan.is_behind else SCAN_SECONDS, time.thread_time() - used))
        return 0.0

    def _read_kernel(self) -> float:
        if not self.runner.can_take:
            if self._kernel is not None:
                self._kernel.mark_behind()
            return _KERNEL_WAIT
        origin = Origin("kernel", self._context.node, generation=self._boot.boot)
        if not self._has_read_records:
            self._has_read_records = True
            kept = self._kept.get(pstore.KEY, {})
            pstore.read_records(self.runner, origin, kept.get("place", {}), self._records, self._files)
            self.runner.store_due()
        if self.kernel_way is KernelReading.FILE or self.kernel_way is None:
            self._stopping.wait()  # `_read_files` follows the file
            return 0.0
        try:
            if self._kernel is None:
                self._kernel = self._open_kernel(self.kernel_way, origin)
            has_more = self._kernel.poll(self.runner, self.counters, self._context.now())
        except OSError as error:
            self._close_kernel(f"the kernel's log cannot be read by {self.kernel_way}: {error.strerror or error}")
            return _PAUSE_AFTER_ERROR
        self._kernel_problem = ""
        self.runner.store_due()
        if not has_more:
            self._kernel.wait(_KERNEL_WAIT)
        return 0.0

    def _close_kernel(self, problem: str) -> None:
        if self._kernel is not None:
            self._kept[self._kernel.key] = {"place": self._kernel.place_json(), "stream": {}}
            self._kernel.reader.close()
            self._kernel = None
        self._context.counters.loop_errors.add("log-kernel")
        if problem != self._kernel_problem:  # it is tried again every second
            log.error("cannot read the kernel's log", extra={"reason": problem})
        self._kernel_problem = problem

    def _open_kernel(self, way: KernelReading, origin: Origin) -> KernelStream:
        kept = self._kept.get("kernel", {})
        place = kept.get("place", {})
        reader = kernel_log.open_reader(way, place, self._boot.boot, self._kmsg)
        is_same = place.get("boot") == self._boot.boot
        origin = replace(origin, stream=self._kmsg if way is KernelReading.KMSG else "journal")
        return KernelStream(reader, origin, self._boot.booted_at, kept.get("stream", {}) if is_same else {})
