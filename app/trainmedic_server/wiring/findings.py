"""Assembly of the handling of findings in logs."""

from __future__ import annotations

import asyncio
import contextlib
from datetime import timedelta

from msgspec import Struct

from trainmedic.wire import envelope
from trainmedic.wire.signing import Signer
from trainmedic_logs.rules import log_rule_roots
from trainmedic_logs.rules.log_rule_library import LogRuleLibrary
from trainmedic_server import telemetry
from trainmedic_server.adapters.alertmanager_api import AlertmanagerApi
from trainmedic_server.adapters.redis_findings import RedisFindings
from trainmedic_server.adapters.redis_log_rules import RedisLogRules
from trainmedic_server.adapters.sql_store.store import SqlStore
from trainmedic_server.engine.finding_alert_sender import FindingAlertSender, IntakeAlertSender
from trainmedic_server.engine.finding_intake import FindingIntake
from trainmedic_server.engine.job_diagnoses import JobDiagnoses
from trainmedic_server.engine.node_watch import NodeWatch
from trainmedic_server.engine.runbooks import LinkingAlertSender, Runbooks
from trainmedic_server.engine.service import Engine
from trainmedic_server.engine.slow_jobs import SlowJobs
from trainmedic_server.engine.topology_watch import TopologyWatch
from trainmedic_server.errors import BusUnavailable
from trainmedic_server.ports.findings import AlertSender
from trainmedic_server.ports.job_pods import JobPods, NoPods
from trainmedic_server.ports.metric_history import MetricHistory
from trainmedic_server.ports.outside import Clock
from trainmedic_server.settings.server import ServerSettings
from trainmedic_server.wiring.background import run_in_background

# Interval at which a firing alert is sent to Alertmanager, as Prometheus does.
ALERTMANAGER_AGAIN = timedelta(minutes=1)
# Interval at which the intake receives a firing alert again; each receipt may start a repair.
INTAKE_AGAIN = timedelta(hours=1)
_FIRST_LOOK_SECONDS = 2.0  # for a slow Redis, so that the first findings have locations


def log_rule_library(settings: ServerSettings) -> LogRuleLibrary:
    return LogRuleLibrary(log_rule_roots.roots(settings.log_rules, {}), beside=settings.playbooks)


class FindingParts(Struct, frozen=True):
    settings: ServerSettings
    redis_url: str
    store: SqlStore
    engine: Engine
    rules: LogRuleLibrary
    topology: TopologyWatch
    alertmanager: AlertmanagerApi | None  # without one, the intake gets the alerts
    clock: Clock
    metrics: telemetry.Metrics
    signer: Signer | None
    metric_history: MetricHistory | None = None
    """Slow jobs are diagnosed only with Prometheus."""
    pods: JobPods = NoPods()

    async def start(self, stack: contextlib.AsyncExitStack) -> None:
        """Run the parts until the stack unwinds. Raises StoreUnavailable."""
        clock, metrics, store, engine = self.clock, self.metrics, self.store, self.engine
        nodes = NodeWatch(self.topology.presences, store, clock, metrics)
        await nodes.start()
        with contextlib.suppress(BusUnavailable, TimeoutError):  # `watch` tries again
            async with asyncio.timeout(_FIRST_LOOK_SECONDS):
                await nodes.look()
        alert_sender = FindingAlertSender(store, self._alert_sender(), clock, metrics, self._again_after())
        intake = FindingIntake(
            store,
            lambda: self.rules.rule_set,
            self.topology.topology,
            nodes,
            clock,
            engine.ago,
            metrics,
            envelope.new_id,
            alert_sender.touch,
        )
        findings = RedisFindings(self.redis_url, intake.take, metrics, self.signer, fence=store.fence)
        rule_publisher = RedisLogRules(
            self.redis_url, lambda: self.rules.rule_set, lambda: nodes.agents, clock, metrics, self.signer, store.fence
        )
        presences, verdicts = self.topology.presences, self.topology.verdicts
        diagnoses = JobDiagnoses(
            store,
            presences,
            self._alert_sender(),
            clock,
            metrics,
            self._again_after(),
            verdicts=verdicts,
            pods=self.pods,
        )
        slow_jobs = SlowJobs(store, self.metric_history, verdicts, clock, metrics)
        stack.push_async_callback(findings.close)
        stack.push_async_callback(rule_publisher.close)
        loops = (
            slow_jobs.watch(),
            diagnoses.watch(),
            nodes.watch(),
            intake.watch(),
            alert_sender.run(),
            findings.run(),
            rule_publisher.run(),
            self.rules.watch(),
            self._count_rules(),
        )
        run_in_background(stack, *((loop, f"findings-{number}") for number, loop in enumerate(loops)))

    def _alert_sender(self) -> AlertSender:
        sender = self.alertmanager or IntakeAlertSender(self.engine.admit, self.clock)
        return LinkingAlertSender(sender, Runbooks(self.settings.runbooks))

    def _again_after(self) -> timedelta:
        if self.alertmanager is not None:
            return ALERTMANAGER_AGAIN
        # Well before a silent alert counts as resolved.
        return min(INTAKE_AGAIN, self.settings.limits.assume_resolved_after / 4)

    async def _count_rules(self) -> None:
        while True:
            self.metrics.log_rules_loaded.set(len(self.rules.rule_set.rules))
            self.metrics.log_rule_errors.set(len({problem.file for problem in self.rules.problems}))
            await asyncio.sleep(1)
