"""What the server would do about alerts now, by all that it knows: earlier runs, switches, guards, locks, targets.

It changes nothing. Who calls it: ``service``. Not here: the explanation itself (``explanation``).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from datetime import datetime

from trainmedic_server.domain.alert import Alert
from trainmedic_server.domain.target import Target
from trainmedic_server.domain.topology import Topology
from trainmedic_server.engine import admission_facts, explanation
from trainmedic_server.engine.explanation import ExplainContext, ExplainedAlert
from trainmedic_server.engine.timeline import Timeline
from trainmedic_server.ports.actions import Actions
from trainmedic_server.ports.limits import EngineLimits
from trainmedic_server.ports.outside import Clock
from trainmedic_server.ports.playbooks import Catalog
from trainmedic_server.ports.store import RunStore


class Explainer:
    """Explains alerts by what the server knows."""

    def __init__(
        self,
        store: RunStore,
        catalog: Catalog,
        actions: Actions,
        clock: Clock,
        timeline: Timeline,
        limits: EngineLimits,
        topology: Callable[[], Topology],
        holder: Callable[[Target], str | None],
    ) -> None:
        self._store = store
        self._catalog = catalog
        self._actions = actions
        self._clock = clock
        self._timeline = timeline
        self._limits = limits
        self._topology = topology
        self._holder = holder

    async def explain(self, alerts: Sequence[Alert], at: datetime | None = None) -> tuple[ExplainedAlert, ...]:
        """Return what each playbook that names an alert's alertname would do about it if it were delivered now.

        With `at` the age of the alerts is judged as of then; everything else is as it is now. Raises StoreUnavailable.
        """
        topology = self._topology()
        names = {alert.name for alert in alerts}
        by_name = {each.definition.name: each for name in names for each in self._catalog.for_alert(name)}
        playbooks = [by_name[name] for name in sorted(by_name)]
        # In threads, because a thousand alerts take a second, in which webhooks want to be answered.
        delivery = await asyncio.to_thread(explanation.prepared, self._catalog.for_alert, alerts, topology)
        ago = self._timeline.by_clock()
        facts = await self._store.transact(lambda tx: admission_facts.read(tx, [delivery], self._limits, ago, topology))
        now = at or self._clock.now()
        targets = (candidate.target for candidate in delivery.candidates)
        holders = {target.key: self._holder(target) for target in targets if isinstance(target, Target)}
        context = ExplainContext(
            self._actions,
            self._limits,
            now,
            ago,
            holder=lambda target: holders.get(target.key),
            is_live=True,
            verdicts=topology.verdicts,
        )
        return await asyncio.to_thread(explanation.explain, playbooks, delivery, facts, context)

    async def explain_for_a_test(self, alerts: Sequence[Alert]) -> tuple[ExplainedAlert, ...]:
        """Return what a test of the playbooks would see of each alert."""
        playbooks_for, actions, limits = self._catalog.for_alert, self._actions, self._limits
        return await asyncio.to_thread(explanation.for_a_test, playbooks_for, alerts, actions, limits)
