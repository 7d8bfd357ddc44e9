"""States and seeds of random generators: Python, NumPy if loaded, PyTorch on the CPU and, once in use, GPUs."""

from __future__ import annotations

import random
import sys
from contextlib import contextmanager
from typing import Any, Iterator, Mapping

import torch

_64_BITS = (1 << 64) - 1


def capture() -> dict[str, Any]:
    state: dict[str, Any] = {"python": random.getstate(), "torch": torch.get_rng_state()}
    numpy = _numpy()
    if numpy is not None:
        name, keys, *rest = numpy.random.get_state()
        state["numpy"] = (str(name), keys.tolist(), *rest)
    if torch.cuda.is_available() and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        state["cuda"] = torch.cuda.get_rng_state_all()
    return state


def restore(state: Mapping[str, Any]) -> None:
    """Restore `capture`'s output for generators in use."""
    version, internal, gauss = state["python"]
    random.setstate((version, tuple(internal), gauss))
    torch.set_rng_state(state["torch"])
    numpy = _numpy()
    if numpy is not None and "numpy" in state:
        name, keys, *rest = state["numpy"]
        numpy.random.set_state((name, numpy.array(keys, dtype=numpy.uint32), *rest))
    held = state.get("cuda", [])
    if held and torch.cuda.is_available() and len(held) <= torch.cuda.device_count():
        for device, device_state in enumerate(held):
            torch.cuda.set_rng_state(device_state, device)


def seed(value: int) -> None:
    """Seed the CPU generators, in a worker process or `preserved`."""
    random.seed(value)
    torch.default_generator.manual_seed(value)
    numpy = _numpy()
    if numpy is not None:
        numpy.random.seed(value & 0xFFFFFFFF)


def has_moved(state: Mapping[str, Any]) -> bool:
    """Return whether CPU generators were used since."""
    present = capture()
    return (
        not torch.equal(state["torch"], present["torch"])
        or state["python"] != present["python"]
        or state.get("numpy") != present.get("numpy")
    )


@contextmanager
def preserved() -> Iterator[None]:
    # Restores only the CPU generators; a GPU's stay where the block has left them.
    python, cpu, numpy = random.getstate(), torch.get_rng_state(), _numpy()
    state = numpy.random.get_state() if numpy is not None else None
    try:
        yield
    finally:
        random.setstate(python)
        torch.set_rng_state(cpu)
        if numpy is not None:
            numpy.random.set_state(state)


def mixed_seed(*numbers: int) -> int:
    """Hash numbers to a 63-bit seed."""
    # SplitMix64's finalizer (Steele et al., 2014).
    value = 0
    for number in numbers:
        value = (value + (number & _64_BITS) + 0x9E3779B97F4A7C15) & _64_BITS
        value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _64_BITS
        value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _64_BITS
        value ^= value >> 31
    return value >> 1


def _numpy() -> Any:
    return sys.modules.get("numpy")
