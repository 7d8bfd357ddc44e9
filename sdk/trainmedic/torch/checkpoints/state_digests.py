from __future__ import annotations

from typing import Any, Mapping

import torch

from trainmedic.torch.checkpoints.digests import (
    DigestComparison,
    Digests,
    compare,
    digests_of,
    state_tensors,
    tensors_of,
)
from trainmedic.torch.optimizer_states import is_standard
from trainmedic.torch.state_parts import ATTRIBUTES, StateParts

# In a digest's name, after the name of a nonstandard optimizer, or of an attribute whose inner optimizers follow.
_SEPARATOR = ":"


def tensors_of_parts(parts: StateParts) -> dict[str, torch.Tensor]:
    standard = {name: part for name, part in parts.optimizers().items() if is_standard(part)}
    is_standard_only = len(standard) == len(parts.optimizer_parts()) and parts.attributes.is_empty
    states = {} if is_standard_only else parts.capture()
    more = nonstandard_tensors(parts, states) if states else {}
    return {**dict(tensors_of(parts.modules(), standard)), **more}


def nonstandard_tensors(parts: StateParts, states: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """Return nonstandard optimizers' and attributes' tensors by digest name."""
    tensors: dict[str, torch.Tensor] = {}
    for name, part in parts.optimizer_parts().items():
        if not is_standard(part):
            tensors.update(state_tensors(f"{name}{_SEPARATOR}", states[name]))
    for name, held in states.get(ATTRIBUTES, {}).items():
        tensors.update(state_tensors(f"{ATTRIBUTES}.{name}", held["values"]))
        tensors.update(state_tensors(f"{ATTRIBUTES}.{name}{_SEPARATOR}", held["inner"]))
    return tensors


def compare_with(saved: Digests, parts: StateParts) -> DigestComparison:
    """Compare the loaded parts with the saved digests. Attributes that were not saved or restored are ignored."""
    omitted = tuple(f"{ATTRIBUTES}.{name}{end}" for name in parts.attributes.not_restored for end in (".", _SEPARATOR))
    restored = {name: digest for name, digest in saved.items() if not name.startswith(omitted)}
    present = digests_of(tensors_of_parts(parts), like=restored)
    return compare(
        restored,
        {name: digest for name, digest in present.items() if name in restored or not name.startswith(ATTRIBUTES)},
    )
