"""Trainmedic for the Lightning Trainer.

- `fit` fits a model, and carries out everything that Lightning permits, rollbacks included.
- `Callback` alone carries out what needs no restart.

This package needs lightning (or pytorch-lightning) and torch.
"""

from __future__ import annotations

from typing import Any

from torch.utils.data import DataLoader, IterableDataset

from trainmedic.client import Medic, connect
from trainmedic.lightning.callback import Callback
from trainmedic.lightning.loop import LightningLoop
from trainmedic.lightning.resumable_loader import ResumableLoader
from trainmedic.recovery.restarts import RestartLimits as Limits

__all__ = ["Callback", "Limits", "fit"]

_DEFAULT = Limits()


def fit(
    trainer: Any,
    model: Any,
    train_dataloaders: Any = None,
    *,
    job: str | None = None,
    medic: Medic | None = None,
    ckpt_path: Any = None,
    limits: Limits = _DEFAULT,
    **options: Any,
) -> None:
    """Instead of ``trainer.fit()``: fit, starting again where a command or a crash makes it necessary.

    ``job`` is the name that alerts call the job by; ``medic`` a connection that you made, and close, yourself.
    A `DataLoader` given here goes back to its place with a checkpoint, in jobs of one rank; else that is as
    Lightning has it. Further ``options`` go to ``trainer.fit``. Raises what Lightning raises, when it has done
    so too often.
    """
    present = next((each for each in trainer.callbacks if isinstance(each, Callback)), None)
    own = None
    if present is None and medic is None:
        own = connect(job, rank=trainer.global_rank, world_size=trainer.world_size)
    callback = present or Callback(medic or own)
    loader = _resumable(trainer, train_dataloaders)
    loop = LightningLoop(trainer, callback.medic, limits, loader)
    if present is None:
        # Lightning keeps the callbacks that write checkpoints last. Ours comes before, as it may have to prevent that.
        trainer.callbacks.insert(len(trainer.callbacks) - len(trainer.checkpoint_callbacks), callback)
    callback.attach(loop)

    def call(path: Any) -> None:
        trainer.fit(model, loader or train_dataloaders, ckpt_path=path, **options)

    try:
        loop.fit(call, ckpt_path)
    finally:
        callback.attach(None)
        if present is None:
            trainer.callbacks.remove(callback)
        if own is not None:
            own.close()


def _resumable(trainer: Any, loader: Any) -> ResumableLoader | None:
    if trainer.world_size > 1 or not isinstance(loader, DataLoader) or isinstance(loader.dataset, IterableDataset):
        return None
    return ResumableLoader(loader, trainer.accumulate_grad_batches)
