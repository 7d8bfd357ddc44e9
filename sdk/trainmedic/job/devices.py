"""Which GPUs this process works on, by the names that NVML has for them. PyTorch is asked where the job has it.

Asking makes no CUDA context and imports nothing. Who calls it: ``client`` for the presence of a job of one
process, in the writer's thread; ``distributed`` for the naming.
"""

from __future__ import annotations

import sys
from typing import Any


def named(uuid: Any) -> str:
    """A UUID of PyTorch's as the driver writes it."""
    text = str(uuid)
    return text if text.startswith(("GPU-", "MIG-")) else f"GPU-{text}"


def in_use() -> list[str]:
    """Those on which PyTorch holds memory for this process; none before the job has begun to use CUDA.

    Not the current device: that differs between threads, and a process may spread over several.
    """
    cuda: Any = getattr(sys.modules.get("torch"), "cuda", None)
    try:
        if cuda is None or not cuda.is_initialized():
            return []
        held = [index for index in range(cuda.device_count()) if cuda.memory_reserved(index) > 0]
        return [named(cuda.get_device_properties(index).uuid) for index in held]
    except (AttributeError, RuntimeError, AssertionError):
        return []  # a PyTorch that is being imported, is too old, or has lost its GPU
