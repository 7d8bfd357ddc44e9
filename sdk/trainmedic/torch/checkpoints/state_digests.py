"""Digests of parameters, optimizer states and attributes.

A nonstandard optimizer's state is read from its ``state_dict``.
"""

from __future__ import annotations

from typing import Any, Mapping

import torch

from trainmedic.torch.checkpoints.digests import (
    DigestComparison,
    Digests,
    KnownDigests,
    compare,
    digests,
    digests_of,
    state_tensors,
)
from trainmedic.torch.optimizer_states import is_standard
from trainmedic.torch.state_parts import ATTRIBUTES, StateParts

_FORM = ":"
"""Separator after a nonstandard optimizer's name; ``.`` follows others."""


def digests_of_parts(parts: StateParts, cache: KnownDigests | None = None) -> dict[str, str]:
    cache = KnownDigests() if cache is None else cache
    standard = {name: part for name, part in parts.optimizers().items() if is_standard(part)}
    states = {} if len(standard) == len(parts.of_optimizers()) and not parts.has_attributes else parts.capture()
    more = digests_of(tensors_of_other_forms(parts, states), cache) if states else {}
    return {**digests(parts.modules(), standard, cache), **more}


def tensors_of_other_forms(parts: StateParts, states: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """Return tensors and numbers not stored by parameter."""
    tensors: dict[str, torch.Tensor] = {}
    for name, part in parts.of_optimizers().items():
        if not is_standard(part):
            tensors.update(state_tensors(f"{name}{_FORM}", states[name]))
    for name, held in states.get(ATTRIBUTES, {}).items():
        tensors.update(state_tensors(f"{ATTRIBUTES}.{name}", held["values"]))
        tensors.update(state_tensors(f"{ATTRIBUTES}.{name}{_FORM}", held["inner"]))
    return tensors


def compare_with(kept: Digests, parts: StateParts) -> DigestComparison:
    """Compare the loaded parts with the saved digests.

    Attributes that `StateParts.restore` omitted are ignored.
    """
    left_out = tuple(f"{ATTRIBUTES}.{name}" for name in parts.not_restored)
    kept = {name: digest for name, digest in kept.items() if not name.startswith(left_out)} if left_out else kept
    present = digests_of_parts(parts)
    return compare(
        kept, {name: digest for name, digest in present.items() if name in kept or not name.startswith(ATTRIBUTES)}
    )
