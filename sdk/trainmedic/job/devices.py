"""GPUs of this process by NVML name or PCI address. No CUDA context is created."""

from __future__ import annotations

import sys
from typing import Any, Callable, Sequence


def nvml_name(uuid: Any) -> str:
    text = str(uuid)
    return text if text.startswith(("GPU-", "MIG-")) else f"GPU-{text}"


def in_use() -> list[str]:
    # Empty also if unknown.
    return _of_devices(lambda properties: nvml_name(properties.uuid))


def pci_addresses() -> list[str]:
    """Return ``dddd:bb:dd``, as in the kernel log."""
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
        return []  # PyTorch is being imported, is too old, or has lost its GPU


def placement(node: str) -> list[dict[str, Any]]:
    """Return an entry per GPU in use of the only rank, or one without GPU."""
    gpus: Sequence[str | None] = in_use() or (None,)
    return [{"rank": 0, "node": node, "gpu": gpu} for gpu in gpus]
