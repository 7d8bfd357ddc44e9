"""Replay: the decisions that playbooks would have made on recorded alerts, compared with those that were made.

The server's own matching, targets and guards decide. Steps do not run, because what they need is not recorded. A
decision that depends on something unrecorded is `NOT_KNOWN`, with the possible ones.

A report is replayed if its time is recorded: an alert's first one, and those on which a run was decided. Others are
possible at any time until the last one.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Iterator, Set
from datetime import datetime, timedelta

from msgspec import Struct, field

from trainmedic_core.target import Target, TargetKind
from trainmedic_server.domain import places
from trainmedic_server.domain.alert import STAND_INS, Alert, AlertStatus
from trainmedic_server.domain.modes import Mode
from trainmedic_server.domain.playbook import Guards, Playbook
from trainmedic_server.domain.run import PASSING, Decision
from trainmedic_server.domain.topology import Topology
from trainmedic_server.engine import matching, run_length
from trainmedic_server.engine.matching import Candidate
from trainmedic_server.engine.replayed_runs import FAR, STARTS, ReplayedRun, ReplayedRuns
from trainmedic_server.engine.run_length import LongestRun
from trainmedic_server.ports.actions import Actions
from trainmedic_server.ports.alert_map import NO_ALERT_MAP, AlertMap
from trainmedic_server.ports.limits import EngineLimits
from trainmedic_server.ports.playbooks import Catalog, CompiledPlaybook
from trainmedic_server.simulation.recorded import Recorded, RecordedAlert, RecordedReaction, RecordedRun
from trainmedic_server.simulation.replay_result import ReplayOutcome, ReplayResult, Unknown
from trainmedic_server.simulation.replay_spool import ReplaySpool, SpooledAlert, SpooledCandidate

_DECISIONS = frozenset(map(str, Decision))
_UNFOUND = frozenset({Decision.TARGET_UNKNOWN, Decision.TARGET_AMBIGUOUS})
_INSTANT = timedelta(microseconds=1)  # shortest time that a run is open
_UNRECORDED = "~"  # sorts after the IDs of runs


class ReplaySettings(Struct, frozen=True):
    limits: EngineLimits
    topology: Topology
    alert_map: AlertMap = NO_ALERT_MAP
    gpus_per_node: int | None = None  # for nodes whose GPUs `topology` lacks; None: not counted
    nodes: int = 0  # nodes that the server knows, for the breaker; 0 if unknown
    breaker_closes_after: timedelta = timedelta(hours=1)
    """How long an opened breaker stays open. A person closes it, which no record shows."""
    since: datetime | None = None  # ignore alerts first received before


class _ReplayedPlaybook(Struct, frozen=True):
    playbook: CompiledPlaybook
    mode: Mode  # stricter of the playbook's and the server's
    longest: LongestRun  # upper bound of a run's length

    @property
    def guards(self) -> Guards:
        return self.playbook.definition.guards


class _Pending(Struct, eq=False):
    """One playbook's decision on one alert, until it is settled."""

    alert: SpooledAlert
    replayed: _ReplayedPlaybook
    target: Target
    reaction: RecordedReaction | None  # the recorded decision; None without one
    same_run: RecordedRun | None  # the recorded run, if this decision would start it: same text, mode, target and alert
    started_at: datetime | None  # when the recorded run was decided on; None if unknown
    may_repeat_until: datetime  # the first report's time if no other report has an unknown time
    possible: set[Decision] = field(default_factory=set)
    """Decisions other than refusals that reports until now may have had."""
    refused: set[Decision] = field(default_factory=set)  # refusals (`PASSING`) that they may have had
    own: ReplayedRun | None = None  # the run that it may have started in the replay
    is_same: bool = False  # the recorded decision was on the same text, mode and target
    has_begun: bool = False  # `_take_recorded` has seen it: if the playbook diverges, it is decided again
    is_settled: bool = False

    @property
    def recorded(self) -> str | None:
        return self.reaction.decision if self.reaction is not None else None

    @property
    def key(self) -> matching.Key:
        return self.replayed.playbook.definition.name, self.target.key


