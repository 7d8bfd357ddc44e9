"""Playback of a test's lines through the server's intake, without the transport."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from datetime import timedelta

from trainmedic_core.fingerprint import fingerprint
from trainmedic_logs.diagnosis.verdict import Verdict
from trainmedic_logs.domain.finding_codec import FindingUpdate
from trainmedic_logs.domain.known_finding import KnownFinding
from trainmedic_logs.lines.rule import RuleSet
from trainmedic_logs.simulation.log_playback import SETTLE, LogPlayback
from trainmedic_logs.simulation.log_test_format import JobEntry, LineEntry
from trainmedic_server import telemetry
from trainmedic_server.domain.alert import Alert, AlertStatus
from trainmedic_server.domain.topology import JobTopology, Topology
from trainmedic_server.engine import verdict_alert
from trainmedic_server.engine.finding_alert_sender import FindingAlertSender
from trainmedic_server.engine.finding_intake import FindingIntake
from trainmedic_server.engine.node_watch import NodeWatch
from trainmedic_server.ports.findings import AlertSender
from trainmedic_server.ports.jobs import ArrivedNotice
from trainmedic_server.ports.outside import Clock, Presence
from trainmedic_server.ports.store import RunStore
from trainmedic_server.simulation.virtual_time import BEGINNING

_REPEAT = timedelta(minutes=1)  # interval at which a finding's alert is sent again


class _NoPresences:
    """Redis without presences: the test's job states its nodes."""

    async def jobs(self) -> list[Presence]:
        return []

    async def agents(self) -> list[Presence]:
        return []

    async def launchers(self) -> list[Presence]:
        return []

    def notices(self) -> Sequence[ArrivedNotice]:
        return ()

    def discard_notices(self, entries: Collection[bytes]) -> None:
        """Do nothing."""


class LogScenario:
    def __init__(
        self,
        job: JobEntry,
        rules: RuleSet,
        fixtures: Mapping[str, str],
        store: RunStore,
        clock: Clock,
        sender: AlertSender,
        metrics: telemetry.Metrics,
    ) -> None:
        self._job = job
        self._playback = LogPlayback(job, rules, fixtures)
        self._store = store
        self._clock = clock
        self._ids: list[str] = []
        self._sender = sender
        self._fails_at = BEGINNING + job.fails if job.fails is not None else None
        topology = Topology(jobs=JobTopology(dict.fromkeys(job.nodes, frozenset({job.name}))))
        self._finding_sender = FindingAlertSender(store, sender, clock, metrics, _REPEAT)
        self._intake = FindingIntake(
            store,
            lambda: rules,
            lambda: topology,
            NodeWatch(_NoPresences(), store, clock, metrics),
            clock,
            lambda ago: clock.now() - ago,
            metrics,
            self._new_id,
            self._finding_sender.touch,
        )

    async def print(self, entry: LineEntry) -> None:
        for updates in self._playback.print(entry, self._clock.now()):
            await self._send(updates)

    async def tick(self) -> None:
        for updates in self._playback.tick(self._clock.now()):
            await self._send(updates)
        await self._intake.check()
        await self._finding_sender.tell()
        if self._fails_at is not None and self._clock.now() >= self._fails_at + SETTLE:
            self._fails_at = None
            await self._send_verdict()

    async def findings(self) -> Sequence[KnownFinding]:
        """Return all findings by their start, including ended ones."""
        known = await self._store.transact(lambda tx: tx.findings.with_ids(self._ids))
        return [known[finding_id] for finding_id in self._ids if finding_id in known]

    def verdict(self) -> Verdict:
        return self._playback.verdict()

    async def _send_verdict(self) -> None:
        verdict = self.verdict().plain()
        labels = verdict_alert.labels_of(self._job.name, verdict)
        annotations, now = verdict_alert.annotations_of(verdict), self._clock.now()
        await self._sender.tell([Alert(fingerprint(labels), AlertStatus.FIRING, labels, annotations, now, None)])

    async def _send(self, updates: Sequence[FindingUpdate]) -> None:
        if updates:
            await self._intake.take(updates)
            await self._finding_sender.tell()

    def _new_id(self) -> str:
        self._ids.append(f"finding-{len(self._ids) + 1:05}")
        return self._ids[-1]
