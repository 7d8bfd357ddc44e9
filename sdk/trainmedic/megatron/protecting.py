"""`protect`, which puts Trainmedic around the functions of Megatron-LM that run a training.

Not here: what they do then (``callback``, ``loop``).
"""

from __future__ import annotations

import functools
import importlib
import inspect
from typing import Any, Mapping

from trainmedic.client import Medic
from trainmedic.errors import ConfigurationError
from trainmedic.megatron.callback import MegatronCallback
from trainmedic.megatron.loop import MegatronLoop
from trainmedic.recovery.restarts import RestartLimits
from trainmedic.recovery.rollback_budget import LIMIT
from trainmedic.trainer.carried_files import CarriedFiles

MODULE = "megatron.training.training"
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
    """Let Trainmedic's commands be carried out in the training that ``pretrain()`` runs afterwards.

    Every rank calls it before ``pretrain()``. ``rollbacks`` is how often training may go back without getting further,
    None for any number. ``also`` names state of the script that goes back, too, as for `trainmedic.torch.attach`.
    ``module`` is Megatron-LM's ``megatron.training.training``, where it has another name.

    Raises ConfigurationError where that has not the functions that it is to have, or ``also`` cannot be kept.
    """
    megatron: Any = importlib.import_module(MODULE) if module is None else module
    missing = [name for name in (*_REPLACED, *_CALLED) if not hasattr(megatron, name)]
    if missing:
        raise ConfigurationError(
            f"{megatron.__name__} has no {missing[0]}: this release of Megatron-LM is not one that Trainmedic knows"
        )
    if hasattr(megatron.train, "__wrapped__"):
        raise ConfigurationError(f"{megatron.__name__} is protected already: call protect() once in a process")
    # In a job of several ranks a crash is left to the launcher anyway; with a single rank it is, too.
    limits = RestartLimits(retries=0, delay=0.0, rollbacks=rollbacks)
    loop = MegatronLoop(medic, megatron, limits, CarriedFiles(medic.rank, also))
    callback = MegatronCallback(medic, megatron)
    callback.attach(loop)
    call, decide = megatron.train, megatron.checkpoint_and_decide_exit
    parameters, decides_on = inspect.signature(call), inspect.signature(decide)

    @functools.wraps(call)
    def train(*arguments: Any, **options: Any) -> Any:
        named = dict(parameters.bind(*arguments, **options).arguments)
        callback.begin(named["model"], named["optimizer"], named["opt_param_scheduler"])
        try:
            return loop.train(call, named)
        finally:
            callback.end()

    @functools.wraps(decide)
    def checkpoint_and_decide_exit(*arguments: Any, **options: Any) -> bool:
        return callback.decide_exit(**decides_on.bind(*arguments, **options).arguments)

    megatron.train = train
    megatron.checkpoint_and_decide_exit = checkpoint_and_decide_exit
    megatron.train_step = callback.train_step
    megatron.save_checkpoint_and_time = callback.save
    megatron.evaluate_and_print_results = callback.evaluate
    megatron.build_train_valid_test_data_iterators = loop.build_data
