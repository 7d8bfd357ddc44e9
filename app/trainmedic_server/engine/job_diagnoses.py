"""Verdicts on failed and hanging jobs: created, stored, and sent as alerts.

The verdict follows 5 s after the first sign (longer for a hang or unread lines), and is updated with late data for
2 min. While a launcher reports a running attempt, the job's output is no failure.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping, Sequence
from datetime import datetime, timedelta
from itertools import pairwise
from typing import Any, Protocol

from msgspec import Struct
from msgspec.structs import replace

from trainmedic.wire import envelope
from trainmedic_core.fingerprint import fingerprint
from trainmedic_logs.diagnosis import pods, reported_end
from trainmedic_logs.diagnosis.facts import Facts, RankFacts, Sign
from trainmedic_logs.diagnosis.judge import diagnose
from trainmedic_logs.diagnosis.reported_end import ReportedEnd
from trainmedic_logs.diagnosis.verdict import Confidence, Verdict
from trainmedic_logs.domain.finding import RANK_LIMIT
from trainmedic_logs.domain.known_finding import FindingEnd, KnownExcerpt, KnownFinding
from trainmedic_logs.domain.known_verdict import KnownVerdict
from trainmedic_server import telemetry
from trainmedic_server.domain.alert import Alert, AlertStatus
from trainmedic_server.domain.event_codec import content_of, name_of, names
from trainmedic_server.domain.event_kinds import JobEnded, JobFailed, JobGone
from trainmedic_server.domain.job_life import JobLife, LifeState
from trainmedic_server.domain.job_verdict import JobVerdict
from trainmedic_server.domain.run import Event
from trainmedic_server.domain.topology import ranks_in
from trainmedic_server.engine import job_failure, loops, verdict_alert
from trainmedic_server.engine.job_failure import Stepping
from trainmedic_server.engine.job_verdicts import JobVerdicts
from trainmedic_server.errors import StoreUnavailable
from trainmedic_server.ports.findings import AlertSender, FindingFilter, FindingHistory
from trainmedic_server.ports.job_pods import IsOwn, JobPods, NoPods
from trainmedic_server.ports.jobs import PresenceSource
from trainmedic_server.ports.outside import Clock, Presence
from trainmedic_server.ports.store import History, RunStore
from trainmedic_server.ports.verdicts import VerdictSource

SETTLING = timedelta(seconds=5)  # Delay from the first sign to the verdict, for the output of all nodes
# Delay if lines of a reported error were not read yet: the alert keeps its first cause.
UNREAD_SETTLING = timedelta(seconds=15)
UPDATED_FOR = timedelta(minutes=2)  # Time after a failure in which further signs belong to it
ALERT_LASTS = timedelta(minutes=15)  # Time from a failure to the end of its alert
OLDEST_DIAGNOSED = timedelta(hours=1)  # Age above which a failure gets no verdict
_REMEMBERED = 2 * OLDEST_DIAGNOSED  # for jobs, launchers and agents whose presence ended
_END_KINDS = names(JobFailed, JobEnded, JobGone)
_GONE = name_of(JobGone)
_LOOK_EVERY = timedelta(seconds=2)
_PRESENCES_EVERY = timedelta(seconds=5)
_GONE_AFTER = timedelta(seconds=30)  # without a presence, an agent's node counts as gone
_LAUNCHER_LASTS = timedelta(seconds=20)  # without a presence, a launcher no longer reports ends
_MOST_REPORTS = 2000  # events of ended jobs
_MOST_ENDED = 200  # verdicts whose alerts a normal end may resolve
_PODS_END = timedelta(seconds=5)  # A container ends at about the time of its job's report
_ALERTS_AT_ONCE = 50  # of one request
_MOST_UNSENT = 500  # verdicts without an alert when the server starts
_MOST_EARLIER = 50  # verdicts of a job
_MOST_EXCERPTS = 16  # findings whose excerpts are read
_MOST_PAST = 500  # findings of a job, and as many on a page of claimed ones
_MOST_PAGES = 10  # of claimed findings
_MOST_PROCESSES = 8  # newest instances of a job and its launchers
_MOST_RANKS = 100_000  # larger world sizes do not count

log = telemetry.logger(__name__)


class DiagnosisStore(RunStore, History, FindingHistory, VerdictSource, Protocol):
    """The store, with its reads that do not wait for writers."""


class _Inputs(Struct):
    """Inputs of a verdict, for its updates: the job may run elsewhere by then, and findings end."""

    used_at: datetime
    ranks: Mapping[int, RankFacts]
    findings: frozenset[str] = frozenset()  # IDs


class JobDiagnoses:
    """Firing alerts are repeated after `repeat_every`."""

    def __init__(
        self,
        store: DiagnosisStore,
        source: PresenceSource,
        sender: AlertSender,
        clock: Clock,
        metrics: telemetry.Metrics,
        repeat_every: timedelta,
        ids: Callable[[], str] = envelope.new_id,  # of verdicts
        verdicts: JobVerdicts | None = None,
        pods: JobPods = NoPods(),
    ) -> None:
        self._store = store
        self._source = source
        self._sender = sender
        self._clock = clock
        self._metrics = metrics
        self._repeat_every = repeat_every
        self._verdicts = verdicts or JobVerdicts(clock)
        self._pods = pods
        self._namespaces: dict[str, str | None] = {}  # of pods, by job; None if it reports none
        self._loaded_at: datetime | None = None
        self._ids = ids
        self._presences_read_at: datetime | None = None
        self._ranks: dict[str, dict[int, RankFacts]] = {}
        self._ranks_before: dict[str, tuple[datetime, dict[int, RankFacts]]] = {}  # until this time
        self._inputs: dict[str, _Inputs] = {}  # by the verdict's ID
        self._placements: dict[str, Any] = {}  # unparsed `_ranks`, to notice changes
        self._sizes: dict[str, int] = {}  # number of ranks
        self._processes: dict[str, tuple[str, ...]] = {}  # instance IDs of a job and its launchers, oldest first
        self._stepping: dict[str, Stepping] = {}
        # Time of the last presence, by name; of launchers, only those that report ends.
        self._seen: dict[str, datetime] = {}
        self._agents: dict[str, datetime] = {}
        self._launchers: dict[str, datetime] = {}
        self._states: list[tuple[str, LifeState, datetime, int]] | None = None  # of the jobs when `_reports` was read
        self._reports: dict[str, list[ReportedEnd]] = {}
        self._ended: dict[str, datetime] = {}  # Time of the end, for jobs whose last report is a normal end
        self._launched_on: dict[str, frozenset[str]] = {}  # nodes of a job's launchers
        self._unchecked_suspects: set[str] = set()  # nodes newly named by a verdict

    async def watch(self) -> None:
        await loops.repeat(self.look, _LOOK_EVERY, "diagnoses", self._metrics)

    async def look(self) -> None:
        """Check once and send due alerts. Raises TrainmedicError."""
        if self._loaded_at is None:
            await self._verdicts.load(self._store)
            due = await self._store.transact(lambda tx: tx.verdicts.to_tell(self._clock.now(), _MOST_UNSENT))
            # An earlier server ended before it sent their first alerts.
            unsent = [each for each in due if each.tell_at and each.tell_at <= each.made_at and not each.is_slow]
            self._unchecked_suspects |= {each.node for each in unsent if each.node}
            self._loaded_at = self._clock.now()
        if self._presences_read_at is None or self._clock.now() - self._presences_read_at >= _PRESENCES_EVERY:
            await self._read_presences()
        findings, lives = await self._store.transact(lambda tx: (tx.findings.all_open(), tx.job_lives()))
        by_job: dict[str, list[KnownFinding]] = {}
        for known in findings:
            for name in {known.origin.job, known.target.job}:
                if name is not None:
                    by_job.setdefault(name, []).append(known)
        self._note_all_processes(lives)
        by_name = {life.name: life for life in lives}
        gone = {name: life for name, life in by_name.items() if life.state is LifeState.GONE}
        of_pods = await self._pod_signs(by_name)
        reports = await self._reported_ends(lives)
        failures: list[Exception] = []
        refusal: Exception | None = None  # of suspect alerts
        for job in sorted(by_job.keys() | gone.keys() | of_pods.keys() | reports.keys()):
            ends = reports.get(job, ())
            own = self._signs_unseen_by_launcher(job, job_failure.failure_signs(by_job.get(job, ()), gone.get(job)))
            signs = self._open_signs(job, [*own, *of_pods.get(job, ())], ends)
            if not (signs or ends):
                continue
            try:
                await self._diagnose_job(job, signs, ends, findings)
            except StoreUnavailable:
                raise
            except Exception as error:  # alerts on other jobs must not wait for this one
                error.add_note(f"in the diagnosis of {job}")
                failures = failures or [error]
            refusal = refusal or await _failure_of(self._alert_on_suspects())
        self._ended = {job: ends[-1].at for job, ends in reports.items() if not ends[-1].is_failure}
        oldest = self._clock.now() - 2 * UPDATED_FOR
        self._inputs = {verdict: each for verdict, each in self._inputs.items() if each.used_at >= oldest}
        refusal = refusal or await _failure_of(self._alert_on_suspects())
        unsent_because = await _failure_of(self._send_due()) or refusal
        failures += [unsent_because] if unsent_because is not None else []
        if len(failures) > 1:
            raise ExceptionGroup("a diagnosis and the sending of alerts failed", failures)
        for failure in failures:
            raise failure

    async def _reported_ends(self, lives: Sequence[JobLife]) -> dict[str, list[ReportedEnd]]:
        """Events are read only after a change of a job's record."""
        now, states = self._clock.now(), [(life.name, life.state, life.since, life.failures) for life in lives]
        if states != self._states:
            until = now + timedelta(seconds=1)  # exclusive: events of this moment count
            events = await self._store.events_of_jobs(_END_KINDS, now - OLDEST_DIAGNOSED, until, _MOST_REPORTS)
            self._reports, self._states = _reports_by_job(events), states
        recent = {
            job: [each for each in ends if now - each.at <= OLDEST_DIAGNOSED] for job, ends in self._reports.items()
        }
        return {job: ends for job, ends in recent.items() if ends}

    def _signs_unseen_by_launcher(self, job: str, signs: Sequence[Sign]) -> list[Sign]:
        """Return only hangs while a launcher is present: it reports each end itself."""
        seen_at, stepping = self._launchers.get(job), self._stepping.get(job)
        if seen_at is None or self._clock.now() - seen_at > _LAUNCHER_LASTS:
            return list(signs)
        # Without known steps, nothing could disprove a hang.
        return [sign for sign in signs if sign.is_wait and stepping is not None and stepping.usual]

    def _open_signs(self, job: str, signs: Sequence[Sign], reports: Sequence[ReportedEnd]) -> list[Sign]:
        """Return signs that neither later steps disprove nor a report explains, oldest first."""
        stepping = self._stepping.get(job)
        left = (sign for sign in signs if not job_failure.is_disproved(sign, stepping))
        left = (sign for sign in left if not reported_end.is_answered(sign.at, sign.attempt, reports))
        return sorted(left, key=lambda sign: sign.at)

    async def _read_presences(self) -> None:
        jobs, agents, launchers = await asyncio.gather(
            self._source.jobs(), self._source.agents(), self._source.launchers()
        )
        now = self._presences_read_at = self._clock.now()
        # Parsing thousands of ranks is slow, and they rarely move.
        changed = {
            job.name: job.details
            for job in jobs
            if job.doubt is None and self._placements.get(job.name) is not job.details.get("placement", ())
        }
        read = await asyncio.to_thread(_ranks_of, changed)
        self._ranks_before |= {job: (now, self._ranks[job]) for job in read if self._ranks.get(job)}
        self._ranks |= read
        self._placements |= {name: details.get("placement", ()) for name, details in changed.items()}
        self._namespaces |= {job.name: _namespace_of(job.details) for job in jobs if job.doubt is None}
        self._sizes |= {job.name: size for job in jobs if job.doubt is None and (size := _size_of(job.details))}
        self._note_steps(jobs, now)
        self._agents |= {agent.name: now for agent in agents}
        self._seen |= {job.name: now for job in jobs}
        for launcher in (each for each in launchers if each.doubt is None):
            self._note_launcher(launcher, now)
        for job in [job for job, seen_at in self._seen.items() if now - seen_at > _REMEMBERED]:
            for facts in (self._seen, self._ranks, self._placements, self._sizes, self._namespaces):
                facts.pop(job, None)
            self._ranks_before.pop(job, None)
            self._stepping.pop(job, None)
        for job in [job for job, seen_at in self._launchers.items() if now - seen_at > _REMEMBERED]:
            del self._launchers[job]
            self._launched_on.pop(job, None)
        for node in [node for node, seen_at in self._agents.items() if now - seen_at > _REMEMBERED]:
            del self._agents[node]

    def _note_steps(self, jobs: Sequence[Presence], now: datetime) -> None:
        for job in jobs:
            step, instance = job.details.get("step"), str(job.details.get("instance"))
            if job.doubt is None and type(step) is int:
                before = self._stepping.get(job.name) or Stepping(step, instance, now)
                self._stepping[job.name] = before.moved(step, instance, now)

    def _note_all_processes(self, lives: Sequence[JobLife]) -> None:
        for life in lives:
            self._note_process(life.name, life.instance)
        if len(self._processes) > len(lives):
            names = {life.name for life in lives}
            self._processes = {name: self._processes[name] for name in self._processes.keys() & names}

    def _note_launcher(self, launcher: Presence, now: datetime) -> None:
        job, node = launcher.name, launcher.details.get("node")
        self._note_process(job, str(launcher.details.get("instance")))
        if isinstance(node, str) and node:
            self._launched_on[job] = self._launched_on.get(job, frozenset()) | {node}
        if launcher.details.get("reports_ends") is True:
            self._launchers[job] = now

    def _note_process(self, job: str, instance: str) -> None:
        instances = self._processes.get(job, ())
        if instance not in instances:
            self._processes[job] = (*instances, instance)[-_MOST_PROCESSES:]

    async def _diagnose_job(
        self, job: str, signs: Sequence[Sign], reports: Sequence[ReportedEnd], findings: Sequence[KnownFinding]
    ) -> None:
        """Make or update the verdict on each reported failure, then on the newest unreported one."""
        now, stepping = self._clock.now(), self._stepping.get(job)
        earlier = await self._store.transact(lambda tx: tx.verdicts.of_job(job, _MOST_EARLIER, is_slow=False))
        reported: set[str] = set()
        for before, report in pairwise((None, *reports)):
            if report is None or not report.is_failure:
                continue
            if now < job_failure.settled_at(report, findings, SETTLING, UNREAD_SETTLING):
                continue
            stepped_at = stepping.since if stepping is not None and stepping.usual else None
            verdict = reported_end.verdict_of(report, before, earlier, UPDATED_FOR, stepped_at)
            if verdict is None:
                # `_update_verdict` fills the empty members.
                verdict = KnownVerdict(self._ids(), job, report.attempt, report.at, now, "", "", None, "", {})
                made = await self._update_verdict(
                    job, verdict, findings, _earlier_than(verdict, earlier), report, reports
                )
                earlier.insert(0, made)
            elif now - report.at <= UPDATED_FOR:
                verdict = replace(verdict, attempt=report.attempt if verdict.attempt is None else verdict.attempt)
                await self._update_verdict(job, verdict, findings, _earlier_than(verdict, earlier), report, reports)
            reported.add(verdict.id)
        latest = max(earlier, key=lambda each: each.began_at, default=None)
        new = [sign for sign in signs if latest is None or job_failure.is_of_another(sign, latest, UPDATED_FOR)]
        is_due = any(job_failure.is_settled(sign, stepping, now, SETTLING) for sign in new)
        # Failures during a downtime are diagnosed for an hour, like alerts of findings.
        if is_due and now - new[0].at <= OLDEST_DIAGNOSED:
            began = KnownVerdict(self._ids(), job, new[0].attempt, new[0].at, now, "", "", None, "", {})
            await self._update_verdict(job, began, findings, earlier, None, reports)
        elif latest is not None and latest.id not in reported and len(new) < len(signs):  # it has signs
            if now - latest.began_at > UPDATED_FOR:
                return
            await self._update_verdict(job, latest, findings, earlier[1:], None, reports)

    async def _update_verdict(
        self,
        job: str,
        stored: KnownVerdict,
        open_findings: Sequence[KnownFinding],
        earlier: Sequence[KnownVerdict],
        report: ReportedEnd | None,
        reports: Sequence[ReportedEnd],
    ) -> KnownVerdict:
        """Diagnose again, and store the verdict if it differs from `stored`. `report`: the failure's, if any."""
        now = self._clock.now()
        inputs = self._inputs.get(stored.id)
        ranks = (inputs.ranks if inputs is not None else {}) or self._ranks_at(job, stored.began_at)
        nodes = {rank.node for rank in ranks.values()} | self._launched_on.get(job, frozenset())
        nodes |= {report.node} - {""} if report is not None else set()
        nodes |= await self._places_of(job) if not ranks else set()
        past = await self._findings_of(job, nodes)
        # Findings continued by a later attempt have ended but still explain this one.
        since = stored.began_at - OLDEST_DIAGNOSED
        over = [each for each in past if not each.is_open and each.origin.attempt and each.heard_at >= since]
        findings = job_failure.findings_of_attempt([*over, *open_findings], job, stored.attempt)
        nodes |= {node for each in findings if each.origin.job == job for node in each.nodes}
        own = [finding for finding in findings if job_failure.concerns(finding, job, nodes)]
        own += await self._former(inputs, {each.id for each in own})
        excerpts = await self._excerpts([each for each in own if each.rule in job_failure.END_RULES])
        digests = await self._excerpts([each for each in own if job_failure.is_dump_digest(each)])
        gone = {node: at for node in nodes if (at := self._agents.get(node)) and now - at > _GONE_AFTER}
        facts = job_failure.failure_facts(job, own, excerpts, ranks, gone, earlier, stored.attempt, report)
        healthy = job_failure.healthy_shapes(past, facts.attempt, earlier, reports)
        began_at = job_failure.began_at(self._processes.get(job, ()), stored.began_at)
        facts = replace(facts, healthy_shapes=healthy, world_size=self._sizes.get(job), began_at=began_at)
        kills = [each for each in own if job_failure.is_kernel_kill(each)]
        others = job_failure.lost_processes(open_findings, job)
        facts = job_failure.with_kills(facts, kills, await self._excerpts(kills), earlier, others)
        facts = await self._with_pods(facts, job, stored, earlier)
        # Dumps of a large job take tenths of a second.
        facts = await asyncio.to_thread(job_failure.with_dumps, facts, digests, earlier, UPDATED_FOR)
        verdict = diagnose(facts)
        plain = verdict.plain()
        if inputs is None and plain != stored.plain and self._keeps(stored, verdict):
            return stored
        self._inputs[stored.id] = _Inputs(now, ranks, frozenset(each.id for each in own))
        if plain == stored.plain:
            return stored
        made = replace(
            stored,
            attempt=facts.attempt,
            made_at=now,
            cause=verdict.cause.value,
            confidence=verdict.confidence.value,
            node=verdict.node,
            fingerprint=verdict.fingerprint,
            plain=plain,
            labels=stored.labels
            or verdict_alert.labels_of(job, plain, restarts=report is not None and report.restarts),
            tell_at=stored.tell_at or now,
        )
        await self._store.transact(lambda tx: tx.verdicts.save([made]))
        self._verdicts.take(job, made.began_at, JobVerdict.of(plain))
        log.info("job failed", job=job, cause=made.cause, confidence=made.confidence, verdict=verdict.summary)
        if made.node and made.node != stored.node:
            self._unchecked_suspects.add(made.node)
        return made

    def _keeps(self, stored: KnownVerdict, verdict: Verdict) -> bool:
        order = [each.value for each in Confidence]  # highest first
        if stored.confidence not in order:
            return False
        gained = order.index(stored.confidence) - order.index(verdict.confidence)
        # A restarted server may know less of the failure, and the ranks only at later places.
        is_inherited = self._loaded_at is not None and stored.made_at <= self._loaded_at
        return gained <= 0 if is_inherited else gained < 0

    def _ranks_at(self, job: str, at: datetime) -> Mapping[int, RankFacts]:
        until, before = self._ranks_before.get(job, (at, {}))
        return before if at < until else self._ranks.get(job, {})

    async def _places_of(self, job: str) -> set[str]:
        oldest = self._clock.now() - _REMEMBERED
        places = await self._store.transact(lambda tx: tx.findings.job_places())
        return {place.node for place, seen_at in places.items() if place.job == job and seen_at >= oldest}

    async def _former(self, inputs: _Inputs | None, known: Collection[str]) -> list[KnownFinding]:
        """Return the verdict's earlier findings, unless they turned out unconfirmed."""
        ids = inputs.findings.difference(known) if inputs is not None else frozenset()
        found = await self._store.transact(lambda tx: tx.findings.with_ids(ids)) if ids else {}
        return [each for each in found.values() if each.ended_because is not FindingEnd.UNCONFIRMED]

    async def _findings_of(self, job: str, nodes: Collection[str]) -> list[KnownFinding]:
        """Return the newest findings of the job, and claimed ones on its nodes.

        Claims on other nodes are skipped, over several pages: few can hide those.
        """
        own, _ = await self._store.findings_page(FindingFilter(job=job), _MOST_PAST, None)
        places = {*nodes, *(node for each in own if each.origin.job == job for node in each.nodes)}
        claimed: list[KnownFinding] = []
        cursor: str | None = None
        for _ in range(_MOST_PAGES):
            page, cursor = await self._store.findings_page(FindingFilter(claimed_job=job), _MOST_PAST, cursor)
            claimed += [each for each in page if places.intersection(each.nodes)]
            if cursor is None or len(claimed) >= _MOST_PAST:
                break
        return [*own, *claimed[:_MOST_PAST]]

    async def _pod_signs(self, lives: Mapping[str, JobLife]) -> dict[str, list[Sign]]:
        """Return signs of failures in pod statuses, without pods that end with a normally ended job."""
        now, by_job = self._clock.now(), dict[str, list[Sign]]()
        for job, faults in self._pods.faults().items():
            life = lives.get(job)
            ended_at = life.since - _PODS_END if life is not None and life.state is LifeState.ENDED else None
            is_own = await self._own_pod_test(job)
            own = [fault for fault in faults if is_own(fault.namespace, fault.pod, fault.node)]
            signs = pods.signs([fault for fault in own if ended_at is None or fault.at < ended_at], now)
            if signs:
                by_job[job] = signs
        return by_job

    async def _own_pod_test(self, job: str) -> IsOwn:
        namespace = self._namespaces.get(job)
        places = {rank.node for rank in self._ranks.get(job, {}).values()}
        is_known = job in self._seen or job in self._processes
        if is_known and namespace is None:
            stays = await self._store.transact(lambda tx: dict(tx.findings.job_places()))
            places |= {place.node for place in stays if place.job == job}
        return pods.own_pod_test(namespace, is_known, places, self._pods.namespaces_of(job))

    async def _with_pods(self, facts: Facts, job: str, known: KnownVerdict, earlier: Sequence[KnownVerdict]) -> Facts:
        reading = await self._pods.reading(job, await self._own_pod_test(job))
        after = max((verdict.began_at + UPDATED_FOR for verdict in earlier), default=None)
        facts = replace(facts, pods=pods.of_failure(reading, known.began_at, UPDATED_FOR, after))
        return replace(facts, exits=[*facts.exits, *pods.ends(facts)])

    async def _excerpts(self, findings: Sequence[KnownFinding]) -> list[KnownExcerpt]:
        records = [await self._store.finding(known.id) for known in findings[:_MOST_EXCERPTS]]
        return [excerpt for record in records if record is not None for excerpt in record.excerpts]

    async def _alert_on_suspects(self) -> None:
        for node in sorted(self._unchecked_suspects):
            await self._alert_on_suspect(node, self._clock.now())
            self._unchecked_suspects.discard(node)

    async def _alert_on_suspect(self, node: str, now: datetime) -> None:
        named = await self._store.transact(lambda tx: tx.verdicts.on_node(node, now - verdict_alert.SUSPECT_WITHIN))
        jobs = sorted({verdict.job for verdict in named})
        if len(jobs) < verdict_alert.SUSPECT_JOBS:
            return
        labels = verdict_alert.labels_of_suspect(node)
        summary = f"{len(jobs)} jobs failed on {node} within 30 days: {', '.join(jobs[:10])}"
        annotations = {"summary": summary, "verdicts": ", ".join(verdict.id for verdict in named[:10])}
        began_at = named[0].began_at  # The newest verdict's, so that a repeat is no new alert
        await self._sender.tell([Alert(fingerprint(labels), AlertStatus.FIRING, labels, annotations, began_at)])

    async def _send_due(self) -> None:
        now = self._clock.now()
        due = await self._store.transact(lambda tx: tx.verdicts.to_tell(now, _ALERTS_AT_ONCE))
        due += await self._resolved_by_normal_end(due, now)
        if not due:
            return
        await self._sender.tell([alert_of(verdict, self._alert_end(verdict, now)) for verdict in due])
        noted = [replace(verdict, tell_at=self._next_sending(verdict, now)) for verdict in due]
        await self._store.transact(lambda tx: tx.verdicts.save(noted))

    async def _resolved_by_normal_end(self, due: Sequence[KnownVerdict], now: datetime) -> list[KnownVerdict]:
        # Not due yet, but their alerts need not fire longer.
        if not self._ended:
            return []
        later = await self._store.transact(lambda tx: tx.verdicts.to_tell(now + self._repeat_every, _MOST_ENDED))
        due_ids = {verdict.id for verdict in due}
        return [each for each in later if each.id not in due_ids and self._alert_end(each, now) is not None]

    def _alert_end(self, verdict: KnownVerdict, now: datetime) -> datetime | None:
        """Return when the alert ended: after `ALERT_LASTS`, or at the job's normal end. None while it fires."""
        lasts_until, ended_at = verdict.began_at + ALERT_LASTS, self._ended.get(verdict.job)
        if ended_at is not None and verdict.began_at < ended_at < lasts_until:
            return ended_at
        return lasts_until if now >= lasts_until else None

    def _next_sending(self, verdict: KnownVerdict, now: datetime) -> datetime | None:
        if self._alert_end(verdict, now) is not None:
            return None
        return min(now + self._repeat_every, verdict.began_at + ALERT_LASTS)


