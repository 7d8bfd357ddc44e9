"""Delivery of finding alerts to Alertmanager, or directly to the intake.

Their schedule is committed with the finding (`KnownFinding.tell_at`).
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Sequence
from datetime import datetime, timedelta

from msgspec.structs import replace

from trainmedic.wire import envelope
from trainmedic_logs.domain.known_finding import KnownFinding
from trainmedic_server import errors, telemetry
from trainmedic_server.domain.alert import Alert, Delivery
from trainmedic_server.engine import finding_alerts, loops
from trainmedic_server.ports.findings import AlertSender
from trainmedic_server.ports.outside import Clock
from trainmedic_server.ports.store import RunStore, Transaction

RECEIVER = "log findings"  # `Delivery.receiver` of alerts that do not come from Alertmanager
_LOOK_EVERY = timedelta(seconds=5)
_AT_ONCE = 200  # alerts of one request


class IntakeAlertSender:
    def __init__(self, admit: Callable[[Delivery], Awaitable[object]], clock: Clock) -> None:
        self._admit = admit
        self._clock = clock

    async def tell(self, alerts: Sequence[Alert]) -> None:
        await self._admit(Delivery(envelope.new_id(), self._clock.now(), RECEIVER, "", "", tuple(alerts)))


class FindingAlertSender:
    """Firing alerts are repeated after ``repeat_every``."""

    def __init__(
        self,
        store: RunStore,
        sender: AlertSender,
        clock: Clock,
        metrics: telemetry.Metrics,
        repeat_every: timedelta,
    ) -> None:
        self._store = store
        self._sender = sender
        self._clock = clock
        self._metrics = metrics
        self._repeat_every = repeat_every
        self._touched = asyncio.Event()

    def touch(self) -> None:  # alerts are due now
        self._touched.set()

    async def run(self) -> None:
        await loops.repeat(self.tell, _LOOK_EVERY, "finding alerts", self._metrics, sleep=self._until_touched)

    async def _until_touched(self, seconds: float) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._touched.wait()
        self._touched.clear()

    async def tell(self) -> int:
        """Send some due alerts. Return the number of due findings. Raises TrainmedicError."""
        due = await self._store.transact(lambda tx: tx.findings.to_tell(self._clock.now(), _AT_ONCE))
        sent = [known for known in due if known.alert is not None]
        if sent:
            try:
                await self._sender.tell([finding_alerts.alert_of(known, known.alert) for known in sent if known.alert])
            except errors.TrainmedicError:
                self._metrics.finding_alert_errors.inc()
                raise
        if due:
            now = self._clock.now()
            await self._store.transact(lambda tx: self._schedule_repeats(tx, due, now))
            self._observe(sent, now)
        return len(due)

    def _schedule_repeats(self, tx: Transaction, due: Sequence[KnownFinding], now: datetime) -> None:
        """Schedule the repeats of open findings. Those that ended since stay due."""
        stored = tx.findings.with_ids([known.id for known in due])
        noted = []
        for before in due:
            known = stored.get(before.id)
            if known is None or known.is_open != before.is_open:
                continue
            again_at = now + self._repeat_every if known.is_open and known.alert is not None else None
            noted.append(replace(known, tell_at=again_at))
        tx.findings.save(noted)

    def _observe(self, sent: Sequence[KnownFinding], now: datetime) -> None:
        for known in sent:
            alert = known.alert
            if alert is not None and known.is_open and known.tell_at == alert.starts_at:  # for the first time
                self._metrics.finding_to_alert_seconds.observe(max((now - alert.starts_at).total_seconds(), 0.0))
