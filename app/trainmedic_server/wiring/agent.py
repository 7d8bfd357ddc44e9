"""The node agent's composition root: builds every part from the settings, starts them in order, and stops them.

The order: the policy first, for without a good one nothing may start; then the journal, which also holds the
lock that keeps a second agent away; then the GPUs, the hands and the exporter; last the agent itself, which
takes up what was interrupted and begins to read. Stopping goes the other way.

Who calls it: ``cli.agent``, and tests that hand in hands of their own.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from trainmedic_server import __version__
from trainmedic_server.adapters.nvml_gpus import NvmlGpus
from trainmedic_server.adapters.time_limited_gpus import TimeLimitedCalls, TimeLimitedGpus
from trainmedic_server.agent import policy as policies
from trainmedic_server.agent.counters import AgentCounters
from trainmedic_server.agent.disk.cleaner import Cleaner
from trainmedic_server.agent.disk.executor import DiskCleanExecutor
from trainmedic_server.agent.executors import Executor, PeriodicTask
from trainmedic_server.agent.exporter import AgentCollector, Exporter
from trainmedic_server.agent.facts.executor import NodeFactsExecutor
from trainmedic_server.agent.facts.gpu import presence
from trainmedic_server.agent.journal import Journal
from trainmedic_server.agent.pods import pods_of
from trainmedic_server.agent.policy import Policy
from trainmedic_server.agent.power.control import PowerControl, since_boot
from trainmedic_server.agent.power.executors import LeaseExpiry, PowerLimitExecutor, RenewLeaseExecutor
from trainmedic_server.agent.power.ledger import PowerLedger
from trainmedic_server.agent.service import Agent
from trainmedic_server.settings.agent import AgentSettings

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class AgentParts:
    """What acts on the node: hands for the orders, keepers for what comes due by itself, and what the presence
    tells of the GPUs."""

    hands: Sequence[Executor] = ()
    keepers: Sequence[PeriodicTask] = ()
    inventory: Callable[[], Mapping[str, Any]] = dict


Equip = Callable[[AgentSettings, Policy, Journal, AgentCounters], contextlib.AbstractContextManager[AgentParts]]


def run(settings: AgentSettings, wait: Callable[[], object], equip: Equip | None = None) -> None:
    """Serve the node until `wait` returns. `equip` takes the place of the node's own tools, in tests.

    Raises ConfigurationError where a setting or file is of no use, JournalUnavailable where the journal is.
    """
    policy = load_policy(settings)
    if settings.has_short_key:
        log.warning("the signing key is short enough to be guessed; use 16 random characters or more")
    if settings.signing_key is None:
        log.warning("no signing key is set: whoever can write to Redis can command this agent, within its policy")
    tally = AgentCounters()
    journal = Journal.open(settings.state_dir)
    with contextlib.closing(journal), (equip or tools)(settings, policy, journal, tally) as equipped:
        agent = Agent(
            settings.node,
            settings.find_redis,
            settings.signing_key,
            policy,
            journal,
            equipped.hands,
            equipped.keepers,
            equipped.inventory,
            tally,
        )
        agent.start()
        log.info("ready", extra={"node": settings.node, "version": __version__, "policy": policy.digest or "none"})
        wait()
        agent.stop()
    log.info("stopped")


def load_policy(settings: AgentSettings) -> Policy:
    """The policy of the file that is set; one that only reads where none is. Raises ConfigurationError."""
    return policies.load(settings.policy) if settings.policy is not None else Policy()


@contextlib.contextmanager
def tools(settings: AgentSettings, policy: Policy, journal: Journal, tally: AgentCounters) -> Iterator[AgentParts]:
    """The node's own, for as long as the block lasts. Raises ConfigurationError where the exporter cannot listen."""
    calls = TimeLimitedCalls()
    gpus = TimeLimitedGpus(NvmlGpus(apart=calls), calls)
    with contextlib.closing(gpus):
        ledger = PowerLedger(journal)
        control = PowerControl(gpus, ledger, policy.power)
        places = sorted({root for rule in policy.cleaning.rules.values() for root in rule.roots})
        about = {"node": settings.node, "version": __version__, "policy": policy.digest or "none"}
        collector = AgentCollector(gpus, ledger.all, tally, about)
        with contextlib.closing(Exporter(collector, settings.exporter_host, settings.exporter_port)) as exporter:
            log.info("metrics", extra={"host": settings.exporter_host, "port": exporter.port})
            yield AgentParts(
                hands=[
                    PowerLimitExecutor(control),
                    RenewLeaseExecutor(control),
                    DiskCleanExecutor(Cleaner(policy.cleaning, state_dir=settings.state_dir)),
                    NodeFactsExecutor(settings.node, gpus, places),
                ],
                keepers=[LeaseExpiry(control, since_boot)],
                inventory=lambda: presence(gpus, pods_of),
            )
