"""Module state that frameworks do not load: hidden states, caches, non-persistent buffers."""

from __future__ import annotations

from typing import Any, Mapping

from torch import nn

from trainmedic.trainer.held_state import HeldState, PutBack, assigned_names

_LIBRARIES = ("lightning", "peft", "pytorch_lightning", "torch", "transformers")


class HeldModules:
    """Held state of ``model``; for library classes only buffers.

    ``batches_in_model``: the model itself may hold batches (see `HeldState.put_back`).
    """

    def __init__(self, model: nn.Module, batches_in_model: bool = False) -> None:
        self._batches_in_model = batches_in_model
        self._states = {
            name: HeldState(module, assigned_names(type(module), _LIBRARIES), _is_of_library(module))
            for name, module in model.named_modules()
            if not _is_of_library(module) or module._non_persistent_buffers_set
        }

    def record(self) -> dict[str, dict[str, Any]]:
        records = {name: state.record() for name, state in self._states.items()}
        return {name: record for name, record in records.items() if record}

    def put_back(self, records: Mapping[str, Mapping[str, Any]] | None, keeps_batches: bool = True) -> PutBack:
        """Restore the recorded attributes; reset all others."""
        changed = PutBack()
        for name, state in self._states.items():
            put_back = state.put_back((records or {}).get(name), self._keeps(name, keeps_batches))
            changed = changed.followed_by(put_back.within(name))
        return changed

    def add(self, records: Mapping[str, Mapping[str, Any]], keeps_batches: bool = True) -> PutBack:
        """Restore the recorded attributes only."""
        changed = PutBack()
        for name, record in records.items():
            if name in self._states:
                put_back = self._states[name].put_back(record, self._keeps(name, keeps_batches), only=record)
                changed = changed.followed_by(put_back.within(name))
        return changed

    def _keeps(self, name: str, keeps_batches: bool) -> bool:
        may_hold_batches = self._batches_in_model and not name
        return keeps_batches or not may_hold_batches


def _is_of_library(module: nn.Module) -> bool:
    return type(module).__module__.partition(".")[0] in _LIBRARIES
