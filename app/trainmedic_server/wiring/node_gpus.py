"""The GPUs of this node as every part of the agent uses them: NVML, with a time limit on each call.

Who calls it: ``agent``, ``agent_check``, ``agent_release`` and ``gpu_health``, which close it.
"""

from __future__ import annotations

from trainmedic_server.adapters.nvml_gpus import NvmlGpus
from trainmedic_server.adapters.time_limited_gpus import TimeLimitedCalls, TimeLimitedGpus


def node_gpus() -> TimeLimitedGpus:
    """Build the adapter; the driver is opened by the first call."""
    calls = TimeLimitedCalls()
    return TimeLimitedGpus(NvmlGpus(calls=calls), calls)
