"""Runs that a replay of recorded alerts starts.

The record does not show how long a run would have taken. So a run has an earliest and a latest start and end, and the
guards decide on each combination.
"""

from __future__ import annotations

import heapq
import itertools
from collections import Counter
from collections.abc import Iterable, Iterator
from datetime import UTC, datetime, timedelta

from msgspec import Struct

from trainmedic_core.target import Target
from trainmedic_server.domain import places
from trainmedic_server.domain.modes import Mode
from trainmedic_server.domain.playbook import Guards
from trainmedic_server.domain.run import Controls, Decision
from trainmedic_server.engine import guards
from trainmedic_server.engine.matching import Key
from trainmedic_server.ports.limits import EngineLimits
from trainmedic_server.ports.store import GuardFacts

# End of a run without a recorded end. Nothing is added to it, so that no time overflows.
FAR = datetime.max.replace(tzinfo=UTC) - timedelta(days=3650)
STARTS = frozenset({Decision.STARTED, Decision.OBSERVE_ONLY})  # decisions with a run


class ReplayedRun(Struct, eq=False):
    """A run of the replay. It began between `earliest` and `latest`, if it exists (`is_certain`), and ended between
    `ends_from` and `ends_by`.
    """

    key: Key
    nodes: frozenset[str]  # `places.counted_nodes` of the target
    earliest: datetime
    latest: datetime
    ends_from: datetime
    ends_by: datetime
    is_certain: bool = True
    is_counted: bool = True
    """False if it ended before its first act, and counts only while it is open."""
    is_observed: bool = False
    is_end_recorded: bool = False
    is_stored: bool = False  # True if cooldowns, joins and `max_concurrent` take it into account
    is_shared: bool = False  # True if it stands for runs of other alerts too

    def may_be_open(self, now: datetime) -> bool:
        return self.earliest <= now < self.ends_by

    def is_surely_open(self, now: datetime) -> bool:
        return self.is_certain and self.latest <= now < self.ends_from


class _Periods:
    """Count of the periods that have not ended. Times passed to it never go back."""

    def __init__(self) -> None:
        self._until: list[tuple[datetime, int]] = []

    def add(self, number: int, until: datetime) -> None:
        heapq.heappush(self._until, (until, number))

    def count(self, now: datetime) -> int:
        while self._until and self._until[0][0] <= now:
            heapq.heappop(self._until)
        return len(self._until)

    def next_end(self) -> Iterator[datetime]:
        return (until for until, _ in self._until[:1])


class _OpenRuns:
    """Count of the runs that may be open. Their ends may move to later times."""

    def __init__(self) -> None:
        self._runs: list[tuple[datetime, int, ReplayedRun]] = []

    def add(self, number: int, run: ReplayedRun) -> None:
        heapq.heappush(self._runs, (run.ends_by, number, run))

    def count(self, now: datetime) -> int:
        while self._runs and self._runs[0][0] <= now:
            _, number, run = heapq.heappop(self._runs)
            if run.ends_by > now:
                self.add(number, run)
        return len(self._runs)


class _PlaybookCounts:
    def __init__(self) -> None:
        # Runs for `max_runs` and `max_concurrent`: the certain ones, and all possible ones.
        self.started_at_least, self.started_at_most = _Periods(), _Periods()
        self.open_at_least, self.open_at_most = _Periods(), _OpenRuns()

    def forget_until(self, now: datetime) -> None:
        for runs in (self.started_at_least, self.started_at_most, self.open_at_least, self.open_at_most):
            runs.count(now)


