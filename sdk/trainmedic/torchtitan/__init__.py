"""Trainmedic in a training by torchtitan's ``Trainer``::

    from torchtitan.train import main

    medic = trainmedic.connect(job="llm-1")
    trainmedic.torchtitan.protect(medic)
    main()

torchtitan is imported when `protect` is called.
"""

from __future__ import annotations

import functools
import importlib
from typing import Any, Mapping

from trainmedic.client import Medic
from trainmedic.errors import ConfigurationError
from trainmedic.recovery.rollback_budget import LIMIT
from trainmedic.torchtitan.training import TitanTraining
from trainmedic.trainer.carried_files import CarriedFiles

__all__ = ["protect"]

MODULE = "torchtitan.trainer"
_REPLACED = ("train", "train_step", "should_continue_training", "batch_generator")
_MARK = "is_protected_by_trainmedic"


def protect(
    medic: Medic, *, rollbacks: int | None = LIMIT, also: Mapping[str, Any] | None = None, trainer: Any = None
) -> None:
    """Carry out Trainmedic's commands in later trainings. Every rank calls it before ``Trainer.train()``.

    ``rollbacks`` limits those without further progress; None for any number. ``also`` is as for
    `trainmedic.torch.attach`. ``trainer`` is the class, if not ``torchtitan.trainer.Trainer`` or if a subclass has its
    own ``train``. Raises ConfigurationError if methods are missing in it, or ``also`` cannot be stored.
    """
    kind: Any = _trainer_class() if trainer is None else trainer
    missing = [name for name in _REPLACED if not callable(getattr(kind, name, None))]
    if missing:
        raise ConfigurationError(f"{kind.__name__} has no {missing[0]}(): this release of torchtitan is not supported")
    call = kind.train
    if hasattr(call, _MARK):
        raise ConfigurationError(f"{kind.__name__} is protected already: call protect() once in a process")

    carried = CarriedFiles(medic.rank, also)

    @functools.wraps(call)
    def train(self: Any) -> Any:
        return TitanTraining(medic, self, rollbacks, carried).train(lambda: call(self))

    setattr(train, _MARK, True)
    kind.train = train


def _trainer_class() -> Any:
    try:
        return importlib.import_module(MODULE).Trainer
    except ModuleNotFoundError as error:
        if error.name not in ("torchtitan", MODULE):
            raise
        raise ConfigurationError(
            f"there is no {MODULE}: install torchtitan 0.3, or give protect() the class of the trainer"
        ) from error