async def _failure_of(sending: Awaitable[None]) -> Exception | None:
    try:
        await sending
    except StoreUnavailable:
        raise
    except Exception as error:  # the look goes on, and raises it at its end
        return error
    return None


def _earlier_than(verdict: KnownVerdict, verdicts: Sequence[KnownVerdict]) -> list[KnownVerdict]:
    at = (verdict.began_at, verdict.attempt or 0)
    return [each for each in verdicts if each.id != verdict.id and (each.began_at, each.attempt or 0) < at]


def alert_of(verdict: KnownVerdict, over_at: datetime | None) -> Alert:
    labels = dict(verdict.labels or {})
    return Alert(
        fingerprint=fingerprint(labels),
        status=AlertStatus.RESOLVED if over_at is not None else AlertStatus.FIRING,
        labels=labels,
        annotations={**verdict_alert.annotations_of(verdict.plain), "verdict": verdict.id},
        starts_at=verdict.began_at,
        ends_at=over_at,
    )


def _namespace_of(details: Mapping[str, Any]) -> str | None:
    namespace = details.get("namespace")
    return namespace if isinstance(namespace, str) and namespace else None


def _size_of(details: Mapping[str, Any]) -> int | None:
    size = details.get("world_size")
    return size if isinstance(size, int) and 0 < size <= _MOST_RANKS else None


