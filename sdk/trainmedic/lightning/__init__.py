"""Trainmedic for the Lightning Trainer.

- `fit` carries out all that Lightning permits, including rollbacks.
- `Callback` alone carries out commands without a restart.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from typing import Any, Mapping

from trainmedic.client import Medic, connect
from trainmedic.errors import ConfigurationError
from trainmedic.lightning.callback import Callback
from trainmedic.lightning.framework import LightningFramework
from trainmedic.recovery.restarts import RestartLimits as Limits
from trainmedic.trainer.patching import replaced

__all__ = ["Callback", "Limits", "fit"]

_DEFAULT = Limits()
_NOT_CONNECTED_THERE = (
    "with this strategy Lightning trains in processes of its own, where a {} of this one is not connected: give "
    "trainmedic.lightning.fit job='…', and other arguments of trainmedic.connect as connection={{…}}"
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
    """Fit like ``trainer.fit()``; restart after commands and crashes that need it.

    Arguments and ``options`` are those of ``trainer.fit``. ``job`` is the name in alerts; ``connection`` has more
    arguments of `trainmedic.connect`. A given ``medic`` stays open. Raises ConfigurationError, and Lightning's error
    after too many failures.
    """
    if hasattr(train_dataloaders, "train_dataloader"):  # Lightning accepts a data module here
        train_dataloaders, datamodule = None, train_dataloaders
    loaders = {"train": train_dataloaders, "val": val_dataloaders}
    own_fit = _Fit(trainer, model, loaders, datamodule, ckpt_path, options, job, medic, limits, connection or {})
    if not _starts_processes(trainer):
        own_fit.run()
        return
    present = _callback_of(trainer)
    if medic is not None or present is not None:
        raise ConfigurationError(_NOT_CONNECTED_THERE.format("Callback" if present is not None else "medic"))
    with replaced(trainer, _fit_impl=own_fit.run_in_process):
        trainer.fit(model)


@dataclass(frozen=True)
class _Fit:
    trainer: Any
    model: Any
    loaders: Mapping[str, Any]  # "train" and "val"; None for those that are not given
    datamodule: Any
    ckpt_path: Any
    options: Mapping[str, Any]  # of ``trainer.fit``
    job: str | None
    medic: Medic | None
    limits: Limits
    connection: Mapping[str, Any]  # arguments of `connect`

    def run_in_process(self, *_: Any) -> None:
        del self.trainer._fit_impl
        self.trainer.strategy._launcher = None  # it has done its work
        self.trainer.strategy.set_world_ranks()
        self.run()

    def run(self) -> None:
        trainer, own, callback = self.trainer, None, _callback_of(self.trainer)
        is_users_own = callback is not None
        if callback is None:
            if self.medic is None:
                ranks = {"rank": trainer.global_rank, "world_size": trainer.world_size}
                own = connect(self.job, **{**ranks, **self.connection})
            callback = Callback(self.medic or own)
        framework = LightningFramework(trainer, callback.medic, self.limits)
        if not is_users_own:
            # Before the callbacks that write checkpoints, which Lightning keeps last, to prevent that if necessary.
            trainer.callbacks.insert(len(trainer.callbacks) - len(trainer.checkpoint_callbacks), callback)
        callback.attach(framework)
        train, model = self.loaders["train"], getattr(self.model, "_orig_mod", self.model)

        def call(path: Any) -> None:
            wrapped = None if train is None else framework.resumable.wrap(train)
            trainer.fit(self.model, wrapped, self.loaders["val"], self.datamodule, path, **self.options)

        source = self.datamodule or model  # it makes the loaders if none are given
        try:
            with framework.resumable.wrapping(source) if train is None else contextlib.nullcontext():
                framework.fit(call, self.ckpt_path, model)
        finally:
            callback.attach(None)
            if not is_users_own:
                trainer.callbacks.remove(callback)
            if own is not None:
                own.close()


def _callback_of(trainer: Any) -> Callback | None:
    return next((each for each in trainer.callbacks if isinstance(each, Callback)), None)


def _starts_processes(trainer: Any) -> bool:
    return getattr(trainer.strategy.launcher, "_start_method", None) is not None
