# What the parts of the engine share. `engine.service.Engine` builds it.
from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Set

from msgspec import Struct, field

from trainmedic_server import telemetry
from trainmedic_server.domain.pause import OperatorPause
from trainmedic_server.domain.run import Controls, Run
from trainmedic_server.domain.topology import Topology
from trainmedic_server.engine import pausing
from trainmedic_server.engine.admission_changes import AdmissionChanges
from trainmedic_server.engine.breaker import Breaker
from trainmedic_server.engine.group_news import GroupNews
from trainmedic_server.engine.locks import TargetLocks
from trainmedic_server.engine.plan_values import PlanningContext
from trainmedic_server.engine.recorder import Recorder
from trainmedic_server.engine.timeline import Timeline
from trainmedic_server.engine.turns import RunQueue
from trainmedic_server.ports.actions import Actions
from trainmedic_server.ports.alert_map import NO_ALERT_MAP, AlertMap
from trainmedic_server.ports.fence import Fence
from trainmedic_server.ports.limits import EngineLimits
from trainmedic_server.ports.outside import Clock
from trainmedic_server.ports.playbooks import Catalog, CompiledPlaybook
from trainmedic_server.ports.store import RunStore

log = telemetry.logger(__name__)


async def nothing_to_renew() -> None:
    """Do nothing, as for a simulation's fixed topology."""


class EngineServices(Struct, frozen=True):
    store: RunStore
    catalog: Catalog
    recorder: Recorder
    locks: TargetLocks
    actions: Actions
    clock: Clock
    timeline: Timeline
    limits: EngineLimits
    metrics: telemetry.Metrics
    new_id: Callable[[], str]
    controls: Callable[[], Controls]
    breaker: Breaker
    fence: Fence
    on_admitted: Callable[[AdmissionChanges], None]  # starts the runs of durable changes
    touch: Callable[[Iterable[str]], None]  # makes the drivers of these runs reload
    group_news: GroupNews
    topology: Callable[[], Topology] = Topology
    renew_topology: Callable[[], Awaitable[None]] = nothing_to_renew
    """Reloads the topology for an unknown target. Waits briefly and never raises."""
    alert_map: Callable[[], AlertMap] = lambda: NO_ALERT_MAP
    turns: RunQueue = field(default_factory=RunQueue)
    looks: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(64))
    """Limit of concurrent looks of polled waits."""

    def planning_context(self, playbook: CompiledPlaybook | None) -> PlanningContext:
        limits, timeline = self.limits, self.timeline
        return PlanningContext(
            playbook,
            self.actions,
            self.new_id,
            limits.max_age,
            timeline.set_forward_since,
            timeline.idle_since,
            limits.external_url,
            self.topology,
        )

    def pause_of(self, run: Run, nodes: Set[str] = frozenset()) -> OperatorPause | None:
        """Return the pause that holds the run, by its targets and `nodes`."""
        controls = self.controls()
        if not controls.pauses:
            return None
        now, topology = self.clock.now(), self.topology()
        return pausing.holding(controls, run.playbook, run.targets, run.every_label, now, topology, nodes)

    def count_closed(self, run: Run) -> None:
        self.metrics.open_runs.dec()
        self.metrics.runs.labels(run.playbook, str(run.status)).inc()
        log.info("run closed", status=str(run.status), decision=str(run.decision), message=run.message)
