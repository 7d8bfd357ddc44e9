"""``trainmedic agent release`` and ``forget``, which change a stopped agent's journal."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping

from trainmedic.errors import ConfigurationError
from trainmedic_agent.errors import GpuError
from trainmedic_agent.gpu_record import GpuRecord
from trainmedic_agent.health.record import HealthRecord
from trainmedic_agent.journal import Journal
from trainmedic_agent.policy import PowerBounds
from trainmedic_agent.ports.gpus import in_watts
from trainmedic_agent.power.control import PowerControl
from trainmedic_agent.power.ledger import PowerLedger
from trainmedic_agent.settings.agent import AgentSettings
from trainmedic_agent.wiring.node_gpus import own_gpus
from trainmedic_core.gpu_names import normal_uuid


def release(settings: AgentSettings) -> Mapping[str, str | GpuError]:
    """End all caps; return the result for each GPU, by UUID.

    Raises ConfigurationError if the agent is running or another one holds the GPUs; JournalUnavailable.
    """
    with contextlib.closing(Journal(settings.state_dir)) as journal, contextlib.closing(own_gpus()) as gpus:
        ledger = PowerLedger(journal)
        control = PowerControl(gpus, ledger, PowerBounds())  # without effect: every cap ends here
        changed = [uuid for uuid, state in ledger.all().items() if state.baseline is not None]
        control.record_ended({cap.id for state in ledger.all().values() for cap in state.caps}, "release")
        results: dict[str, str | GpuError] = {}
        for uuid, outcome in control.reconcile(changed).items():
            if isinstance(outcome, GpuError):
                results[uuid] = outcome
            elif outcome.is_overridden:
                results[uuid] = f"{in_watts(outcome.after.limit_mw):g} W, set by another process: kept"
            else:
                results[uuid] = f"{in_watts(outcome.after.limit_mw):g} W, was {in_watts(outcome.before.limit_mw):g} W"
        return results


def forget(settings: AgentSettings, name: str) -> str:
    """Forget a GPU, or a part's health values; return its identity.

    Raises ConfigurationError if the agent is running or the part is unknown; JournalUnavailable.
    """
    with contextlib.closing(Journal(settings.state_dir)) as journal:
        record, health = GpuRecord(journal), HealthRecord(journal)
        known = [gpu.info for gpu in record.gpus()]
        for info in known:
            if normal_uuid(info.uuid) == normal_uuid(name):
                record.forget(info.uuid)
                health.forget(info.uuid)
                return f"GPU {info.index} {info.uuid} {info.name}"
        if health.forget(name):
            return f"values of {name}"
    there = ", ".join(info.uuid for info in known) or "none"
    raise ConfigurationError(
        f"no GPU or part {name!r} is on record in {settings.state_dir}; GPUs there: {there}. Pass the agent's "
        "state directory with --state-dir"
    )
