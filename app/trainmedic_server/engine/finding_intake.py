"""Intake of findings: new, continued, ended or suspected.

An update contains its whole episode, so repeats change nothing (``trainmedic_logs.domain.known_finding``).
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import datetime, timedelta
from typing import NamedTuple, Self

from msgspec import Struct, field
from msgspec.structs import replace

from trainmedic_core.target import TargetKind
from trainmedic_logs.domain import known_finding
from trainmedic_logs.domain.finding import CLAIMED_JOB, Finding
from trainmedic_logs.domain.finding_codec import FindingUpdate
from trainmedic_logs.domain.known_finding import Episode, EpisodeKey, FindingEnd, KnownExcerpt, KnownFinding
from trainmedic_logs.lines.rule import Confirmation, LogRule, RuleSet
from trainmedic_logs.rules import alert_decisions, finding_ends
from trainmedic_logs.rules.finding_ends import EndFacts
from trainmedic_logs.rules.finding_targets import claimed_job
from trainmedic_server import telemetry
from trainmedic_server.domain.alert import AlertRecord
from trainmedic_server.domain.job_life import JobLife, LifeState
from trainmedic_server.domain.target_resolution import job_named_by, node_named_by
from trainmedic_server.domain.time_gaps import Ago
from trainmedic_server.domain.topology import Topology
from trainmedic_server.engine import finding_claims, job_failure, loops
from trainmedic_server.engine.finding_alerts import labels_of_rule
from trainmedic_server.engine.node_watch import JobProgress, NodeWatch
from trainmedic_server.ports.outside import Clock
from trainmedic_server.ports.store import RunStore, Transaction

CHECK_EVERY = timedelta(seconds=5)
MOST_EXCERPTS = 16  # Excerpts per finding, from the earliest streams
_MOST_KILLS = 256  # the same for kernel kills, of which each excerpt shows one process
_MOST_DIGESTS = 1024  # the same for flight recorder dumps, which every node of a job has
MOST_OPEN_OF_NODE = 500  # Open findings per `_Group`; further ones are dropped
_MOST_FIRING = 10_000  # firing alerts among which a confirming one is searched

log = telemetry.logger(__name__)


class _Group(NamedTuple):
    """Findings of a node under one limit, so that one job's output hides no others."""

    node: str
    is_printed: bool  # False only for lines that no job can write, such as the kernel's
    job: str | None
    """Trusted job that printed them. None for the kernel's lines and for claimed jobs."""

    @classmethod
    def of(cls, known: KnownFinding) -> Self:
        return cls(known.origin.node, known.is_printed, known.origin.job)


class _Work(Struct):
    """Findings of one transaction, and their changes."""

    known: dict[str, KnownFinding]  # by ID
    open_ids: dict[str, str]  # of open findings, by `KnownFinding.key`
    episodes: dict[EpisodeKey, Episode]  # state of a finding in one stream of lines
    changed: set[str] = field(default_factory=set)
    changed_episodes: set[EpisodeKey] = field(default_factory=set)
    excerpts: dict[tuple[str, EpisodeKey], KnownExcerpt] = field(default_factory=dict)
    begun: list[KnownFinding] = field(default_factory=list)
    dropped: int = 0  # updates that would begin too many findings
    cut_claims: Counter[str] = field(default_factory=Counter)  # updates whose claimed job was dropped, by node

    def put(self, known: KnownFinding) -> None:
        self.known[known.id] = known
        self.changed.add(known.id)
        if known.is_open:
            self.open_ids[known.key] = known.id
        elif self.open_ids.get(known.key) == known.id:
            del self.open_ids[known.key]


