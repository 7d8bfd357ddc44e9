"""``trainmedic agent health``: whether every GPU of this node can be worked on.

The check that a node has to pass before it takes pods again: playbooks run it on the node as a Job. It asks
the driver alone, needs neither Redis nor a policy, and changes nothing. Who calls it: ``cli.agent``.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from trainmedic_server.adapters.nvml_gpus import NvmlGpus
from trainmedic_server.adapters.time_limited_gpus import TimeLimitedCalls, TimeLimitedGpus
from trainmedic_server.agent.facts.gpu import all_facts


@dataclass(frozen=True)
class GpuHealth:
    """One line for each GPU that answers, and one sentence for each fault; well where there is none."""

    gpus: tuple[str, ...]
    faults: tuple[str, ...]


def look(expected: int) -> GpuHealth:
    """Ask each GPU for everything that it offers; `expected` is how many there must be at least."""
    calls = TimeLimitedCalls()
    with contextlib.closing(TimeLimitedGpus(NvmlGpus(apart=calls), calls)) as gpus:
        told = all_facts(gpus)
    found = told.get("gpus") or []
    faults = [*told.get("gpu_problems", ()), *(fault for gpu in found for fault in _faults(gpu))]
    if len(found) < expected:
        faults.append(f"{len(found)} GPUs answer, and there must be {expected}")
    return GpuHealth(tuple(f"GPU {gpu['index']} {gpu['uuid']} {gpu['name']}" for gpu in found), tuple(faults))


def _faults(gpu: Mapping[str, Any]) -> Iterator[str]:
    """What of its readings means that work on it would be lost or wrong."""
    name = f"GPU {gpu['index']} ({gpu['uuid']})"
    rows, errors = gpu.get("remapped_rows") or {}, gpu.get("ecc") or {}
    if errors.get("volatile_uncorrected"):
        yield f"{name} has had {errors['volatile_uncorrected']} memory errors that ECC could not mend since its reset"
    if rows.get("has_failed"):
        yield f"{name} has no spare rows left for its broken memory: it has to be replaced"
    if rows.get("is_pending"):
        yield f"{name} has broken rows of memory, which its next reset replaces"
    for reading, why in (gpu.get("unread") or {}).items():
        yield f"{name} does not tell its {reading}: {why}"
