"""Explanation of playbook decisions without a server, whose state counts as empty."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime

from trainmedic_server.domain.alert import Alert
from trainmedic_server.domain.topology import Topology
from trainmedic_server.engine import explanation
from trainmedic_server.engine.explanation import ExplainedAlert
from trainmedic_server.ports.actions import Actions
from trainmedic_server.ports.alert_map import NO_ALERT_MAP, AlertMap
from trainmedic_server.ports.limits import EngineLimits
from trainmedic_server.ports.playbooks import Catalog


def explain(
    catalog: Catalog,
    actions: Actions,
    alerts: Sequence[Alert],
    limits: EngineLimits,
    now: datetime,
    topology: Topology = Topology(),
    alert_map: AlertMap = NO_ALERT_MAP,
) -> tuple[ExplainedAlert, ...]:
    playbooks = catalog.all()
    return explanation.alone(lambda alertname: playbooks, alerts, actions, limits, now, topology, alert_map)