class FindingIntake:
    """``ago`` returns a past time excluding downtimes. ``on_alerts`` is called when alerts are due."""

    def __init__(
        self,
        store: RunStore,
        rules: Callable[[], RuleSet],
        topology: Callable[[], Topology],
        nodes: NodeWatch,
        clock: Clock,
        ago: Ago,
        metrics: telemetry.Metrics,
        new_id: Callable[[], str],
        on_alerts: Callable[[], None],
    ) -> None:
        self._store = store
        self._rules = rules
        self._topology = topology
        self._nodes = nodes
        self._clock = clock
        self._ago = ago
        self._metrics = metrics
        self._new_id = new_id
        self._on_alerts = on_alerts
        self._open: Counter[_Group] = Counter()  # open findings at the last check, and those begun since
        self._claimed = finding_claims.ClaimedFindings()
        self._numbers: dict[tuple[str, str], int] = {}  # of the last update, by node and the agent's instance
        self._suspected: set[str] = set()  # IDs of findings whose alert waits for confirmation

    async def watch(self) -> None:
        await loops.repeat(self.check, CHECK_EVERY, "findings", self._metrics, sleep=loops.sleeping_by(self._clock))

    async def take(self, updates: Sequence[FindingUpdate]) -> None:
        """Store updates. Durable on return. Raises StoreUnavailable."""
        for update in updates:
            self._nodes.note_boot(update.node, update.booted_at)
        work = await self._store.transact(lambda tx: self._take(tx, updates))
        self._record_metrics(updates, work)

    async def check(self) -> None:
        """End, confirm and count open findings. Raises StoreUnavailable."""
        open_findings, has_alerts = await self._store.transact(self._check)
        self._open = Counter(map(_Group.of, open_findings))
        self._metrics.open_findings.set(len(open_findings))
        if has_alerts:
            self._on_alerts()

    # --- updates --------------------------------------------------------------------------------
    # `_take`, `_check` and their helpers run in the store's writing thread, other methods in the event loop.

    def _take(self, tx: Transaction, updates: Sequence[FindingUpdate]) -> _Work:
        now, rules, topology = self._clock.now(), self._rules().by_name, self._topology()
        cut: Counter[str] = Counter()
        placed = [
            (update, self._with_trusted_target(update, rules.get(update.finding.rule), topology, cut))
            for update in updates
        ]
        work = _read(tx, placed)
        work.cut_claims = cut
        for update, finding in placed:
            self._take_one(work, update, finding, rules.get(finding.rule), now)
        findings = tx.findings
        findings.save([work.known[finding_id] for finding_id in work.changed])
        findings.save_episodes([work.episodes[key] for key in work.changed_episodes], now)
        self._end_without_streams(tx, work, now)
        _save_excerpts(tx, work)
        for known in self._confirm(tx, topology):
            work.put(known)
        return work

    def _with_trusted_target(
        self, update: FindingUpdate, rule: LogRule | None, topology: Topology, cut: Counter[str]
    ) -> Finding:
        """`cut` counts dropped claimed jobs by node."""
        finding = finding_claims.with_trusted_job(update.finding, topology, self._nodes.was_there)
        own = replace(finding, labels=labels_of_rule(finding, rule))
        job = claimed_job(update.finding, finding)
        if not job:
            return own
        claimed = replace(own, labels={**own.labels, CLAIMED_JOB: job})
        if self._claimed.try_add(update.node, known_finding.identity(claimed), self._clock.now()):
            return claimed
        cut[update.node] += 1
        return own

    def _take_one(
        self, work: _Work, update: FindingUpdate, finding: Finding, rule: LogRule | None, now: datetime
    ) -> None:
        key = EpisodeKey(update.node, finding.id)
        before = work.episodes.get(key)
        # The finding of this stream, else the open one with the same key, else a new one.
        known = work.known.get(before.finding_id) if before is not None else None
        if known is None or before is None or finding_ends.begins_again(known, before, finding):
            open_id = work.open_ids.get(known_finding.identity(finding))
            current = work.known[open_id] if open_id is not None else None
            is_later = current is not None and known_finding.is_of_later_attempt(finding, current)
            known = self._begin_finding(work, finding, now) if current is None or is_later else current
            if known is None:
                work.dropped += 1
                return
            if current is not None and is_later:
                known = self._take_over(work, current, known, now)
        merged, episode = known_finding.merge_update(finding_ends.with_proof(known, finding), before, key, finding, now)
        if merged is not known:
            work.put(self._with_alert_decision(merged, rule, update, now) if merged.is_open else merged)
        if episode != before:
            work.episodes[key] = episode
            work.changed_episodes.add(key)
        if update.excerpt is not None:
            origin = finding.origin
            work.excerpts[merged.id, key] = KnownExcerpt(
                merged.id, key, origin.source, origin.stream, origin.rank, finding.first_at, update.excerpt
            )

    def _take_over(self, work: _Work, earlier: KnownFinding, later: KnownFinding, now: datetime) -> KnownFinding:
        """End the finding of an earlier attempt. The new one continues its alert, so none is resolved."""
        work.put(replace(finding_ends.ended(earlier, FindingEnd.ATTEMPT, now), tell_at=None))
        return replace(later, alert=earlier.alert, no_alert_because=earlier.no_alert_because, tell_at=earlier.tell_at)

    def _begin_finding(self, work: _Work, finding: Finding, now: datetime) -> KnownFinding | None:
        """Return None if its group has too many open ones."""
        known = known_finding.new_finding(self._new_id(), finding, now)
        group = _Group.of(known)
        if self._open[group] + sum(_Group.of(each) == group for each in work.begun) >= MOST_OPEN_OF_NODE:
            return None
        work.begun.append(known)
        return known

    def _with_alert_decision(
        self, known: KnownFinding, rule: LogRule | None, update: FindingUpdate, now: datetime
    ) -> KnownFinding:
        if known.alert is not None:
            return known
        reason = alert_decisions.silence_reason(known, rule, update.booted_at, now)
        if reason or rule is None or rule.alert is None:
            return replace(known, no_alert_because=reason, is_suspected=False)
        if rule.alert.confirm is not None:
            waits_for = " or ".join(rule.alert.confirm.by)
            self._suspected.add(known.id)
            return replace(known, no_alert_because=f"{alert_decisions.SUSPECTED}{waits_for}", is_suspected=True)
        return alert_decisions.with_alert(known, rule, now)

    def _end_without_streams(self, tx: Transaction, work: _Work, now: datetime) -> None:
        # A finding has an episode in each stream, and ends with the last one.
        ended = {work.episodes[key].finding_id for key in work.changed_episodes if work.episodes[key].is_over}
        over = ended - tx.findings.ids_with_open_episodes(ended)
        closed = [work.known[each] for each in over if work.known[each].is_open]
        for known in closed:
            work.put(finding_ends.ended(known, FindingEnd.ENDED, now))
        tx.findings.save([work.known[known.id] for known in closed])

    def _record_metrics(self, updates: Sequence[FindingUpdate], work: _Work) -> None:
        rules = self._rules().by_name
        for update in updates:
            last = self._numbers.get((update.node, update.instance))
            if last is not None and update.number > last + 1:
                self._metrics.finding_updates_lost.inc(update.number - last - 1)
            self._numbers[update.node, update.instance] = max(update.number, last or 0)
        if len(self._numbers) > 100_000:  # restarted agents leave entries
            self._numbers.clear()
        self._metrics.finding_updates.inc(len(updates))
        if work.dropped:
            self._metrics.findings_dropped.inc(work.dropped)
            log.warning("dropping findings: a node or job has too many open", dropped=work.dropped)
        for node, number in work.cut_claims.items():
            self._metrics.finding_claims_cut.inc(number)
            log.warning("dropping claimed jobs: a node's files name too many", node=node, updates=number)
        for known in work.begun:
            self._open[_Group.of(known)] += 1
            name = known.rule if known.rule in rules else "unknown"
            self._metrics.findings.labels(name, known.role.value).inc()
            log.info("new finding", rule=name, role=known.role.value, target=known.target.key, id=known.id)
        if any(work.known[finding_id].tell_at is not None for finding_id in work.changed):
            self._on_alerts()

    # --- checks by time ---------------------------------------------------------------------------

    def _check(self, tx: Transaction) -> tuple[list[KnownFinding], bool]:
        now, rules = self._clock.now(), self._rules().by_name
        open_findings = tx.findings.all_open()
        for known in open_findings:
            if known.claimed_job:
                self._claimed.renew(known.origin.node, known.key, now)
        lives = {life.name: life for life in tx.job_lives()} if open_findings else {}
        progress = self._nodes.progress
        facts = EndFacts(
            ago=self._ago,
            booted_at=self._nodes.booted_at,
            jobs=progress.keys(),
            agents=self._nodes.agents,
            has_gone_on=functools.partial(_has_gone_on, lives, progress),
        )
        ends = {known.id: finding_ends.end_of(known, rules.get(known.rule), facts) for known in open_findings}
        over = [finding_ends.ended(known, end, now) for known in open_findings if (end := ends[known.id]) is not None]
        tx.findings.save(over)
        still_open = [known for known in open_findings if ends[known.id] is None]
        self._suspected = {known.id for known in still_open if known.is_suspected}
        changed = [*over, *self._confirm(tx, self._topology())]
        return still_open, any(known.tell_at is not None for known in changed)

    def _confirm(self, tx: Transaction, topology: Topology) -> list[KnownFinding]:
        """Raise the alerts of suspected findings that others confirm now, and return them."""
        if not self._suspected:
            return []
        rules, others = self._rules().by_name, tx.findings.all_open()
        confirmed = []
        for known in tx.findings.with_ids(self._suspected).values():
            rule = rules.get(known.rule)
            confirm = rule.alert.confirm if rule is not None and rule.alert is not None else None
            if rule is None or confirm is None or not (known.is_suspected and known.is_open):
                continue
            alertnames = set(confirm.by) - rules.keys()
            firing = tx.firing(_MOST_FIRING, alertnames) if alertnames else []
            by = _confirmed_by(known, confirm, others, firing, topology)
            if by:
                raised = alert_decisions.with_alert(known, rule, self._clock.now())
                confirmed.append(replace(raised, confirmed_by=by))
        tx.findings.save(confirmed)
        return confirmed


