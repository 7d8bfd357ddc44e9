"""``trainmedic agent release``: every power cap of this node ends now. For who takes the agent off the node.

The agent must not be running: it would be two that work from one memory. Who calls it: ``cli.agent``.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping

from trainmedic_server.adapters.nvml_gpus import NvmlGpus
from trainmedic_server.adapters.time_limited_gpus import TimeLimitedCalls, TimeLimitedGpus
from trainmedic_server.agent.journal import Journal
from trainmedic_server.agent.policy import PowerBounds
from trainmedic_server.agent.power.control import PowerControl
from trainmedic_server.agent.power.ledger import PowerLedger
from trainmedic_server.errors import GpuError
from trainmedic_server.ports.gpus import in_watts
from trainmedic_server.settings.agent import AgentSettings


def release(settings: AgentSettings) -> Mapping[str, str | GpuError]:
    """What became of each GPU that was capped, or was still owed its power; by UUID.

    Raises ConfigurationError where the agent is running, JournalUnavailable.
    """
    calls = TimeLimitedCalls()
    driver = TimeLimitedGpus(NvmlGpus(apart=calls), calls)
    with contextlib.closing(Journal.open(settings.state_dir)) as journal, contextlib.closing(driver) as gpus:
        ledger = PowerLedger(journal)
        control = PowerControl(gpus, ledger, PowerBounds())
        owed = {uuid: state for uuid, state in ledger.all().items() if state.baseline is not None}
        control.mark_ended({hold.id for state in ledger.all().values() for hold in state.holds}, "release")
        told: dict[str, str | GpuError] = {}
        for uuid, settled in control.settle(owed).items():
            if isinstance(settled, GpuError):
                told[uuid] = settled
            elif settled.is_overridden:
                told[uuid] = f"{in_watts(settled.after.limit_mw):g} W, which somebody else has set: left"
            else:
                told[uuid] = f"{in_watts(settled.after.limit_mw):g} W, was {in_watts(settled.before.limit_mw):g} W"
        return told
