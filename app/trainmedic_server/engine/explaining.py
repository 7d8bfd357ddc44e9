"""Explanations of alerts from the server's current state, without changes."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from datetime import datetime

from trainmedic_core.target import Target
from trainmedic_server.domain.alert import Alert
from trainmedic_server.engine import admission_facts, claims, explanation
from trainmedic_server.engine.engine_services import EngineServices
from trainmedic_server.engine.explanation import ExplainContext, ExplainedAlert


class Explainer:
    def __init__(self, services: EngineServices) -> None:
        self._services = services

    async def explain(self, alerts: Sequence[Alert], at: datetime | None = None) -> tuple[ExplainedAlert, ...]:
        """Return each playbook's reaction if the alerts were delivered now. Raises StoreUnavailable.

        `at` is the time of the decision. Guards count their periods from now.
        """
        services = self._services
        topology = services.topology()
        mapped = [services.alert_map().apply(alert) for alert in alerts]
        names = {each.alert.name for each in mapped}
        by_name = {each.definition.name: each for name in names for each in services.catalog.for_alert(name)}
        playbooks = [by_name[name] for name in sorted(by_name)]
        # Use threads: a thousand alerts take 1 s, during which webhooks need answers.
        delivery = await asyncio.to_thread(explanation.prepared, services.catalog.for_alert, mapped, topology)
        ago = services.timeline.by_clock()
        facts = await services.store.transact(
            lambda tx: admission_facts.read(tx, [delivery], services.limits, ago, topology, services.catalog)
        )
        now = at or services.clock.now()
        holders = {
            candidate.key: services.locks.holder(
                claims.of_playbook(candidate.playbook, candidate.target, services.actions, candidate.also)
            )
            for candidate in delivery.candidates
            if isinstance(candidate.target, Target)
        }
        context = ExplainContext(
            services.actions,
            services.limits,
            now,
            ago,
            holder=holders.get,
            is_live=True,
            verdicts=topology.verdicts,
            topology=topology,
            memories=facts.memories,
        )
        return await asyncio.to_thread(explanation.explain, playbooks, delivery, facts, context)

    async def explain_for_a_test(self, alerts: Sequence[Alert]) -> tuple[ExplainedAlert, ...]:
        services = self._services
        mapped = [services.alert_map().apply(alert).alert for alert in alerts]
        return await asyncio.to_thread(
            explanation.explain_for_a_test, services.catalog.for_alert, mapped, services.actions, services.limits
        )
