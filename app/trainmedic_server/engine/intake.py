"""Intake of deliveries: match, decide, commit, then answer.

A full queue refuses a delivery at once, and Alertmanager retries it.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Coroutine, Sequence
from typing import Any

from msgspec import Struct
from msgspec.structs import replace

from trainmedic_server import telemetry
from trainmedic_server.domain.admission import Admission
from trainmedic_server.domain.alert import Alert, AlertStatus, Delivery
from trainmedic_server.domain.event_codec import recorded
from trainmedic_server.domain.event_kinds import MatchFailed
from trainmedic_server.domain.reaction import NoReaction, Reaction
from trainmedic_server.domain.run import Event
from trainmedic_server.domain.topology import Topology
from trainmedic_server.engine import admission_facts, matching
from trainmedic_server.engine.admission import Admitter
from trainmedic_server.engine.admission_changes import AdmissionChanges
from trainmedic_server.engine.batching import Batcher
from trainmedic_server.engine.engine_services import EngineServices
from trainmedic_server.engine.first_plans import KeptTargets
from trainmedic_server.engine.matching import Candidate, MatchedAlert, PreparedDelivery
from trainmedic_server.ports.alert_map import AlertMap
from trainmedic_server.ports.playbooks import CompiledPlaybook
from trainmedic_server.ports.store import Transaction

_ALERTS_PER_TRANSACTION = 500  # each delivery counts as one more

_LONGEST_TURN = 0.02  # Seconds of matching before other tasks, such as probes, get a turn

_UNPROVEN_EVERY = 3600.0  # Seconds between two warnings about a playbook and an alert

log = telemetry.logger(__name__)


def admitter_of_one(
    tx: Transaction, services: EngineServices, alert: Alert, candidate: Candidate, topology: Topology
) -> Admitter:
    now, ago = services.clock.now(), services.timeline.by_clock()
    delivery = Delivery("", now, "", "", "", (alert,))
    prepared = PreparedDelivery(delivery, (MatchedAlert((candidate,)),))
    facts = admission_facts.read(tx, [prepared], services.limits, ago, topology, services.catalog)
    return Admitter(facts, services.limits, services.new_id, now, ago)


class AdmittedBatch(Struct, frozen=True):
    replies: tuple[Admission, ...]
    changes: AdmissionChanges


class DeliveryIntake:
    def __init__(self, services: EngineServices) -> None:
        self._services, metrics = services, services.metrics
        self._kept_playbooks: set[tuple[str, str]] = set()  # name and version: their texts are stored
        self._matching = asyncio.Lock()
        self._unproven_logged: dict[tuple[str, str], float] = {}  # loop time by playbook and alertname
        self._kept_from_a_run = {name: metrics.unmatched_alerts.labels(name) for name in matching.NO_RUN_BECAUSE}
        self._alerts = {status: metrics.alerts.labels(str(status)) for status in AlertStatus}
        metrics.queue_depth.set_function(lambda: len(self._queue))
        self._queue: Batcher[Delivery, Admission] = Batcher(
            self._admit,
            most=_ALERTS_PER_TRANSACTION,
            weigh=lambda delivery: 1 + len(delivery.alerts),
            at_once=2,  # one is matched while the other is written
            limit=services.limits.queue,
            entries="deliveries",
            watch=metrics.batch_watch("deliveries"),
        )

    def admit(self, delivery: Delivery) -> Coroutine[Any, Any, Admission]:
        return self._queue.ask(delivery)  # answers as `Engine.admit` says

    async def stop(self) -> None:
        await self._queue.stop()

    async def _prepare(self, delivery: Delivery, topology: Topology, alert_map: AlertMap) -> PreparedDelivery:
        """Find each alert's playbooks and targets. A large delivery takes seconds, so other tasks get turns."""
        failures: list[Event] = []
        alerts: list[Alert] = []
        matched: list[MatchedAlert] = []
        loop = asyncio.get_running_loop()
        turn_ends = loop.time() + _LONGEST_TURN
        for alert in delivery.alerts:
            if loop.time() > turn_ends:
                await asyncio.sleep(0)
                turn_ends = loop.time() + _LONGEST_TURN
            mapped = alert_map.apply(alert)
            alerts.append(mapped.alert)
            if mapped.refused:  # log no missing proof: it is refused anyway
                shortlist = self._services.catalog.shortlist(mapped.alert)
                made = matching.match_shortlist(shortlist, mapped.alert, topology)
                matched.append(matching.refuse(made, mapped.refused))
            else:
                matched.append(self._matched(mapped.alert, topology, failures))
        return PreparedDelivery(replace(delivery, alerts=tuple(alerts)), tuple(matched), tuple(failures))

    def _matched(self, alert: Alert, topology: Topology, failures: list[Event]) -> MatchedAlert:
        matched = matching.match_shortlist(self._services.catalog.shortlist(alert), alert, topology)
        for miss in matched.misses if alert.status is AlertStatus.FIRING else ():
            if miss.decision == NoReaction.NO_PROOF:
                self._log_unproven(alert, miss)
            if miss.decision == NoReaction.MATCH_FAILED:
                log.warning("playbook condition failed", playbook=miss.playbook, alert=alert.name, why=miss.reason)
                content = MatchFailed(miss.playbook, alert.name, miss.reason)
                failures.append(recorded(content, self._services.clock.now()))
        return matched

    def _log_unproven(self, alert: Alert, miss: Reaction) -> None:
        key, now = (miss.playbook, alert.name), asyncio.get_running_loop().time()
        if now - self._unproven_logged.get(key, -_UNPROVEN_EVERY) >= _UNPROVEN_EVERY:
            self._unproven_logged[key] = now
            log.warning("alert lacks required proof", playbook=miss.playbook, alert=alert.name, why=miss.reason)

    async def _admit(self, deliveries: Sequence[Delivery]) -> Sequence[Admission]:
        async with self._matching:  # keep transactions in order of arrival
            topology, alert_map = self._services.topology(), self._services.alert_map()
            prepared = [await self._prepare(delivery, topology, alert_map) for delivery in deliveries]
            if any(entry.has_unknown_target for entry in prepared):
                await self._services.renew_topology()
                topology = self._services.topology()
                for place, entry in enumerate(prepared):
                    if entry.has_unknown_target:
                        prepared[place] = await self._prepare(deliveries[place], topology, alert_map)
            kept = KeptTargets(self._services, prepared)
        with kept:
            admitted = await self._services.store.transact(lambda tx: self._decide_and_write(tx, prepared, kept))
            kept.pass_on(admitted.changes)
        self._services.on_admitted(admitted.changes)
        self._kept_playbooks.update((run.playbook, run.version) for run in admitted.changes.runs)
        self._count(prepared, admitted)
        return admitted.replies

    def _decide_and_write(
        self, tx: Transaction, prepared: Sequence[PreparedDelivery], kept: KeptTargets
    ) -> AdmittedBatch:
        services = self._services
        now, ago = services.clock.now(), services.timeline.by_clock()
        facts = admission_facts.read(tx, prepared, services.limits, ago, services.topology(), services.catalog)
        admitting = Admitter(facts, services.limits, services.new_id, now, ago)
        replies = tuple(admitting.admit(entry) for entry in prepared)
        changes = admitting.changes(kept.first_plan)
        self._keep_playbooks(tx, prepared, changes)
        changes.write(tx, now)
        return AdmittedBatch(replies, changes)

    def _keep_playbooks(self, tx: Transaction, prepared: Sequence[PreparedDelivery], changes: AdmissionChanges) -> None:
        needed = {(run.playbook, run.version) for run in changes.runs} - self._kept_playbooks
        playbooks: dict[tuple[str, str], CompiledPlaybook] = {
            (candidate.playbook.definition.name, candidate.playbook.version): candidate.playbook
            for entry in prepared
            for candidate in entry.candidates
        }
        for name, version in needed:
            tx.keep_playbook(name, version, playbooks[name, version].text, self._services.clock.now())

    def _count(self, prepared: Sequence[PreparedDelivery], admitted: AdmittedBatch) -> None:
        # Change each metric once per batch: each change takes a lock and several calls.
        reports = [
            (alert.status, matched)
            for entry in prepared
            for alert, matched in zip(entry.delivery.alerts, entry.matched, strict=True)
        ]
        for status, number in Counter([status for status, _ in reports]).items():
            self._alerts[status].inc(number)
        kept = Counter([matched.no_run_because for status, matched in reports if status is AlertStatus.FIRING])
        for kept_by, number in kept.items():
            if kept_by is not None:
                self._kept_from_a_run[kept_by].inc(number)
        metrics = self._services.metrics
        decisions = Counter([(run.playbook, run.decision) for reply in admitted.replies for run in reply.runs])
        for (playbook, decision), number in decisions.items():
            metrics.decisions.labels(playbook, str(decision)).inc(number)
        metrics.truncated.inc(sum([entry.delivery.truncated for entry in prepared]))
        for entry in prepared:
            if entry.delivery.rejected or entry.delivery.ignored:
                self._count_malformed(entry.delivery)

    def _count_malformed(self, delivery: Delivery) -> None:
        if delivery.rejected:
            self._services.metrics.rejected_alerts.inc(len(delivery.rejected))
            first = delivery.rejected[0]
            log.warning(
                "rejected malformed alerts",
                delivery=delivery.id,
                count=len(delivery.rejected),
                first_alert=first.name,
                first_reason=first.reason,
            )
        if delivery.ignored:
            log.info(
                "ignored malformed members of a delivery",
                delivery=delivery.id,
                members=[f"{field}: {message}" for field, message in delivery.ignored],
            )
