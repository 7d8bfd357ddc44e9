"""``trainmedic agent forget``: ends the wait for a GPU that is not to come back, and forgets its errors.

The agent must not be running, or it would write its own record over the change. Who calls it:
``trainmedic_agent.cli.agent``.
"""

from __future__ import annotations

import contextlib

from trainmedic.errors import ConfigurationError
from trainmedic_agent.gpu_record import GpuRecord
from trainmedic_agent.journal import Journal
from trainmedic_agent.ports.gpus import GpuInfo
from trainmedic_agent.settings.agent import AgentSettings
from trainmedic_core.gpu_names import normal_uuid


def forget(settings: AgentSettings, name: str) -> GpuInfo:
    """Forget the GPU of this UUID, and return what it was.

    Raises ConfigurationError where the agent is running or has no such GPU on record, and JournalUnavailable.
    """
    with contextlib.closing(Journal(settings.state_dir)) as journal:
        record = GpuRecord(journal)
        known = [gpu.info for gpu in record.gpus()]
        for info in known:
            if normal_uuid(info.uuid) == normal_uuid(name):
                record.forget(info.uuid)
                return info
    there = ", ".join(info.uuid for info in known) or "none"
    raise ConfigurationError(
        f"no GPU {name!r} is on record in {settings.state_dir}; there are: {there}. --state-dir says where the "
        "agent's state is"
    )