class Replay:
    """Use within a `ReplaySpool`: `take` all items, then `result`."""

    def __init__(self, catalog: Catalog, actions: Actions, settings: ReplaySettings, spool: ReplaySpool) -> None:
        self._catalog, self._settings, self._spool = catalog, settings, spool
        limits = settings.limits
        self._replayed = dict(_replayed_by_name(catalog, actions, limits))
        self._runs = ReplayedRuns(limits, settings.breaker_closes_after, settings.topology.nodes, settings.nodes)
        # Queue by time of the next decision, then by recorded run, then by number.
        self._pending: list[tuple[datetime, str, int, _Pending]] = []
        self._numbers = itertools.count()
        self._diverged: set[str] = set()  # playbooks with a decision other than the recorded one
        self._result = ReplayResult(limits.mode)

    def take(self, item: Recorded) -> None:
        if isinstance(item, RecordedRun):
            self._spool.add_run(item)
        elif self._settings.since is None or item.first_heard >= self._settings.since:
            self._take_alert(item)

    def _take_alert(self, item: RecordedAlert) -> None:
        if item.fingerprint.startswith(STAND_INS):
            self._result.by_hand += 1
            return
        result, settings = self._result, self._settings
        result.take_alert(item)
        alert = Alert(
            item.fingerprint, AlertStatus.FIRING, item.labels, item.annotations, item.starts_at,
            original=item.original_labels,
        )  # fmt: skip
        mapped = settings.alert_map.apply(alert)
        shortlist = self._catalog.shortlist(mapped.alert)
        matched = matching.match_shortlist(shortlist, mapped.alert, settings.topology)
        if mapped.refused:
            matched = matching.refuse(matched, mapped.refused)
        reactions = tuple(each for each in item.reactions if each.playbook and each.decision in _DECISIONS)
        if not matched.candidates and not reactions:
            result.without_playbook += 1
            return
        if item.ended_at_first:
            result.ended_at_first += 1
            return
        names = {candidate.playbook.definition.name for candidate in matched.candidates}
        why = {miss.playbook: miss.reason for miss in matched.misses}
        gone = {each.playbook: why.get(each.playbook, "") for each in reactions if each.playbook not in names}
        spooled = SpooledAlert(
            mapped.alert.name, item.fingerprint, item.starts_at, item.first_heard, item.last_heard, item.count,
            item.resolved_at, tuple(map(_spooled, matched.candidates)), reactions, gone,
        )  # fmt: skip
        self._spool.add_alert(spooled)

    def result(self) -> ReplayResult:
        given = self._given_runs()
        next_given = next(given, None)
        alerts = self._spool.alerts()
        alert = next(alerts, None)
        while alert is not None or self._pending:
            if alert is not None and (not self._pending or alert.first_heard <= self._pending[0][0]):
                self._begin(alert)
                alert = next(alerts, None)
                continue
            now, _, _, pending = heapq.heappop(self._pending)
            while next_given is not None and next_given[0].latest <= now:
                self._runs.add(*next_given)
                next_given = next(given, None)
            if not pending.is_settled:
                if self._is_as_recorded(pending, now):
                    self._take_recorded(pending, now)
                else:
                    self._decide(pending, now)
        for run in self._spool.runs():
            is_in_period = self._result.first is not None and run.timestamp >= self._result.first
            if run.has_started and not run.is_observed and run.started_by is None and is_in_period:
                self._result.of(run.playbook).then_time.add_ended(
                    self._gpus(run.parsed_target, run), run.timestamp, run.ended
                )
        self._result.breaker_opened = self._runs.breaker_opened
        return self._result

    def _given_runs(self) -> Iterator[tuple[ReplayedRun, Guards]]:  # that count as recorded (`ReplayResult.given_runs`)
        for recorded in self._spool.given_runs(self._result.first or FAR):
            replayed, target = self._replayed.get(recorded.playbook), recorded.parsed_target
            if replayed is None or target is None or not recorded.has_started:
                continue
            self._result.given_runs += 1
            ends_from, ends_by = recorded.ended or (FAR, FAR)
            run = ReplayedRun(
                (recorded.playbook, target.key), places.counted_nodes(target), recorded.timestamp, recorded.timestamp,
                ends_from, ends_by, is_observed=recorded.is_observed, is_end_recorded=True,
            )  # fmt: skip
            yield run, replayed.guards

    def _begin(self, alert: SpooledAlert) -> None:
        reactions = {each.playbook: each for each in alert.reactions}
        for name, why in alert.misses.items():
            is_loaded = name in self._replayed
            now = ReplayOutcome(frozenset({"not_matched"}), why if is_loaded else "no such playbook is replayed")
            self._compare(name, alert, reactions[name], None, now, alert.first_heard)
        for candidate in alert.candidates:
            self._begin_candidate(alert, candidate, reactions.get(candidate.playbook))

    def _begin_candidate(
        self, alert: SpooledAlert, candidate: SpooledCandidate, reaction: RecordedReaction | None
    ) -> None:
        replayed = self._replayed[candidate.playbook]
        run = self._spool.run(reaction.run_id) if reaction is not None and reaction.run_id else None
        is_same_text = run is not None and run.version == replayed.playbook.version
        if why := _not_judged(replayed.playbook.definition):
            unknown = ReplayOutcome(frozenset(), why, Unknown.PLAYBOOK)
            self._record_possible_run(alert, replayed, candidate, reaction, unknown)
            return
        if candidate.decision == Decision.NOT_ACCEPTED:
            self._compare_refused(alert, candidate, reaction, candidate.decision)
            return
        target = self._target(candidate, run, is_same_text)
        if target is None:
            if reaction is not None and is_same_text and reaction.decision in _UNFOUND:
                self._compare_refused(alert, candidate, reaction, reaction.decision)
            else:
                unknown = ReplayOutcome(frozenset(), candidate.why, Unknown.TARGET)
                self._record_possible_run(alert, replayed, candidate, reaction, unknown)
            return
        decided = _decision_time(alert, reaction, run)
        is_same = is_same_text and run is not None and run.mode == replayed.mode and run.target == target.key
        is_its_run = is_same and decided is not None and reaction is not None and reaction.decision in STARTS
        same_run = run if is_its_run else None
        until = _may_repeat_until(alert, decided)
        pending = _Pending(alert, replayed, target, reaction, same_run, decided, until, is_same=is_same)
        self._push(alert.first_heard, pending)

    def _compare_refused(
        self, alert: SpooledAlert, candidate: SpooledCandidate, reaction: RecordedReaction | None, decision: str
    ) -> None:
        outcome = ReplayOutcome(frozenset({decision}), candidate.why)
        self._compare(candidate.playbook, alert, reaction, None, outcome, alert.first_heard)

    def _compare(
        self,
        name: str,
        alert: SpooledAlert,
        reaction: RecordedReaction | None,
        target: Target | None,
        outcome: ReplayOutcome,
        now: datetime,
        *,
        is_same: bool = True,
    ) -> None:
        """Record a decision. From the first one that is not the recorded one, the playbook's state is its own."""
        self._result.compare(name, alert, reaction, target, outcome)
        if name in self._diverged or (is_same and reaction is not None and outcome.decisions == {reaction.decision}):
            return
        self._diverged.add(name)
        for _, _, _, pending in list(self._pending):
            if pending.has_begun and not pending.is_settled and pending.key[0] == name:
                self._push(now, pending)

    def _target(self, candidate: SpooledCandidate, run: RecordedRun | None, is_same_text: bool) -> Target | None:
        """Prefer the recorded target of the same text, then that of the labels, then the recorded one of its kind."""
        recorded = run.parsed_target if run is not None else None
        if run is not None and is_same_text:
            return recorded
        if candidate.target is not None:
            return candidate.target
        wanted = self._replayed[candidate.playbook].playbook.definition.target
        is_of_kind = recorded is not None and isinstance(wanted, TargetKind) and recorded.kind is wanted
        return recorded if is_of_kind else None

    def _record_possible_run(
        self,
        alert: SpooledAlert,
        replayed: _ReplayedPlaybook,
        candidate: SpooledCandidate,
        reaction: RecordedReaction | None,
        unknown: ReplayOutcome,
    ) -> None:
        """Without a target, a run may have started at any report."""
        end = max(alert.last_heard, alert.first_heard)
        key = candidate.playbook, ""
        run = _new_run(replayed, key, frozenset(), alert, alert.first_heard, end)
        run.is_certain = False
        self._runs.add(run, replayed.guards)
        self._compare(candidate.playbook, alert, reaction, None, unknown, alert.first_heard)

    def _push(self, at: datetime, pending: _Pending) -> None:
        order, reaction = _UNRECORDED, pending.reaction
        if reaction is not None and reaction.run_id is not None:
            order = f"{reaction.run_id} {reaction.decision == Decision.JOINED:d}"  # a run starts before others join it
        heapq.heappush(self._pending, (at, order, next(self._numbers), pending))

    def _is_as_recorded(self, pending: _Pending, now: datetime) -> bool:
        """Return whether the recorded decision applies.

        All decisions of the playbook until now must be as recorded, so that its guards see the same. The breaker also
        sees the runs of other playbooks.
        """
        if not pending.is_same or pending.key[0] in self._diverged or self._runs.may_have_open_breaker(now):
            return False
        trips_breaker = pending.recorded == Decision.STARTED and bool(self._diverged)
        return not (trips_breaker and self._runs.open_breaker_if_due(pending.target, now))

    def _take_recorded(self, pending: _Pending, now: datetime) -> None:
        """Settle a recorded refusal only when no other report can follow."""
        assert pending.recorded is not None
        decision, pending.has_begun = Decision(pending.recorded), True
        if pending.started_at is not None and now < pending.started_at:
            self._push(pending.started_at, pending)
        elif decision in PASSING and now < pending.may_repeat_until:
            pending.refused = {decision}
            self._push(pending.may_repeat_until, pending)
        else:
            self._settle(pending, now, {decision})

    def _decide(self, pending: _Pending, now: datetime) -> None:
        replayed, alert = pending.replayed, pending.alert
        decisions = self._runs.decide(
            pending.key, replayed.guards, replayed.mode, pending.target, alert.starts_at, now, pending.own,
            pending.recorded,
        )  # fmt: skip
        started_at = pending.started_at
        is_report = now in (alert.first_heard, started_at)  # otherwise a report is only possible now
        waits = started_at is not None and now < started_at
        refusals, others = decisions & PASSING, decisions - PASSING
        # The recorded run itself began at its own report, not before.
        if is_report and not refusals and not (waits and pending.same_run is not None):
            self._settle(pending, now, pending.possible | others)
            return
        pending.possible |= others
        pending.refused = set(refusals) if is_report else pending.refused | refusals
        if others & STARTS and pending.own is None:
            latest = started_at if waits and started_at is not None else pending.may_repeat_until
            pending.own = self._start(pending, now, max(latest, now), is_certain=False)
        following = self._next_decision_time(pending, now, waits=waits)
        if following is None:
            self._settle(pending, now, pending.possible | pending.refused | self._possible_later(pending, now))
        else:
            self._push(following, pending)

    def _possible_later(self, pending: _Pending, now: datetime) -> Set[Decision]:
        """Return decisions that reports after `now`, at unrecorded times, may have had."""
        later: set[Decision] = set()
        if not pending.refused - {Decision.PAUSED}:  # a recorded pause is trusted (`ReplayedRuns.decide`)
            return later
        if pending.alert.starts_at + self._settings.limits.max_age < pending.may_repeat_until:
            later.add(Decision.STALE)
        if pending.own is not None and now < pending.may_repeat_until:
            spec = pending.replayed.guards
            later.add(Decision.JOINED)
            later |= {Decision.COOLDOWN} if spec.cooldown else set()
            later |= {Decision.RATE_LIMITED} if spec.max_runs else set()
            later |= {Decision.CONCURRENCY_LIMITED} if spec.max_concurrent else set()
        return later

    def _next_decision_time(self, pending: _Pending, now: datetime, *, waits: bool) -> datetime | None:
        """Return when a guard may decide differently, or the recorded report comes; None if neither follows."""
        until = pending.may_repeat_until
        change = None
        if pending.own is None and now < until and pending.recorded != Decision.PAUSED:
            change = self._runs.next_change(pending.key, pending.replayed.guards, now)
        if waits:
            report = pending.started_at
            return report if change is None or report is None or report <= change else change
        return change if change is not None and change <= until else None

    def _settle(self, pending: _Pending, now: datetime, possible: Set[Decision]) -> None:
        name = pending.replayed.playbook.definition.name
        is_known = len(possible) == 1
        if possible & STARTS:
            if pending.own is None:
                pending.own = self._start(pending, now, now, is_certain=is_known)
            elif is_known:
                self._runs.make_certain(pending.own, pending.replayed.guards)
            self._result.of(name).now_time.add(self._gpus(pending.target, pending.same_run), pending.own)
        longest = pending.replayed.longest
        if Decision.JOINED in possible and longest.after_end:
            ends_by = longest.ends_by(now, pending.alert.resolved_at) or FAR
            self._runs.extend(pending.key, now, ends_by)
        unknown = None if is_known else self._unknown(pending, possible)
        outcome = ReplayOutcome(frozenset(map(str, possible)), "", unknown)
        pending.is_settled = True
        self._compare(name, pending.alert, pending.reaction, pending.target, outcome, now, is_same=pending.is_same)

    def _unknown(self, pending: _Pending, possible: Set[Decision]) -> Unknown:
        if Decision.BREAKER_OPEN in possible:
            return Unknown.BREAKER
        if possible & PASSING and possible - PASSING and pending.alert.first_heard < pending.may_repeat_until:
            return Unknown.REPORTS
        return Unknown.EARLIER_RUN

    def _start(self, pending: _Pending, earliest: datetime, latest: datetime, *, is_certain: bool) -> ReplayedRun:
        nodes = places.counted_nodes(pending.target)
        run = _new_run(pending.replayed, pending.key, nodes, pending.alert, earliest, latest, pending.same_run)
        run.is_certain = is_certain
        self._runs.add(run, pending.replayed.guards)
        return run

    def _gpus(self, target: Target | None, run: RecordedRun | None) -> int | None:
        if target is None:
            return None
        known, per_node = places.gpus_of(target, self._settings.topology), self._settings.gpus_per_node
        if known is not None or per_node is None:
            return known
        match target.kind:
            case TargetKind.NODE:
                return per_node
            case TargetKind.JOB:
                return per_node * len(run.touched) if run is not None and run.touched else None
            case TargetKind.GPU | TargetKind.CLUSTER | TargetKind.GROUP:
                return None