class ReplayedRuns:
    """State of the guards during a replay. Times passed to it never go back.

    `breaker_closes_after` is how long an opened breaker stays open. `count_nodes` is the number of nodes that the
    server knows; 0 if unknown.
    """

    def __init__(
        self,
        limits: EngineLimits,
        breaker_closes_after: timedelta,
        known_nodes: Iterable[str] = (),
        count_nodes: int = 0,
    ) -> None:
        self._limits, self._count_nodes = limits, count_nodes
        self._breaker_closes_after = breaker_closes_after
        self._known_nodes = set(known_nodes)
        self._by_key: dict[Key, list[ReplayedRun]] = {}
        self._by_playbook: dict[str, _PlaybookCounts] = {}
        # Heaps by time: of stored runs with their cooldown, and of possible acts on nodes, which the breaker counts.
        self._forget: list[tuple[datetime, int, ReplayedRun, timedelta]] = []
        self._acted: list[tuple[datetime, int, str]] = []
        self._acts_on = Counter[str]()  # possible acts in `_acted`, by node
        self._acted_unknown: set[str] = set()  # their nodes that may be unknown to the server
        self._surely_acted: dict[str, datetime] = {}  # the time up to which the breaker counts the node
        self._numbers = itertools.count()  # to order equal times in heaps
        self.breaker_opened: list[tuple[datetime, str]] = []  # with the reason

    def add(self, run: ReplayedRun, spec: Guards) -> None:  # `spec`: its playbook's guards
        number, of_playbook = next(self._numbers), self._by_playbook.setdefault(run.key[0], _PlaybookCounts())
        self._forget_until(run.earliest)  # a run that is taken as recorded needs no `decide`
        of_playbook.forget_until(run.earliest)
        if spec.max_runs:
            until = _later(run.latest, spec.max_runs.per)
            of_playbook.started_at_most.add(number, until if run.is_counted else min(until, run.ends_by))
        if not run.is_observed:
            self._acts_on.update(run.nodes)
            self._acted_unknown |= run.nodes - self._known_nodes
            for node in run.nodes:
                heapq.heappush(self._acted, (_later(run.latest, self._limits.breaker_window), number, node))
        if run.is_certain:
            self._store(run, spec)
            self._count_surely(run, spec)
        elif not self._widen_uncertain(run):
            self._store(run, spec)

    def _widen_uncertain(self, run: ReplayedRun) -> bool:
        """Return False if no open uncertain run can stand for this one too."""
        for other in self._by_key.get(run.key, ()):
            if not other.is_certain and other.is_counted and other.may_be_open(run.earliest):
                other.ends_by = max(other.ends_by, run.ends_by)
                other.is_shared = True
                return True
        return False

    def _store(self, run: ReplayedRun, spec: Guards) -> None:
        run.is_stored = True
        number, cooldown = next(self._numbers), spec.cooldown or timedelta()
        self._by_key.setdefault(run.key, []).append(run)
        heapq.heappush(self._forget, (_later(run.ends_by, cooldown), number, run, cooldown))
        if not run.is_observed:
            self._by_playbook[run.key[0]].open_at_most.add(number, run)

    def make_certain(self, run: ReplayedRun, spec: Guards) -> None:
        run.is_certain = True
        if not run.is_stored:
            self._store(run, spec)
        self._count_surely(run, spec)

    def _count_surely(self, run: ReplayedRun, spec: Guards) -> None:
        number, of_playbook = next(self._numbers), self._by_playbook[run.key[0]]
        if spec.max_runs:
            until = _later(run.earliest, spec.max_runs.per)
            of_playbook.started_at_least.add(number, until if run.is_counted else min(until, run.ends_from))
        if not run.is_observed:
            of_playbook.open_at_least.add(number, run.ends_from)
        self._known_nodes |= run.nodes
        self._acted_unknown -= run.nodes
        for node in run.nodes if not run.is_observed else ():
            until = _later(run.earliest, self._limits.breaker_window)
            self._surely_acted[node] = max(self._surely_acted.get(node, until), until)

    def extend(self, key: Key, now: datetime, ends_by: datetime) -> None:
        """Let the runs that may be open, without a recorded end, last up to `ends_by`."""
        for run in self._by_key.get(key, ()):
            if run.may_be_open(now) and not run.is_end_recorded:
                run.ends_by = max(run.ends_by, ends_by)

    def decide(
        self,
        key: Key,
        spec: Guards,
        mode: Mode,
        target: Target,
        starts_at: datetime,
        now: datetime,
        own: ReplayedRun | None = None,
        recorded: str | None = None,
    ) -> frozenset[Decision]:
        """Return all decisions that are possible at a report of an alert.

        `own` is a run that an earlier report of the same alert may have started, which does not count. A recorded
        decision by a pause or the breaker is trusted.
        """
        self._forget_until(now)
        runs = [run for run in self._by_key.get(key, ()) if run is not own or run.is_shared]
        if any(run.is_surely_open(now) for run in runs):
            return frozenset({Decision.JOINED})
        found = {Decision.JOINED} if any(run.may_be_open(now) for run in runs) else set[Decision]()
        if recorded == Decision.PAUSED:
            return frozenset({*found, Decision.PAUSED})
        switches = [Controls()]
        if mode is not Mode.OBSERVE and self.may_have_open_breaker(now):
            switches.append(Controls(breaker_open=True))
        limits, ago = self._limits, lambda span: now - span
        for facts, controls in itertools.product(self._facts(key, runs, now, own), switches):
            found.add(guards.decide(spec, mode, facts, controls, limits, starts_at, now, ago).decision)
        may_open = Decision.STARTED in found and Decision.BREAKER_OPEN not in found
        if may_open and (recorded == Decision.BREAKER_OPEN or self.open_breaker_if_due(target, now)):
            found.add(Decision.BREAKER_OPEN)
        return frozenset(found)

    def _facts(self, key: Key, runs: list[ReplayedRun], now: datetime, own: ReplayedRun | None) -> Iterator[GuardFacts]:
        # The least and the most of each figure, in all combinations.
        of_playbook = self._by_playbook.get(key[0])
        if of_playbook is None:
            yield GuardFacts()
            return
        counted = [run for run in runs if run.is_counted and run.earliest <= now]
        ended = {  # the earliest end that is certain, and the latest that is possible
            max((run.ends_from for run in counted if run.is_certain), default=None),
            max((min(run.ends_by, now) for run in counted), default=None),
        }
        own_start = own is not None  # counted in `started_at_most`
        own_open = own is not None and own.is_stored and not (own.is_observed or own.is_shared)
        started = {of_playbook.started_at_least.count(now), max(of_playbook.started_at_most.count(now) - own_start, 0)}
        opened = {of_playbook.open_at_least.count(now), max(of_playbook.open_at_most.count(now) - own_open, 0)}
        for last_ended_at, count, open_runs in itertools.product(ended, started, opened):
            yield GuardFacts(last_ended_at, count, open_runs)

    def may_have_open_breaker(self, now: datetime) -> bool:
        return bool(self.breaker_opened) and now < self.breaker_opened[-1][0] + self._breaker_closes_after

    def open_breaker_if_due(self, target: Target, now: datetime) -> bool:
        """Return whether a start may open the closed breaker. If so, it counts as opened."""
        counted = places.counted_nodes(target)
        new = {node for node in counted if self._surely_acted.get(node, now) <= now}  # not counted by the breaker yet
        others = len(self._acts_on) - sum(node in self._acts_on for node in new)
        named = new - self._known_nodes - self._acted_unknown
        total = max(len(self._known_nodes) + len(self._acted_unknown) + len(named), self._count_nodes)
        reason = guards.why_breaker_opens_by_count(len(new), others, total, self._limits)
        if reason is None:
            return False
        self.breaker_opened.append((now, reason))
        return True

    def next_change(self, key: Key, spec: Guards, now: datetime) -> datetime | None:
        """Return the next time at which a refusal may lapse without another alert; None if never."""
        of_playbook = self._by_playbook.get(key[0])
        times: list[datetime] = []
        for run in self._by_key.get(key, ()):
            times += (_later(end, spec.cooldown) for end in (run.ends_from, run.ends_by))
        if of_playbook is not None:
            for span in (of_playbook.started_at_least, of_playbook.started_at_most, of_playbook.open_at_least):
                times += span.next_end()
        if self.may_have_open_breaker(now):
            times.append(self.breaker_opened[-1][0] + self._breaker_closes_after)
        return min((time for time in times if now < time < FAR), default=None)

    def _forget_until(self, now: datetime) -> None:
        while self._forget and self._forget[0][0] <= now:
            _, number, run, cooldown = heapq.heappop(self._forget)
            if _later(run.ends_by, cooldown) > now:
                heapq.heappush(self._forget, (_later(run.ends_by, cooldown), number, run, cooldown))
                continue
            runs = self._by_key[run.key]
            runs.remove(run)
            if not runs:
                del self._by_key[run.key]
        while self._acted and self._acted[0][0] <= now:
            _, _, node = heapq.heappop(self._acted)
            self._acts_on[node] -= 1
            if not self._acts_on[node]:
                del self._acts_on[node]
                self._acted_unknown.discard(node)


def _later(moment: datetime, span: timedelta | None) -> datetime:
    return min(moment, FAR) + span if span and moment < FAR else moment
