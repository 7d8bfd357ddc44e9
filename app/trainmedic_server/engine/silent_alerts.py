"""Alerts without reports: Alertmanager is asked whether they fire; without an answer, a long silence ends them.

Otherwise a lost message could block an undo permanently.
"""

from __future__ import annotations

from datetime import timedelta

from msgspec.structs import replace

from trainmedic_server import errors, telemetry
from trainmedic_server.domain.alert import BEGINNINGS, AlertRecord
from trainmedic_server.domain.event_codec import recorded
from trainmedic_server.domain.event_kinds import AlertResolved
from trainmedic_server.engine import loops
from trainmedic_server.engine.engine_services import EngineServices
from trainmedic_server.ports.outside import AlertSource
from trainmedic_server.ports.store import Transaction

ASK_AFTER = timedelta(minutes=5)  # Alertmanager's group_interval; less with a short `assume_resolved_after`

log = telemetry.logger(__name__)


class SilentAlerts:
    """Ends silent alerts of runs that are open or owe an undo."""

    def __init__(self, services: EngineServices, source: AlertSource | None) -> None:
        self._services = services
        self._source = source

    @property
    def interval(self) -> timedelta:  # between checks, so that an end is noticed soon after it counts
        return min(max(self._services.limits.assume_resolved_after / 10, timedelta(seconds=0.5)), timedelta(minutes=1))

    async def run(self) -> None:
        sleep = loops.sleeping_by(self._services.clock)
        await sleep(self.interval.total_seconds())  # the start is busy
        await loops.repeat(self.check, self.interval, "sweeper", self._services.metrics, sleep=sleep)

    async def check(self) -> None:
        services = self._services
        patience = services.limits.assume_resolved_after
        # Alertmanager is asked early. Without one, the time without a server does not count.
        moment = (
            services.clock.now() - min(ASK_AFTER, patience / 2) if self._source else services.timeline.ago(patience)
        )
        silent = await services.store.transact(lambda tx: tx.firing_not_heard_since(moment))
        for record in silent:
            because = await self._ended_because(record)
            if because is not None:
                await self._end(record, because)

    async def _ended_because(self, record: AlertRecord) -> str | None:
        if record.alert.fingerprint.startswith(BEGINNINGS):
            return None  # no step waits for its end, and a rollout may take days
        if self._source is not None and record.alert.is_in_alertmanager:
            try:
                if not await self._source.is_firing(record.identity):
                    return "asked"
                await self._services.store.transact(lambda tx: self._record_still_firing(tx, record))
                return None
            except errors.TemporaryFailure as error:
                log.warning("cannot ask Alertmanager whether an alert fires", error=str(error))
        silent_since = self._services.timeline.ago(self._services.limits.assume_resolved_after)
        return "assumed" if record.last_heard_at <= silent_since else None

    def _record_still_firing(self, tx: Transaction, record: AlertRecord) -> None:
        current = _unchanged(tx, record)
        if current is not None:
            tx.save_alerts([replace(current, last_heard_at=self._services.clock.now())])

    async def _end(self, record: AlertRecord, because: str) -> None:
        def work(tx: Transaction) -> list[str]:
            now = self._services.clock.now()
            current = _unchanged(tx, record)
            if current is None:
                return []
            tx.save_alerts([replace(current, resolved_at=now, resolved_because=because)])
            run_ids = [linked.run_id for linked in tx.linked_runs([record.identity]).get(record.identity, ())]
            content = AlertResolved(record.alert.name, because)
            tx.append([recorded(content, now, run_id) for run_id in run_ids])
            return run_ids

        self._services.touch(await self._services.store.transact(work))


def _unchanged(tx: Transaction, record: AlertRecord) -> AlertRecord | None:
    current = tx.alerts([record.identity]).get(record.identity)
    if current is None or current.is_resolved or current.last_heard_at > record.last_heard_at:
        return None
    return current