def _ranks_of(details_by_job: Mapping[str, Mapping[str, Any]]) -> dict[str, dict[int, RankFacts]]:
    return {
        name: {
            rank.rank: RankFacts(rank.node, rank.gpu)
            for rank in ranks_in(name, details)
            if type(rank.rank) is int and 0 <= rank.rank < RANK_LIMIT
        }
        for name, details in details_by_job.items()
    }


def _report_of(event: Event) -> ReportedEnd | None:
    """Return the reported end; None if the server itself ended the job."""
    content = content_of(event)
    if not isinstance(content, (JobFailed, JobEnded, JobGone)) or event.actor != "trainmedic":
        return None
    if isinstance(content, JobGone) and content.attempt is None:
        return None
    return reported_end.of_members(content.job, event.at, event.data, is_failure=not isinstance(content, JobEnded))


def _reports_by_job(events: Iterable[Event]) -> dict[str, list[ReportedEnd]]:
    """A failed attempt whose launcher then gives up counts once."""
    reports: dict[str, list[ReportedEnd]] = {}
    for event in events:
        report = _report_of(event)
        if report is None:
            continue
        earlier = reports.setdefault(report.job, [])
        is_repeat = event.kind == _GONE and bool(earlier) and earlier[-1].attempt == report.attempt
        if not is_repeat:
            earlier.append(report)
    return reports
