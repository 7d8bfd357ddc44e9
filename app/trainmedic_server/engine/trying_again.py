"""Further runs while an alert still fires (``guards.again``)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from datetime import datetime, timedelta

from trainmedic_server.domain.alert import AlertRecord, AlertStatus, Identity
from trainmedic_server.domain.identity import Unresolved
from trainmedic_server.domain.playbook import Again
from trainmedic_server.domain.run import PASSING, Decision, Run
from trainmedic_server.domain.upcoming import TRIED_AGAIN, Upcoming
from trainmedic_server.engine import guards, loops
from trainmedic_server.engine.admission_changes import AdmissionChanges
from trainmedic_server.engine.engine_services import EngineServices
from trainmedic_server.engine.intake import admitter_of_one
from trainmedic_server.engine.matching import Candidate
from trainmedic_server.ports.playbooks import CompiledPlaybook
from trainmedic_server.ports.store import LinkedRun, Transaction

_EVERY = timedelta(minutes=1)  # longest time between two looks
_SHORTEST_SLEEP = timedelta(seconds=1)
_MOST_FIRING = 10_000  # alerts of one look


class RepeatedRuns:
    def __init__(self, services: EngineServices) -> None:
        self._services = services
        self._next: datetime | None = None  # when the next further run is due that was not due yet at the last look

    async def run(self) -> None:
        clock = loops.sleeping_by(self._services.clock)

        async def sleep(seconds: float) -> None:
            until_due = self._next - self._services.clock.now() if self._next is not None else _EVERY
            # A run that ends right after a look is due as soon as its rule says.
            shortest = min((again.after for again in self._rules()), default=_EVERY)
            left = max(min(until_due, shortest, timedelta(seconds=seconds)), _SHORTEST_SLEEP)
            await clock(left.total_seconds())

        await sleep(_EVERY.total_seconds())  # the start is busy
        await loops.repeat(self.look, _EVERY, "further runs", self._services.metrics, sleep=sleep)

    def _playbooks(self) -> Sequence[CompiledPlaybook]:
        return [each for each in self._services.catalog.all() if each.definition.guards.again is not None]

    def _rules(self) -> Iterator[Again]:
        return (again for each in self._playbooks() if (again := each.definition.guards.again) is not None)

    async def look(self) -> None:
        """Start the due runs. Raises StoreUnavailable."""
        playbooks, store = self._playbooks(), self._services.store
        self._next = None
        if not playbooks:
            return
        for identity, playbook in await store.transact(lambda tx: list(self._due(tx, playbooks))):
            await self._try(identity, playbook)

    def _due(
        self, tx: Transaction, playbooks: Sequence[CompiledPlaybook]
    ) -> Iterator[tuple[Identity, CompiledPlaybook]]:
        now = self._services.clock.now()
        records = tx.firing(_MOST_FIRING, {name for each in playbooks for name in each.definition.on.alertnames})
        linked = tx.linked_runs([record.identity for record in records])
        for record in records:
            for playbook in playbooks:
                name, again = playbook.definition.name, playbook.definition.guards.again
                acted = _acted(linked.get(record.identity, ()), name)
                due = guards.again_at(again, acted) if acted else None
                if due is not None and due <= now:
                    yield record.identity, playbook
                elif due is not None:
                    self._next = due if self._next is None else min(due, self._next)

    async def after(self, run: Run, alerts: Sequence[AlertRecord]) -> Upcoming | None:
        """Return when the ended run is tried again; None for never. Raises StoreUnavailable."""
        playbook = self._services.catalog.get(run.playbook)
        again = playbook.definition.guards.again if playbook is not None else None
        if playbook is None or again is None:
            return None
        firing = [record for record in alerts if not record.is_resolved and _may_begin(playbook, record)]
        if not firing:
            return None
        linked = await self._services.store.transact(lambda tx: tx.linked_runs([each.identity for each in firing]))
        coming = []
        for runs in linked.values():
            acted = _acted(runs, run.playbook)
            due = guards.again_at(again, acted) if acted and acted[-1].run_id == run.id else None
            if due is not None:
                coming.append((due, guards.times_left(again, acted)))
        if not coming:
            return None
        due, left = min(coming)
        return Upcoming(not_before=due, outcome=TRIED_AGAIN, note=f"while the alert fires, up to {left} more")

    async def _try(self, identity: Identity, playbook: CompiledPlaybook) -> None:
        changes = await self._services.store.transact(lambda tx: self._decide(tx, identity, playbook))
        if changes is None:
            return
        for run in changes.runs:
            self._services.metrics.decisions.labels(run.playbook, str(run.decision)).inc()
        self._services.on_admitted(changes)

    def _decide(self, tx: Transaction, identity: Identity, playbook: CompiledPlaybook) -> AdmissionChanges | None:
        record = tx.alerts([identity]).get(identity)
        if record is None or record.is_resolved or not _may_begin(playbook, record):
            return None
        now, topology = self._services.clock.now(), self._services.topology()
        candidate = Candidate.of(playbook, playbook.target_of(record.alert, topology), topology)
        if isinstance(candidate.target, Unresolved):
            return None
        admitting = admitter_of_one(tx, self._services, record.alert, candidate, topology)
        if admitting.try_again(record, candidate).decision is Decision.DUPLICATE:
            return None
        changes = admitting.changes()
        for run in changes.runs:
            tx.keep_playbook(run.playbook, run.version, playbook.text, now)
        changes.write(tx, now)
        return changes


def _may_begin(playbook: CompiledPlaybook, record: AlertRecord) -> bool:
    return record.alert.status is AlertStatus.FIRING and playbook.match(record.alert).matched


def _acted(linked: Sequence[LinkedRun], playbook: str) -> list[LinkedRun]:  # not refused for a passing reason
    return [run for run in linked if run.playbook == playbook and run.decision not in PASSING]
