"""Frozen parameters, such as a LoRA base model, stored once and hard-linked for all checkpoints."""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
from pathlib import Path
from typing import Any, Callable, Mapping

import torch

from trainmedic.torch.checkpoints.digests import digests_of, earlier_digests_of, place_of
from trainmedic.torch.state_parts import StateParts
from trainmedic.torch.tensor_names import plain_name

log = logging.getLogger("trainmedic")

REFERENCE = ".frozen"  # key of the frozen parameters' digest and names in ``training.pt``
_LEAST_SIZE = 1 << 20  # bytes; a smaller file is no gain
Names = Mapping[str, list[str]]  # names of parameters by part


class FrozenBase:
    def __init__(self) -> None:
        self._digest = ""  # of the first checkpoint; "" before
        self._has_changed = False

    def split(self, parts: StateParts, states: Mapping[str, Any], run: Mapping[str, Any]) -> Split:
        """Separate frozen parameters, until one has changed. `run` is the content of the checkpoint's run state."""
        names = {} if self._has_changed else _frozen_names(parts, states)
        if not names:
            return Split(states)
        digest = _digest(names, states, run.get("digests"))
        if self._digest not in ("", digest):
            log.warning("parameters that require no gradient have changed; from now on each checkpoint holds them")
            self._has_changed = True
            return Split(states)
        self._digest = digest
        trained = dict(states)
        frozen = {}
        for part, members in names.items():
            trained[part] = states[part].copy()
            frozen[part] = {name: trained[part].pop(name) for name in members}
        return Split({**trained, REFERENCE: {"digest": digest, "names": names}}, frozen, digest)


class Split:
    """Content of ``training.pt`` and of a file next to it."""

    def __init__(self, trained: Mapping[str, Any], frozen: Mapping[str, Any] | None = None, digest: str = "") -> None:
        self.trained = trained
        self.frozen = frozen  # None without a separate file
        self.file = f"frozen-{digest}.pt"

    def link(self, directory: Path) -> bool:
        """Hard-link another checkpoint's file; return False without one."""
        for other in sorted(directory.parent.glob(f"step-*/{self.file}"), reverse=True):
            with contextlib.suppress(OSError):
                os.link(other, directory / self.file)
                return True
        return False


def frozen_file_of(states: Mapping[str, Any]) -> str:
    return f"frozen-{states[REFERENCE]['digest']}.pt" if REFERENCE in states else ""


def join(states: dict[str, Any], frozen: Mapping[str, Any]) -> None:
    del states[REFERENCE]
    for part, members in frozen.items():
        states[part].update(members)


def identical_present_base(parts: StateParts, states: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """Return copies of the present frozen parameters; None if they differ."""
    names: Names = states[REFERENCE]["names"]
    present = {part: parts.by_name[part].state_dict() for part in names if part in parts.by_name}
    if any(part not in present or not set(members) <= present[part].keys() for part, members in names.items()):
        return None
    # An earlier release computed other digests.
    if all(
        _digest(names, present, None, make) != states[REFERENCE]["digest"] for make in (digests_of, earlier_digests_of)
    ):
        return None
    return {part: {name: present[part][name].detach().clone() for name in members} for part, members in names.items()}


def _frozen_names(parts: StateParts, states: Mapping[str, Any]) -> Names:
    names: dict[str, list[str]] = {}
    size = 0
    for part, module in parts.modules().items():
        if part.partition(".")[0] != "model":
            continue
        # Under all names: a tied parameter's other name would else stay in each checkpoint.
        for name, parameter in module.named_parameters(remove_duplicate=False):
            held = states[part].get(name)
            if parameter.requires_grad or not isinstance(held, torch.Tensor) or parameter.is_meta:
                continue
            if (held.shape, held.dtype) == (parameter.shape, parameter.dtype) and held.layout == torch.strided:
                names.setdefault(part, []).append(name)
                size += held.numel() * held.element_size()
    return names if size >= _LEAST_SIZE else {}


def _digest(
    names: Names,
    states: Mapping[str, Any],
    known_digests: Mapping[str, str] | None,
    make: Callable[[Mapping[str, torch.Tensor]], Mapping[str, str]] = digests_of,
) -> str:
    tensors = {f"{part}.{plain_name(name)}": states[part][name] for part, members in names.items() for name in members}
    # Digests have only the first name of a tied parameter.
    first_names: dict[Any, str] = {}
    first_name_of = {name: first_names.setdefault(place_of(tensor), name) for name, tensor in tensors.items()}
    digests = known_digests
    if digests is None or not digests.keys() >= set(first_names.values()):
        digests = make({name: tensors[name] for name in first_names.values()})
    # A tensor whose values cannot be read has no digest.
    facts = [
        (name, tuple(tensor.shape), digests.get(first_name_of[name], "")) for name, tensor in sorted(tensors.items())
    ]
    return hashlib.sha256(repr(facts).encode()).hexdigest()[:16]
