"""Carried state and random numbers of a training whose framework writes the checkpoints: a file of each rank in them.

Megatron-LM and torchtitan save what the ``state_dict`` of model, optimizer and schedule hold. The rest, which a plain
loop keeps by ``torch.carried_state``, lies beside that in ``trainmedic-carried-<rank>.pt``. Who calls it: what these
frameworks have in common (``self_saving``). Not here: which state that is.
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any, Mapping, Sequence

import torch
from torch import nn

from trainmedic.torch import randomness
from trainmedic.torch.carried_state import CarriedState, by_value, generators_of
from trainmedic.torch.checkpoints.checkpoint_files import add_file
from trainmedic.torch.state_parts import StateParts

log = logging.getLogger("trainmedic")

_FILE = "trainmedic-carried-{rank:05d}.pt"
_FORMAT = 1


class CarriedFiles:
    """The carried state of one training on one rank. ``also`` is what the user has named; raises ConfigurationError."""

    def __init__(self, rank: int, also: Mapping[str, Any] | None) -> None:
        self._file = _FILE.format(rank=rank)
        self._named = by_value(also or {})
        self._carried = CarriedState(named=self._named)

    def begin(self, models: Sequence[nn.Module], loader: Any = None) -> None:
        """Look for carried state in the models, and for generators in the data, before the first step."""
        parts = StateParts(model=[_without_wrappers(model) for model in models])
        self._carried = CarriedState(parts, self._named, generators_of(loader))
        self._carried.begin()

    def save(self, checkpoint: Path) -> None:
        """Keep the present state in a checkpoint that the framework has made or is about to write. Raises OSError."""
        held = {"format": _FORMAT, "carried": self._carried.take(), "random": randomness.capture()}
        add_file(checkpoint / self._file, held)

    def restore(self, checkpoint: Path, with_random: bool = True) -> Mapping[str, Any]:
        """Put back what `save` has kept, and return for ``verified.carried`` how it compares.

        Where a checkpoint has nothing, what modules carry is as it was at first, as in a new process.
        """
        held, why = self._read(checkpoint)
        try:
            told = self._carried.put_back({} if held is None else held["carried"])
            if held is not None and with_random:
                randomness.restore(held["random"])
        except Exception as error:  # whatever the user's functions raise: the training goes on, and the answer says it
            log.exception("%s: carried state could not be put back", checkpoint)
            return {"compared": 1, "agreed": 0, "different": f"{type(error).__name__}: {error}"}
        if held is None and self._carried.take():
            return {"compared": 0, "agreed": 0, "why": why}
        return told

    def _read(self, checkpoint: Path) -> tuple[Mapping[str, Any] | None, str]:
        """Return what the checkpoint has, or None and the reason."""
        try:
            held = torch.load(checkpoint / self._file, map_location="cpu", weights_only=True)
        except FileNotFoundError:
            return None, "the checkpoint holds none"
        except Exception as error:  # of a damaged file torch raises errors of many types
            log.warning("%s cannot be read: %s", checkpoint / self._file, error)
            return None, f"{self._file} cannot be read"
        if held.get("format") != _FORMAT:
            return None, f"{self._file} is of another release"
        return held, ""


def _without_wrappers(model: nn.Module) -> nn.Module:
    """Return the user's model. A wrapper of Megatron-LM holds it as ``module``, and buffers for gradients beside it."""
    while isinstance(inner := getattr(model, "module", None), nn.Module):
        model = inner
    return model
