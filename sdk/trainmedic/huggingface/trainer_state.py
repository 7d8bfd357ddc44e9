"""A Trainer's state outside model and optimizer, such as TRL's counters.

Unless all ranks have a copy in the checkpoint, the state is reset.
"""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any, Mapping

import torch
from transformers.trainer_callback import ExportableState, TrainerControl

from trainmedic.job.group import Group
from trainmedic.torch.checkpoints.checkpoint_files import add_file
from trainmedic.trainer.held_modules import HeldModules
from trainmedic.trainer.held_state import HeldState, PutBack, assigned_names

log = logging.getLogger("trainmedic")

_FILE = "trainmedic-held-{rank:05d}.pt"
_FORMAT = 1
_PACKAGE = ("transformers",)  # its Trainer restores the attributes that its classes assign
_ENGINE_STEP = "_last_loaded_step"  # TRL's attribute with the step of the engine's weights
_NO_STEP = -1


class TrainerState:
    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer
        self._modules = HeldModules(trainer.model)
        self._held = HeldState(trainer, assigned_names(type(trainer), _PACKAGE) | {_ENGINE_STEP})

    def save(self, checkpoint: Path) -> None:
        args = self._trainer.args
        kept = {"held": self._held.record(), "modules": self._modules.record()}
        file = checkpoint / _FILE.format(rank=args.process_index)
        add_file(file, {"format": _FORMAT, "ranks": args.world_size, **kept})

    def restore(self, checkpoint: Path, group: Group, keeps_batches: bool) -> PutBack:
        """Without ``keeps_batches``, reset held attributes except single numbers: they may hold batches."""
        kept = self._read(checkpoint)
        seen = group.poll(kept is not None)
        is_whole = all(seen.get(rank) for rank in range(group.world_size))
        held, modules = kept if kept is not None and is_whole else (None, None)
        put_back = self._held.put_back(held, keeps_batches)
        put_back = put_back.followed_by(self._modules.put_back(modules).within("model"))
        if getattr(self._trainer, "use_vllm", False) and hasattr(self._trainer, _ENGINE_STEP):
            setattr(self._trainer, _ENGINE_STEP, _NO_STEP)
        self._restore_callbacks(checkpoint)
        return put_back

    def _read(self, checkpoint: Path) -> tuple[Mapping[str, Any], Mapping[str, Any]] | None:
        args = self._trainer.args
        try:
            content = torch.load(checkpoint / _FILE.format(rank=args.process_index), weights_only=True)
            if content["format"] != _FORMAT or content["ranks"] != args.world_size:
                return None
            return content["held"], content["modules"]
        except FileNotFoundError:
            return None
        except Exception as error:  # torch raises many types for damaged files
            log.warning("%s: the held state cannot be read, and is reset: %s", checkpoint, error)
            return None

    def _restore_callbacks(self, checkpoint: Path) -> None:
        # The Trainer itself restores them only with `restore_callback_states_from_checkpoint`.
        try:
            kept = json.loads((checkpoint / "trainer_state.json").read_bytes()).get("stateful_callbacks") or {}
            for name, states in kept.items():
                present = [each for each in self._callbacks() if type(each).__name__ == name]
                for callback, state in zip(present, states if isinstance(states, list) else [states], strict=False):
                    vars(callback).update(state.get("attributes") or {})
        except FileNotFoundError:
            return
        except (OSError, ValueError, TypeError, AttributeError) as error:
            log.warning("%s: the callbacks' state is not restored: %s", checkpoint / "trainer_state.json", error)

    def _callbacks(self) -> list[Any]:
        callbacks = self._trainer.callback_handler.callbacks
        return [
            each for each in callbacks if isinstance(each, ExportableState) and not isinstance(each, TrainerControl)
        ]
