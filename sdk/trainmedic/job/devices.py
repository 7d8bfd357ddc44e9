"""Which GPUs this process works on, by the names that NVML has for them.

They come from PyTorch, if the job itself has loaded it. Asking makes no CUDA context and imports nothing. Who calls it:
``client`` for the presence of a job of one process, in the writer's thread; ``trainmedic.distributed`` for the naming.
"""

from __future__ import annotations

import sys
from typing import Any, Callable, Sequence


def nvml_name(uuid: Any) -> str:
    """The name of a device as the driver writes it, from the UUID that PyTorch has for it."""
    text = str(uuid)
    return text if text.startswith(("GPU-", "MIG-")) else f"GPU-{text}"


def in_use() -> list[str]:
    """The GPUs on which PyTorch holds memory for this process; none before the job has begun to use CUDA.

    The current device would not do: it differs between threads, and a process may spread over several.
    """
    return _of_devices(lambda properties: nvml_name(properties.uuid))


def pci_addresses() -> list[str]:
    """Where the same GPUs are on the bus, as ``dddd:bb:dd``: so the kernel's log names them."""
    return _of_devices(
        lambda each: f"{each.pci_domain_id:04x}:{each.pci_bus_id:02x}:{each.pci_device_id:02x}",
    )


def _of_devices(name: Callable[[Any], str]) -> list[str]:
    cuda: Any = getattr(sys.modules.get("torch"), "cuda", None)
    try:
        if cuda is None or not cuda.is_initialized():
            return []
        indexes = [index for index in range(cuda.device_count()) if cuda.memory_reserved(index) > 0]
        return [name(cuda.get_device_properties(index)) for index in indexes]
    except (AttributeError, RuntimeError, AssertionError):
        return []  # a PyTorch that is being imported, is too old, or has lost its GPU


def placement(node: str) -> list[dict[str, Any]]:
    """Where a job of one process runs: on that node, with the devices in use."""
    gpus: Sequence[str | None] = in_use() or (None,)
    return [{"rank": 0, "node": node, "gpu": gpu} for gpu in gpus]
