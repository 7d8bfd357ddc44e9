"""Per-rank files in a framework's checkpoints with state that Megatron-LM and torchtitan do not save."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any, Mapping, Sequence

import torch
from torch import nn

from trainmedic.errors import described
from trainmedic.torch import randomness
from trainmedic.torch.carried_state import CarriedState, all_as_values, generators_of
from trainmedic.torch.checkpoints.checkpoint_files import add_file
from trainmedic.torch.state_parts import StateParts

log = logging.getLogger("trainmedic")

_FILE = "trainmedic-carried-{rank:05d}.pt"
_FORMAT = 1  # of the file; one of another format is not restored


class CarriedFiles:
    """Carried state of this rank, with random numbers."""

    def __init__(self, rank: int, also: Mapping[str, Any] | None) -> None:
        self._file = _FILE.format(rank=rank)
        self._named = all_as_values(also or {})
        self._carried = CarriedState(named=self._named)

    def begin(self, models: Sequence[nn.Module], loader: Any = None) -> None:
        parts = StateParts(model=[_without_wrappers(model) for model in models])
        self._carried = CarriedState(parts, self._named, generators_of(loader))
        self._carried.record_start()

    def save(self, checkpoint: Path) -> None:
        held = {"format": _FORMAT, "carried": self._carried.take(), "random": randomness.capture()}
        add_file(checkpoint / self._file, held)

    def restore(self, checkpoint: Path, with_random: bool = True) -> Mapping[str, Any]:
        """Restore `save`'s state, else the modules' initial state; return ``verified.carried``."""
        held, why = self._read(checkpoint)
        try:
            comparison = self._carried.put_back({} if held is None else held["carried"])
            if held is not None and with_random:
                randomness.restore(held["random"])
        except Exception as error:  # user functions may raise anything; the answer reports it
            log.exception("%s: cannot restore carried state", checkpoint)
            return {"compared": 1, "agreed": 0, "different": described(error)}
        if held is None and self._carried.take():
            return {"compared": 0, "agreed": 0, "why": why}
        return comparison

    def _read(self, checkpoint: Path) -> tuple[Mapping[str, Any] | None, str]:
        """Return the content, or None and why."""
        try:
            held = torch.load(checkpoint / self._file, map_location="cpu", weights_only=True)
        except FileNotFoundError:
            return None, "the checkpoint holds none"
        except Exception as error:  # torch raises many types for damaged files
            log.warning("%s cannot be read: %s", checkpoint / self._file, error)
            return None, f"{self._file} cannot be read"
        if held.get("format") != _FORMAT:
            return None, f"{self._file} is of another release"
        return held, ""


def _without_wrappers(model: nn.Module) -> nn.Module:
    while isinstance(inner := getattr(model, "module", None), nn.Module):
        model = inner
    return model
