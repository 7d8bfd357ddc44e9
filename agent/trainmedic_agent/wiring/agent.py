"""Composition root of the agent. Tests replace `node_parts`."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from prometheus_client.metrics_core import Metric

from trainmedic.wire import steady_time
from trainmedic.wire.steady_time import ClockStep, since_boot
from trainmedic_agent import __version__
from trainmedic_agent import policy as policies
from trainmedic_agent.containers.engine_api import ContainerEngine
from trainmedic_agent.containers.executor import PruneContainersExecutor
from trainmedic_agent.context import AgentContext
from trainmedic_agent.counters import AgentCounters
from trainmedic_agent.disk.cleaner import Cleaner
from trainmedic_agent.disk.exclusive_roots import exclusive_roots
from trainmedic_agent.disk.executor import DiskCleanExecutor
from trainmedic_agent.executors import Executor
from trainmedic_agent.exporter import AgentCollector, Exporter
from trainmedic_agent.facts.executor import NodeFactsExecutor
from trainmedic_agent.facts.gpu import presence
from trainmedic_agent.gpu_record import GpuRecord
from trainmedic_agent.health import health_metrics
from trainmedic_agent.health.checker import RecordedHealth
from trainmedic_agent.health.executor import NodeHealthExecutor, RegularCheck
from trainmedic_agent.health.record import HealthRecord
from trainmedic_agent.journal import Journal
from trainmedic_agent.no_logs import NoLogsExecutor
from trainmedic_agent.pods import pods_of
from trainmedic_agent.policy import Policy
from trainmedic_agent.ports.gpus import Gpus
from trainmedic_agent.power.control import PowerControl
from trainmedic_agent.power.executors import PowerLimitExecutor, RenewLeaseExecutor
from trainmedic_agent.power.lease_expiry import LeaseExpiry
from trainmedic_agent.power.ledger import PowerLedger
from trainmedic_agent.repairs.containers import RestartContainerExecutor
from trainmedic_agent.repairs.gpu_reset import GpuResetExecutor
from trainmedic_agent.repairs.intents import IntentBook
from trainmedic_agent.repairs.policy import RestartPolicy
from trainmedic_agent.repairs.reboot import RebootExecutor
from trainmedic_agent.repairs.units import RestartUnitExecutor
from trainmedic_agent.service import Agent, AgentParts
from trainmedic_agent.settings.agent import AgentSettings
from trainmedic_agent.slurm import arguments
from trainmedic_agent.slurm import policy as slurm_policy
from trainmedic_agent.slurm.executors import SlurmChange, SlurmReading
from trainmedic_agent.slurm.programs import SlurmPrograms
from trainmedic_agent.wiring.node_gpus import own_gpus
from trainmedic_agent.wiring.node_health import node_checker

if TYPE_CHECKING:
    from trainmedic_agent.log_link.linked_reading import LinkedReading

log = logging.getLogger(__name__)


def run(settings: AgentSettings, wait: Callable[[], object]) -> None:
    """Serve the node until `wait` returns. Raises ConfigurationError, JournalUnavailable."""
    steady_time.OF_PROCESS.tell = _log_clock_step
    policy = load_policy(settings)
    if settings.has_short_key:
        log.warning("the signing key is short enough to be guessed; use 16 random characters or more")
    if settings.signing_key is None:
        log.warning(
            "no signing key is set: whoever can write to Redis can command this agent, within its policy, and answer "
            "the server in its name"
        )
    with contextlib.closing(Journal(settings.state_dir)) as journal:
        context = AgentContext(settings.node, settings.find_redis, settings.signer, policy, journal, AgentCounters())
        with node_parts(settings, context) as parts:
            agent = Agent(context, parts)
            agent.start()
            log.info("ready", extra={"node": settings.node, "version": __version__, "policy": policy.digest or "none"})
            wait()
            agent.stop()
    log.info("stopped")


def _log_clock_step(step: ClockStep) -> None:
    fields = {"seconds": round(step.seconds), "kind": step.kind, "reason": str(step)}
    log.warning("the machine's clock was set", extra=fields)


def load_policy(settings: AgentSettings) -> Policy:
    """Read the policy file; without one, only reading is allowed. Raises ConfigurationError."""
    return policies.load(settings.policy) if settings.policy is not None else Policy()


@contextlib.contextmanager
def node_parts(settings: AgentSettings, context: AgentContext) -> Iterator[AgentParts]:
    """Yield the parts that act on this node.

    Raises ConfigurationError if another agent holds a GPU or root, or the exporter cannot listen; JournalUnavailable.
    """
    policy = context.policy
    restart = policy.restart or RestartPolicy()  # allows nothing
    cleaning_roots = sorted({root for rule in policy.cleaning.rules.values() for root in rule.roots})
    with exclusive_roots(cleaning_roots), contextlib.closing(own_gpus()) as gpus:
        ledger = PowerLedger(context.journal)
        control = PowerControl(gpus, ledger, policy.power)
        agent_labels = {"node": settings.node, "version": __version__, "policy": policy.digest or "none"}
        record, intents = GpuRecord(context.journal), IntentBook(context.journal)
        logs, search = _log_reading(settings, context, gpus, record)
        health = RecordedHealth(node_checker(gpus), HealthRecord(context.journal))

        def more_metrics() -> Iterator[Metric]:
            yield from health_metrics.families(health.record)
            yield from logs.metrics() if logs is not None else ()

        collector = AgentCollector(gpus, ledger.all, context.counters, agent_labels, record, more_metrics)
        with contextlib.closing(Exporter(collector, settings.exporter_host, settings.exporter_port)) as exporter:
            log.info("metrics", extra={"host": settings.exporter_host, "port": exporter.port})
            yield AgentParts(
                executors=[
                    PowerLimitExecutor(control),
                    RenewLeaseExecutor(control),
                    DiskCleanExecutor(Cleaner(policy.cleaning, state_dir=settings.state_dir)),
                    PruneContainersExecutor(policy.containers),
                    RestartUnitExecutor(restart, intents),
                    RestartContainerExecutor(restart, intents, ContainerEngine(restart.socket)),
                    GpuResetExecutor(gpus, intents),
                    RebootExecutor(intents),
                    NodeFactsExecutor(settings.node, gpus, record, cleaning_roots),
                    NodeHealthExecutor(settings.node, health, record, policy.health),
                    search,
                    *_slurm(context),
                ],
                tasks=[LeaseExpiry(control, since_boot), RegularCheck(health, record, policy.health)],
                inventory=lambda: presence(gpus, pods_of),
                log_reader=logs,
            )


def _slurm(context: AgentContext) -> list[Executor]:
    if context.policy.slurm is None:
        return []
    programs = SlurmPrograms(context.policy.slurm)
    changes: list[Executor] = [SlurmChange(action, programs, context.now) for action in arguments.ACTIONS]
    return [*changes, *(SlurmReading(action, programs, context.now) for action in slurm_policy.READING)]


def _log_reading(
    settings: AgentSettings, context: AgentContext, gpus: Gpus, record: GpuRecord
) -> tuple[LinkedReading | None, Executor]:
    if context.policy.logs is None:
        return None, NoLogsExecutor()
    # Imported here, so that an agent without logs does not load the link.
    from trainmedic_agent.wiring.agent_link import linked_reading

    return linked_reading(settings, context, context.policy.logs, gpus, record)
