"""The GPUs of this node as every part of the agent uses them: NVML, with a time limit on each call.

Who calls it: ``agent_check`` and ``gpu_health``, which only read, ``agent`` and ``agent_release``, which set limits.
They close what they get.
"""

from __future__ import annotations

from trainmedic_agent.adapters.nvml_gpus import NvmlGpus
from trainmedic_agent.adapters.time_limited_gpus import TimeLimitedCalls, TimeLimitedGpus
from trainmedic_agent.exclusive_gpus import ExclusiveGpus


def node_gpus() -> TimeLimitedGpus:
    """Build the adapter; the driver is opened by the first call."""
    calls = TimeLimitedCalls()
    return TimeLimitedGpus(NvmlGpus(calls=calls), calls)


def own_gpus() -> ExclusiveGpus:
    """Build the same for the one agent that may set their limits. Raises ConfigurationError where another has some."""
    gpus = ExclusiveGpus(node_gpus())
    try:
        gpus.claim()
    except BaseException:
        gpus.close()
        raise
    return gpus
