"""Explains what playbooks would do about alerts without a server, a store or an effect.

What only a server knows (earlier runs, switches, who uses a target) counts as if there were nothing. The decision is
the admission's own (``engine.explanation``). Who calls it: ``cli.playbook``.
"""

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
    """An explanation for each alert, with each playbook that there is, in the order of their names."""
    playbooks = catalog.all()
    return explanation.alone(lambda alertname: playbooks, alerts, actions, limits, now, topology, alert_map)
