"""State that the modules of a model carry from step to step outside their ``state_dict``: hidden states, caches.

A framework loads parameters and persistent buffers from a checkpoint. The attributes of a program's own modules, such
as the hidden state of a recurrent layer, and buffers that are not persistent stay as the abandoned course has left
them. Not here: what is data in one object (``held_state``).
"""

from __future__ import annotations

from typing import Any, Mapping

from torch import nn

from trainmedic.trainer.held_state import HeldState, PutBack, assigned_names

_LIBRARIES = ("lightning", "peft", "pytorch_lightning", "torch", "transformers")


class HeldModules:
    """The held state of ``model`` and of the modules in it.

    Of classes of a library only the buffers are data. ``batches_in_model`` says that the model itself may hold batches.
    """

    def __init__(self, model: nn.Module, batches_in_model: bool = False) -> None:
        self._batches_in_model = batches_in_model
        self._states = {
            name: HeldState(module, assigned_names(type(module), _LIBRARIES), _is_of_library(module))
            for name, module in model.named_modules()
            if not _is_of_library(module) or module._non_persistent_buffers_set
        }

    def record(self) -> dict[str, dict[str, Any]]:
        """Return what a checkpoint keeps for `put_back`, by the names of modules."""
        records = {name: state.record() for name, state in self._states.items()}
        return {name: record for name, record in records.items() if record}

    def put_back(self, records: Mapping[str, Mapping[str, Any]] | None, keeps_batches: bool = True) -> PutBack:
        """Set the state as `HeldState.put_back` does. Carried state stays valid where batches are left out."""
        changed = PutBack()
        for name, state in self._states.items():
            keeps = keeps_batches or bool(name) or not self._batches_in_model
            changed = changed.followed_by(state.put_back((records or {}).get(name), keeps).within(name))
        return changed

    def add(self, records: Mapping[str, Mapping[str, Any]], keeps_batches: bool = True) -> PutBack:
        """Set only what is recorded, after `put_back` has reset all."""
        changed = PutBack()
        for name, record in records.items():
            if name in self._states:
                keeps = keeps_batches or bool(name) or not self._batches_in_model
                put_back = self._states[name].put_back(record, keeps, only=record)
                changed = changed.followed_by(put_back.within(name))
        return changed


def _is_of_library(module: nn.Module) -> bool:
    return type(module).__module__.partition(".")[0] in _LIBRARIES
