"""The node's GPUs through NVML with time limits. Callers close them."""

from __future__ import annotations

from trainmedic_agent.adapters.nvml_gpus import NvmlGpus
from trainmedic_agent.adapters.time_limited_gpus import TimeLimitedCalls, TimeLimitedGpus
from trainmedic_agent.exclusive_gpus import ExclusiveGpus


def node_gpus() -> TimeLimitedGpus:
    calls = TimeLimitedCalls()
    return TimeLimitedGpus(NvmlGpus(calls=calls), calls)


def own_gpus() -> ExclusiveGpus:
    """Return GPUs for setting limits. Raises ConfigurationError if another agent holds them."""
    calls = TimeLimitedCalls()
    gpus = ExclusiveGpus(NvmlGpus(calls=calls), calls)
    try:
        gpus.claim()
    except BaseException:
        gpus.close()
        raise
    return gpus
