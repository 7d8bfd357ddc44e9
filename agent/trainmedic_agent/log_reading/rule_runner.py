"""Execution of rules on all streams, and storage of findings together with read positions.

A stream's lines come from one thread, in order. Lines read again give the same findings with the same IDs.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from typing import Any, Protocol

from trainmedic.errors import TrainmedicError
from trainmedic_agent.errors import JournalUnavailable
from trainmedic_agent.log_reading.budgets import BudgetOwner
from trainmedic_agent.log_reading.job_budgets import FindingsOfJobs
from trainmedic_agent.log_reading.log_counters import LogCounters
from trainmedic_agent.log_reading.log_store import LogStore, OutgoingFinding
from trainmedic_agent.log_reading.streams import LineStream, PendingExcerpt
from trainmedic_logs.domain.finding import Excerpt, Finding
from trainmedic_logs.lines.line import Line
from trainmedic_logs.lines.prefilter import Prefilter
from trainmedic_logs.lines.rule import RuleSet
from trainmedic_logs.lines.tracker import FindingTracker

log = logging.getLogger(__name__)

EXCERPT_SECONDS = 3.0  # seconds for the lines after a finding
_COMMIT_SECONDS = 5.0  # interval of commits without a finding
_OVERDUE_SECONDS = 0.25  # longest wait of a finding while a round of reading lasts
_TICK_SECONDS = 0.5  # interval of `FindingTracker.tick`
_MOST_UNWRITTEN = 2000  # findings in memory at which reading pauses
_MOST_HELD = 32  # excerpts of findings that are not reported yet


class ReadStream(Protocol):
    @property
    def key(self) -> str: ...

    @property
    def stream(self) -> LineStream: ...

    def place_json(self) -> Mapping[str, Any]:
        """Return the place to resume reading after a restart. Raises OSError."""
        ...

    def excerpt(self, place: int) -> Excerpt | None:
        """Return the lines around `place`. None if they are gone."""
        ...


class RuleRunner:
    """Thread-safe."""

    def __init__(
        self,
        store: LogStore,
        gpu_of: Callable[[str], str | None],
        counters: LogCounters,
        now: Callable[[], datetime],
        of_jobs: FindingsOfJobs,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self._of_jobs = of_jobs
        self._store = store
        self._gpu_of = gpu_of
        self._counters = counters
        self._now = now
        self._monotonic = monotonic
        self._lock = threading.Lock()
        self._tracker: FindingTracker | None = None  # None before the first rules
        self._positions: dict[str, Mapping[str, Any] | None] = {}  # to be stored; None: to be forgotten
        self._outgoing: dict[str, OutgoingFinding] = {}  # to be stored, by finding ID
        self._latest: dict[str, Finding] = {}  # current state of findings whose excerpt is pending, by ID
        self._held: dict[str, Excerpt] = {}  # excerpts of findings reported only once they have lasted, by ID
        self._has_new_stream = False
        self._committed_at = self._ticked_at = monotonic()
        self.is_first = store.is_new  # as when this process began; a commit changes only `store.is_new`
        self.has_findings = threading.Event()  # set when findings were stored

    @property
    def can_take(self) -> bool:
        """False without rules, or with too many unstored findings."""
        return self._tracker is not None and len(self._outgoing) < _MOST_UNWRITTEN

    def use(self, rule_set: RuleSet) -> None:
        """Raises ValueError, TrainmedicError if the rules cannot be compiled or the database is unavailable."""
        with self._lock:
            if self._tracker is None:
                tracker = FindingTracker(rule_set, self._gpu_of)
                tracker.restore(self._store.tracker())
                self._tracker = tracker
            else:
                self._tracker.use(rule_set)
        self._counters.rules = rule_set.version

    def prefilter(self, source: str) -> Prefilter | None:
        with self._lock:
            return self._tracker.matcher.prefilter((source,)) if self._tracker is not None else None

    def take(self, source: ReadStream, lines: Sequence[Line]) -> None:
        """Run the rules on lines in stream order. Findings and position are stored later, together.

        Raises OSError if the position is unavailable; no line was processed then.
        """
        place = source.place_json()
        with self._lock:
            tracker = self._tracker
            if tracker is None:
                return
            for line in lines:
                for finding in tracker.feed(line, source.stream.owner.uid):
                    if not self._of_jobs.admit(source.stream.owner, finding):
                        continue
                    self._queue_update(finding, owner=source.stream.owner)
                    if not finding.is_over:
                        self._counters.findings.add(finding.rule)
                        self._await_excerpt(source.stream, finding, line.place)
                # These are reported only once they have lasted, but their excerpts must be taken now.
                for finding in tracker.begun:
                    if not self._of_jobs.admit(source.stream.owner, finding):
                        continue
                    source.stream.excerpts = [*source.stream.excerpts, self._pending_excerpt(finding, line.place, "")]
            self._positions[source.key] = {"place": place, "stream": source.stream.to_json()}

    def report(self, finding: Finding, excerpt: Excerpt, owner: BudgetOwner) -> None:
        """Report a finding that no rule has made. After a kill, the caller must repeat it."""
        with self._lock:
            self._queue_update(finding, excerpt, owner)

    def begin(self, source: ReadStream) -> None:
        """Have the position stored soon, to find the stream after a rename. Raises OSError."""
        place = source.place_json()
        with self._lock:
            self._positions[source.key] = {"place": place, "stream": source.stream.to_json()}
            self._has_new_stream = True

    def forget(self, key: str) -> None:
        with self._lock:
            self._positions[key] = None

    def stored(self) -> dict[str, Any]:
        """Return the stored ``place`` and ``stream`` by stream key. Raises JournalUnavailable."""
        return self._store.positions()

    def add_excerpts(self, source: ReadStream) -> None:
        """Raises OSError."""
        now = self._monotonic()
        due = [each for each in source.stream.excerpts if each.due <= now]
        if not due:
            return
        place = source.place_json()  # raises, so before they are taken from the stream
        found = [(each, source.excerpt(each.place)) for each in due]
        source.stream.excerpts = [each for each in source.stream.excerpts if each.due > now]
        with self._lock:
            for pending, excerpt in found:
                if excerpt is not None and not pending.update:
                    self._hold_excerpt(pending.finding_id, excerpt)
                    continue
                finding = self._latest.pop(pending.finding_id, None) or self._stored_finding(pending)
                if excerpt is not None and finding is not None:
                    self._queue_update(finding, excerpt)
            self._positions[source.key] = {"place": place, "stream": source.stream.to_json()}

    def store_if_overdue(self) -> None:
        if self._outgoing and self._monotonic() - self._committed_at >= _OVERDUE_SECONDS:
            self.store_due()

    def store_due(self, *, is_last: bool = False) -> None:
        """Store findings and new streams' positions now, other positions at intervals. Failures are retried."""
        now = self._monotonic()
        with self._lock:
            if self._tracker is None:
                return
            if is_last or now - self._ticked_at >= _TICK_SECONDS:
                self._ticked_at = now
                for finding in filter(self._of_jobs.was_admitted, self._tracker.tick(self._now())):
                    self._queue_update(finding, self._held.pop(finding.id, None))
            is_interval_over = is_last or now - self._committed_at >= _COMMIT_SECONDS
            has_due_positions = bool(self._positions) and (self._has_new_stream or is_interval_over)
            # A new store is written even without content: files found later are then known to be new.
            if not self._store.is_new and not self._outgoing and not has_due_positions:
                return
            self._committed_at = now
            try:
                outgoing = list(self._outgoing.values())
                changes = self._tracker.changes()
                self._store.commit(self._positions, changes, outgoing, self._now())
                self._tracker.stored(changes)
            except JournalUnavailable as error:
                if not self._counters.problem:
                    log.error("cannot store findings; retrying", extra={"reason": str(error)})
                self._counters.problem = str(error)
                return
            self._counters.problem = ""
            self._positions, self._outgoing, self._has_new_stream = {}, {}, False
        if outgoing:
            self.has_findings.set()

    def near_misses(self) -> Mapping[str, int]:
        """Return numbers of lines with a rule's literal but no match, by rule."""
        with self._lock:
            return dict(self._tracker.lines_near) if self._tracker is not None else {}

    def _queue_update(self, finding: Finding, excerpt: Excerpt | None = None, owner: BudgetOwner | None = None) -> None:
        earlier = self._outgoing.pop(finding.id, None)
        if excerpt is None and earlier is not None:
            excerpt = earlier.excerpt
        self._outgoing[finding.id] = OutgoingFinding(finding, excerpt, owner or self._of_jobs.owner_of(finding))
        if finding.id in self._latest:
            self._latest[finding.id] = finding

    def _await_excerpt(self, stream: LineStream, finding: Finding, place: int) -> None:
        self._latest[finding.id] = finding
        stream.excerpts = [*stream.excerpts, self._pending_excerpt(finding, place, self._store.text_of(finding))]

    def _pending_excerpt(self, finding: Finding, place: int, update: str) -> PendingExcerpt:
        return PendingExcerpt(finding.id, place, update, self._monotonic() + EXCERPT_SECONDS)

    def _hold_excerpt(self, finding_id: str, excerpt: Excerpt) -> None:
        self._held[finding_id] = excerpt
        if len(self._held) > _MOST_HELD:
            self._held.pop(next(iter(self._held)))

    def _stored_finding(self, pending: PendingExcerpt) -> Finding | None:
        try:
            return self._store.finding_of(pending.update)
        except ValueError:  # another version's format
            return None


