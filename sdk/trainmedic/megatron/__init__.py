"""Trainmedic in a training by Megatron-LM's ``pretrain()``::

    medic = trainmedic.connect(job="llm-1")
    trainmedic.megatron.protect(medic)
    pretrain(...)

`protect` wraps functions of ``megatron.training.training``. Megatron-LM is imported only by it.
"""

from __future__ import annotations

import functools
import importlib
import inspect
from typing import Any, Mapping

from trainmedic.client import Medic
from trainmedic.errors import ConfigurationError
from trainmedic.megatron.training import MegatronTraining
from trainmedic.recovery.rollback_budget import LIMIT
from trainmedic.trainer.carried_files import CarriedFiles

__all__ = ["protect"]

MODULE = "megatron.training.training"
# Functions in it.
_REPLACED = (
    *("train", "train_step", "checkpoint_and_decide_exit", "build_train_valid_test_data_iterators"),
    *("save_checkpoint_and_time", "evaluate_and_print_results"),
)
_CALLED = (
    *("get_args", "get_timers", "get_num_microbatches", "mpu"),
    *("load_checkpoint", "maybe_finalize_async_save"),
    *("should_disable_forward_pre_hook", "disable_forward_pre_hook", "enable_forward_pre_hook"),
)


def protect(
    medic: Medic, *, rollbacks: int | None = LIMIT, also: Mapping[str, Any] | None = None, module: Any = None
) -> None:
    """Carry out Trainmedic's commands in a later ``pretrain()``. Every rank calls it.

    ``rollbacks`` limits those without further progress; None for any number. ``also`` is as for
    `trainmedic.torch.attach`. ``module`` replaces ``megatron.training.training``. Raises ConfigurationError if
    functions are missing in it, or ``also`` cannot be stored.
    """
    megatron: Any = importlib.import_module(MODULE) if module is None else module
    missing = [name for name in (*_REPLACED, *_CALLED) if not hasattr(megatron, name)]
    if missing:
        raise ConfigurationError(
            f"{megatron.__name__} has no {missing[0]}: this release of Megatron-LM is not supported"
        )
    if hasattr(megatron.train, "__wrapped__"):
        raise ConfigurationError(f"{megatron.__name__} is protected already: call protect() once in a process")
    training = MegatronTraining(medic, megatron, rollbacks, CarriedFiles(medic.rank, also))
    call, decide = megatron.train, megatron.checkpoint_and_decide_exit
    parameters, decide_parameters = inspect.signature(call), inspect.signature(decide)

    @functools.wraps(call)
    def train(*arguments: Any, **options: Any) -> Any:
        return training.train(call, dict(parameters.bind(*arguments, **options).arguments))

    @functools.wraps(decide)
    def checkpoint_and_decide_exit(*arguments: Any, **options: Any) -> bool:
        return training.decide_exit(**decide_parameters.bind(*arguments, **options).arguments)

    megatron.train = train
    megatron.checkpoint_and_decide_exit = checkpoint_and_decide_exit
    megatron.train_step = training.train_step
    megatron.save_checkpoint_and_time = training.save
    megatron.evaluate_and_print_results = training.evaluate
    megatron.build_train_valid_test_data_iterators = training.build_data