def _new_run(
    replayed: _ReplayedPlaybook,
    key: matching.Key,
    nodes: frozenset[str],
    alert: SpooledAlert,
    earliest: datetime,
    latest: datetime,
    same_run: RecordedRun | None = None,
) -> ReplayedRun:
    if replayed.mode is Mode.OBSERVE:
        return ReplayedRun(key, nodes, earliest, latest, earliest, latest, is_observed=True)
    if same_run is not None:
        ends_from, ends_by = same_run.ended or (FAR, FAR)
        return ReplayedRun(
            key, nodes, earliest, latest, max(ends_from, earliest), max(ends_by, latest),
            is_counted=same_run.has_started, is_end_recorded=True,
        )  # fmt: skip
    ends_by = replayed.longest.ends_by(latest, alert.resolved_at) or FAR
    return ReplayedRun(key, nodes, earliest, latest, earliest + _INSTANT, max(ends_by, latest + _INSTANT))


def _replayed_by_name(
    catalog: Catalog, actions: Actions, limits: EngineLimits
) -> Iterator[tuple[str, _ReplayedPlaybook]]:
    for playbook in catalog.all():
        mode = Mode.stricter(playbook.definition.mode, limits.mode)
        yield (
            playbook.definition.name,
            _ReplayedPlaybook(playbook, mode, run_length.longest(playbook, mode, actions, limits.max_age)),
        )