class RulesInForce:
    """Active rules: the server's, or the last valid ones on disk. Not thread-safe."""

    def __init__(self, store: LogStore, runner: RuleRunner) -> None:
        self._store = store
        self._runner = runner
        self._active: tuple[datetime, bytes] | None = None  # time and text of the rules, as published
        self._refused = ""  # why the last rules were rejected

    def restore(self) -> None:
        """Raises JournalUnavailable."""
        try:
            kept = self._store.rules()
            problem = self._use(kept[1]) if kept is not None else ""
        except ValueError as error:
            kept, problem = None, str(error)
        if problem:
            log.error("cannot read log rules on disk", extra={"reason": problem})
        else:
            self._active = kept

    def take(self, at: datetime, raw: bytes) -> None:
        """Activate and store verified rules, unless they are older or cannot be compiled."""
        if self._active is not None and (at < self._active[0] or (at, raw) == self._active):
            return
        if self._active is None or raw != self._active[1]:
            problem = self._use(raw)
            if problem:
                self._refuse(problem)
                return
        self._refused = ""
        self._active = (at, raw)
        try:
            self._store.keep_rules(at, raw)
        except JournalUnavailable as error:
            log.warning("cannot store log rules", extra={"reason": str(error)})

    def _use(self, raw: bytes) -> str:
        """Activate rules; return why they cannot be used, or ""."""
        try:
            rule_set = RuleSet.decode(raw)
            self._runner.use(rule_set)
        except (ValueError, TrainmedicError) as error:
            return f"the log rules cannot be used here: {error}"
        log.info("log rules", extra={"version": rule_set.version, "rules": len(rule_set.rules)})
        if rule_set.left_out:
            log.warning("skipping log rules of a newer server", extra={"rules": list(rule_set.left_out)})
        return ""

    def _refuse(self, reason: str) -> None:
        if reason != self._refused:
            self._refused = reason
            log.error("rejecting new log rules; keeping the earlier ones", extra={"reason": reason})