def _read(tx: Transaction, placed: Sequence[tuple[FindingUpdate, Finding]]) -> _Work:
    findings = tx.findings
    episodes = findings.episodes([EpisodeKey(update.node, finding.id) for update, finding in placed])
    keys = [known_finding.identity(finding) for _, finding in placed]
    open_findings = findings.open_with(keys)
    known = findings.with_ids({episode.finding_id for episode in episodes.values()})
    known |= {each.id: each for each in open_findings.values()}
    return _Work(known, {key: each.id for key, each in open_findings.items()}, episodes)


def _save_excerpts(tx: Transaction, work: _Work) -> None:
    counts = tx.findings.excerpt_counts({finding_id for finding_id, _ in work.excerpts})
    kept: list[KnownExcerpt] = []
    for (finding_id, _), excerpt in work.excerpts.items():
        counts[finding_id] = counts.get(finding_id, 0) + 1
        if counts[finding_id] <= _most_excerpts(work.known[finding_id]):
            kept.append(excerpt)
    tx.findings.save_excerpts(kept)


def _most_excerpts(known: KnownFinding) -> int:
    if job_failure.is_dump_digest(known):
        return _MOST_DIGESTS
    return _MOST_KILLS if job_failure.is_kernel_kill(known) else MOST_EXCERPTS


