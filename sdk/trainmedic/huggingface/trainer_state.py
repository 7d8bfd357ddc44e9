"""What a Hugging Face Trainer holds besides its model and optimizer, and gets back in a restart.

The Trainer restores what it has itself. Trainers that are derived from it, such as TRL's, hold more: completions that
they train on several times, counters by which they decide when to generate, figures for the next log line. A model
may carry state from step to step, too. Each rank
keeps a copy in the checkpoint, in ``trainmedic-held-<rank>.pt``. A checkpoint without copies of all ranks resets these
attributes to what they were before the first step, as for a new process.

`HuggingFaceFramework` calls this. Not here: which attributes are data (``trainer.held_state``).
"""

from __future__ import annotations

import contextlib
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
_PACKAGE = ("transformers",)
_ENGINE_MARK = "_last_loaded_step"
"""Where TRL keeps the step whose weights the rollout engine has. No checkpoint knows it, for the engine runs on."""
_NO_STEP = -1


class TrainerState:
    """The held state of one Trainer, on one rank."""

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer
        self._modules = HeldModules(trainer.model)
        self._held = HeldState(trainer, assigned_names(type(trainer), _PACKAGE) | {_ENGINE_MARK})

    def save(self, checkpoint: Path) -> None:
        """Keep this rank's copies in the checkpoint. Raises OSError."""
        args = self._trainer.args
        kept = {"held": self._held.record(), "modules": self._modules.record()}
        file = checkpoint / _FILE.format(rank=args.process_index)
        add_file(file, {"format": _FORMAT, "ranks": args.world_size, **kept})

    def restore(self, checkpoint: Path, group: Group, keeps_batches: bool) -> PutBack:
        """Put back what the checkpoint has, on every rank or on none. ``keeps_batches`` as for `HeldState.put_back`."""
        kept = self._read(checkpoint)
        seen = group.poll(kept is not None)
        is_whole = all(seen.get(rank) for rank in range(group.world_size))
        held, modules = kept if kept is not None and is_whole else (None, None)
        put_back = self._held.put_back(held, keeps_batches)
        put_back = put_back.followed_by(self._modules.put_back(modules).within("model"))
        if getattr(self._trainer, "use_vllm", False) and hasattr(self._trainer, _ENGINE_MARK):
            setattr(self._trainer, _ENGINE_MARK, _NO_STEP)
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
        except Exception as error:  # of a damaged file torch raises errors of many types
            log.warning("%s: the held state cannot be read, and is reset: %s", checkpoint, error)
            return None

    def _restore_callbacks(self, checkpoint: Path) -> None:
        """Set the counters of callbacks that the Trainer keeps in its checkpoints, such as that of early stopping.

        The Trainer restores them only where a setting says so, because it takes callbacks for new in each process.
        """
        with contextlib.suppress(OSError, ValueError, AttributeError):
            kept = json.loads((checkpoint / "trainer_state.json").read_bytes()).get("stateful_callbacks") or {}
            for name, states in kept.items():
                present = [each for each in self._callbacks() if type(each).__name__ == name]
                for callback, state in zip(present, states if isinstance(states, list) else [states], strict=False):
                    vars(callback).update(state.get("attributes") or {})

    def _callbacks(self) -> list[Any]:
        callbacks = self._trainer.callback_handler.callbacks
        return [
            each for each in callbacks if isinstance(each, ExportableState) and not isinstance(each, TrainerControl)
        ]
