"""The reference model of TRL's trainers, where it follows the model that is trained (``sync_ref_model``).

The Trainer does not save it. After a rollback it would be one that has followed the abandoned model. So rank 0 keeps
its weights in each checkpoint, in ``trainmedic-reference.pt``; a reference model that stays as it is needs no copy.
`HuggingFaceFramework` calls this.
"""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import torch

from trainmedic.recovery.checkpoints import write_durably

_FILE = "trainmedic-reference.pt"
_SHARDED = "the reference model follows the trained one (sync_ref_model), in shards that no checkpoint holds"


class ReferenceModel:
    """The reference model of ``trainer``, on one rank."""

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer

    @property
    def no_rollback_because(self) -> str:
        """Why it cannot follow a rollback; empty where it can, or where there is none."""
        is_sharded = self._trainer.is_deepspeed_enabled or self._trainer.is_fsdp_enabled
        return _SHARDED if self._follows and is_sharded else ""

    def save(self, checkpoint: Path) -> None:
        """Keep its weights in the checkpoint, on the rank that writes. Raises OSError."""
        if self._follows and self._trainer.args.should_save:
            content = io.BytesIO()
            torch.save(self._trainer.ref_model.state_dict(), content)
            write_durably(checkpoint / _FILE, content.getvalue())

    def is_in(self, checkpoint: Path) -> bool:
        """Return whether the checkpoint has all that `restore` needs."""
        return not self._follows or (checkpoint / _FILE).is_file()

    def restore(self, checkpoint: Path) -> None:
        """Load its weights from the checkpoint, on every rank. Raises OSError, and what torch raises."""
        if self._follows:
            weights = torch.load(checkpoint / _FILE, map_location="cpu", weights_only=True)
            self._trainer.ref_model.load_state_dict(weights)

    @property
    def _follows(self) -> bool:
        is_followed = getattr(self._trainer.args, "sync_ref_model", False)
        return bool(is_followed) and isinstance(getattr(self._trainer, "ref_model", None), torch.nn.Module)