def _has_gone_on(
    lives: Mapping[str, JobLife],
    progress_of: Mapping[str, JobProgress],
    known: KnownFinding,
    job: str,
    is_silent: bool,
) -> bool:
    """Return whether the job ended normally, or steps again: in another process, or if the finding `is_silent`."""
    life, progress = lives.get(job), progress_of.get(job)
    if life is not None and life.state is LifeState.ENDED and life.since > known.heard_at:
        return True
    if progress is None or progress.progressed_at is None or progress.progressed_at <= known.heard_at:
        return False
    is_another = progress.began_at is not None and progress.began_at > known.last_at
    return is_another or is_silent


def _confirmed_by(
    known: KnownFinding,
    confirm: Confirmation,
    others: Iterable[KnownFinding],
    firing: Iterable[AlertRecord],
    topology: Topology,
) -> str:
    """Return the name of the rule or alert that confirms a finding; empty if none does."""
    if by := finding_ends.confirmed_by(known, confirm, others):
        return by
    for record in firing:
        alert = record.alert
        is_near = finding_ends.is_within(known, alert.starts_at, record.last_heard_at, confirm.within)
        if alert.name in confirm.by and is_near and _is_about(known, alert.labels, topology):
            return alert.name
    return ""


def _is_about(known: KnownFinding, labels: Mapping[str, str], topology: Topology) -> bool:
    node, job = node_named_by(labels, topology), job_named_by(labels, topology)
    nodes = known.nodes | ({known.target.node} if known.target.kind is not TargetKind.JOB else set())
    return (isinstance(node, str) and node in nodes) or (
        isinstance(job, str) and job == (known.target.job or known.origin.job)
    )
