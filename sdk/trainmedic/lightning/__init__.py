"""Trainmedic for the Lightning Trainer.

- `fit` fits a model, and carries out everything that Lightning permits, rollbacks included.
- `Callback` alone carries out what needs no restart.

This package needs lightning (or pytorch-lightning) and torch.
"""

from __future__ import annotations

import contextlib
import functools
from dataclasses import dataclass
from typing import Any, Mapping

from trainmedic.client import Medic, connect
from trainmedic.errors import ConfigurationError
from trainmedic.lightning.callback import Callback
from trainmedic.lightning.framework import LightningFramework
from trainmedic.recovery.restarts import RestartLimits as Limits

__all__ = ["Callback", "Limits", "fit"]

_DEFAULT = Limits()
_NOT_CONNECTED_THERE = (
    "with this strategy Lightning trains in processes of its own, where a {} of this one is not connected: give "
    "trainmedic.lightning.fit job='…', and what else trainmedic.connect should be told as connection={{…}}"
)


def fit(
    trainer: Any,
    model: Any,
    train_dataloaders: Any = None,
    val_dataloaders: Any = None,
    datamodule: Any = None,
    ckpt_path: Any = None,
    *,
    job: str | None = None,
    medic: Medic | None = None,
    limits: Limits = _DEFAULT,
    connection: Mapping[str, Any] | None = None,
    **options: Any,
) -> None:
    """Instead of ``trainer.fit()``: fit, starting again where a command or a crash makes it necessary.

    The first arguments, and further ``options``, are those of ``trainer.fit``. ``job`` is the name that alerts call the
    job by, and ``connection`` holds other arguments of `trainmedic.connect`; or give ``medic``, a connection that you
    made, and close, yourself. Raises ConfigurationError, and what Lightning raises, when it has done so too often.
    """
    if hasattr(train_dataloaders, "train_dataloader"):  # Lightning takes a data module in their place
        train_dataloaders, datamodule = None, train_dataloaders
    own_fit = _Fit(model, train_dataloaders, val_dataloaders, datamodule, ckpt_path, options)
    if not _starts_processes(trainer):
        _run(trainer, own_fit, limits, job, connection, medic)
        return
    present = _callback_of(trainer)
    if medic is not None or present is not None:
        raise ConfigurationError(_NOT_CONNECTED_THERE.format("Callback" if present is not None else "medic"))
    trainer._fit_impl = functools.partial(_run_in_process, trainer, own_fit, limits, job, connection)
    try:
        trainer.fit(model)
    finally:
        del trainer._fit_impl


@dataclass(frozen=True)
class _Fit:
    """What ``trainer.fit`` is called with, but for the checkpoint of a restart."""

    model: Any
    train_dataloaders: Any
    val_dataloaders: Any
    datamodule: Any
    ckpt_path: Any
    options: Mapping[str, Any]

    @property
    def source(self) -> Any:
        """The model or the data module that makes the loaders of the training, where none are given."""
        return self.datamodule or getattr(self.model, "_orig_mod", self.model)


def _run_in_process(
    trainer: Any, own_fit: _Fit, limits: Limits, job: str | None, connection: Mapping[str, Any] | None, *_: Any
) -> None:
    """Called by Lightning in each process that it has started, in place of its own fit, and with what that takes."""
    del trainer._fit_impl
    trainer.strategy._launcher = None  # it has done its work
    trainer.strategy.set_world_ranks()
    _run(trainer, own_fit, limits, job, connection, None)


def _run(
    trainer: Any,
    own_fit: _Fit,
    limits: Limits,
    job: str | None,
    connection: Mapping[str, Any] | None,
    medic: Medic | None,
) -> None:
    """As `fit`, in a process that trains."""
    present = _callback_of(trainer)
    own = None
    if present is None and medic is None:
        ranks = {"rank": trainer.global_rank, "world_size": trainer.world_size}
        own = connect(job, **{**ranks, **(connection or {})})
    callback = present or Callback(medic or own)
    framework = LightningFramework(trainer, callback.medic, limits)
    if present is None:
        # Lightning keeps the callbacks that write checkpoints last. Ours comes before, as it may have to prevent that.
        trainer.callbacks.insert(len(trainer.callbacks) - len(trainer.checkpoint_callbacks), callback)
    callback.attach(framework)
    loaders = own_fit.train_dataloaders

    def call(path: Any) -> None:
        wrapped = None if loaders is None else framework.resumable.wrap(loaders)
        trainer.fit(own_fit.model, wrapped, own_fit.val_dataloaders, own_fit.datamodule, path, **own_fit.options)

    try:
        with framework.resumable.wrapping(own_fit.source) if loaders is None else contextlib.nullcontext():
            model = getattr(own_fit.model, "_orig_mod", own_fit.model)
            framework.fit(call, own_fit.ckpt_path, model)
    finally:
        callback.attach(None)
        if present is None:
            trainer.callbacks.remove(callback)
        if own is not None:
            own.close()


def _callback_of(trainer: Any) -> Callback | None:
    return next((each for each in trainer.callbacks if isinstance(each, Callback)), None)


def _starts_processes(trainer: Any) -> bool:
    """Whether Lightning starts processes that train in place of this one, as with ``ddp_spawn``."""
    return getattr(trainer.strategy.launcher, "_start_method", None) is not None
