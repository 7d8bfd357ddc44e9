"""``trainmedic agent health``: check of every GPU by driver queries."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

from msgspec import Struct

from trainmedic_agent.facts.gpu import all_facts
from trainmedic_agent.wiring.node_gpus import node_gpus


class GpuHealth(Struct, frozen=True):
    gpus: tuple[str, ...]
    faults: tuple[str, ...]


def check(expected: int) -> GpuHealth:
    with contextlib.closing(node_gpus()) as gpus:
        facts = all_facts(gpus)
    answering = facts.get("gpus") or []
    faults = [*facts.get("gpu_problems", ()), *(fault for gpu in answering for fault in _faults(gpu))]
    if len(answering) < expected:
        faults.append(f"{len(answering)} GPUs respond, but {expected} are required")
    return GpuHealth(tuple(f"GPU {gpu['index']} {gpu['uuid']} {gpu['name']}" for gpu in answering), tuple(faults))


def _faults(gpu: Mapping[str, Any]) -> Iterator[str]:
    name = f"GPU {gpu['index']} ({gpu['uuid']})"
    rows, errors = gpu.get("remapped_rows") or {}, gpu.get("ecc") or {}
    if errors.get("volatile_uncorrected"):
        yield f"{name} has had {errors['volatile_uncorrected']} uncorrectable memory errors since its reset"
    if rows.get("has_failed"):
        yield f"{name} has no spare memory rows left: replace it"
    if (action := gpu.get("recovery_action", "none")) != "none":
        yield f"{name} needs the recovery action that its driver requests: {action}"
    if rows.get("is_pending"):
        yield f"{name} has broken memory rows: reset it to replace them"
    for reading, reason in (gpu.get("unread") or {}).items():
        yield f"{name} does not report its {reading}: {reason}"