def _spooled(candidate: Candidate) -> SpooledCandidate:
    name, target = candidate.playbook.definition.name, candidate.target
    if isinstance(target, Target):
        return SpooledCandidate(name, target)
    return SpooledCandidate(name, None, target.reason, target.why)


def _not_judged(playbook: Playbook) -> str:  # why; empty if it is judged
    guards = playbook.guards
    uses = {
        "a group": playbook.group is not None,
        "only_during": bool(playbook.windows),
        "guards.queue": guards.queue is not None,
        "guards.max_runs.per_target": guards.max_runs is not None and guards.max_runs.per_target,
    }
    used = [name for name, is_used in uses.items() if is_used]
    return f"a replay does not judge {', '.join(used)}" if used else ""


def _decision_time(alert: SpooledAlert, reaction: RecordedReaction | None, run: RecordedRun | None) -> datetime | None:
    # The time of the alert's own run. The time at which an alert joins a run is not recorded.
    if run is None or reaction is None or reaction.decision == Decision.JOINED:
        return None
    return run.timestamp if run.timestamp >= alert.first_heard else None


def _may_repeat_until(alert: SpooledAlert, decided: datetime | None) -> datetime:
    """Return until when the alert may have been reported at unrecorded times."""
    known = 1 + (decided is not None and decided > alert.first_heard)  # reports whose time is recorded
    is_end_reported = alert.resolved_at is not None and alert.resolved_at == alert.last_heard
    return alert.last_heard if alert.count > known + is_end_reported else alert.first_heard
