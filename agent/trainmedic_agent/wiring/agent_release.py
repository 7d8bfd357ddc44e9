"""``trainmedic agent release``: ends every power cap of this node now, before the agent is removed from the node.

The agent must not be running, or two would work from one journal. Who calls it: ``trainmedic_agent.cli.agent``.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping

from trainmedic_agent.errors import GpuError
from trainmedic_agent.journal import Journal
from trainmedic_agent.policy import PowerBounds
from trainmedic_agent.ports.gpus import in_watts
from trainmedic_agent.power.control import PowerControl
from trainmedic_agent.power.ledger import PowerLedger
from trainmedic_agent.settings.agent import AgentSettings
from trainmedic_agent.wiring.node_gpus import own_gpus


def release(settings: AgentSettings) -> Mapping[str, str | GpuError]:
    """End the caps; return by UUID what became of each GPU that was capped, or was still owed its power.

    Raises ConfigurationError where the agent is running, or another one has the GPUs, and JournalUnavailable.
    """
    with contextlib.closing(Journal(settings.state_dir)) as journal, contextlib.closing(own_gpus()) as gpus:
        ledger = PowerLedger(journal)
        control = PowerControl(gpus, ledger, PowerBounds())
        owed = [uuid for uuid, state in ledger.all().items() if state.baseline is not None]
        control.record_ended({cap.id for state in ledger.all().values() for cap in state.caps}, "release")
        results: dict[str, str | GpuError] = {}
        for uuid, outcome in control.reconcile(owed).items():
            if isinstance(outcome, GpuError):
                results[uuid] = outcome
            elif outcome.is_overridden:
                results[uuid] = f"{in_watts(outcome.after.limit_mw):g} W, which somebody else has set: left"
            else:
                results[uuid] = f"{in_watts(outcome.after.limit_mw):g} W, was {in_watts(outcome.before.limit_mw):g} W"
        return results
