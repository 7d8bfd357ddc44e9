from __future__ import annotations

from pathlib import Path
from typing import Any, Mapping

from torch.utils.data import DataLoader

from trainmedic.client import Medic
from trainmedic.deepspeed.engine_checkpoints import engine_checkpoints
from trainmedic.deepspeed.engine_parts import EngineParts
from trainmedic.deepspeed.run import EngineRun
from trainmedic.errors import ConfigurationError
from trainmedic.recovery.rollback_budget import LIMIT
from trainmedic.torch.attaching import check_options, check_positive, join_ranks, make_records
from trainmedic.torch.carried_state import CarriedState, generators_of, split_also
from trainmedic.torch.learning_rate import LearningRate
from trainmedic.torch.sources.batch_sources import REREAD
from trainmedic.torch.sources.source_choice import batch_source_for
from trainmedic.torch.state_parts import StateParts
from trainmedic.torch.training_state import TrainingState

# Methods that are called.
_CALLED = (
    *("save_checkpoint", "load_checkpoint", "gradient_accumulation_steps", "is_gradient_accumulation_boundary"),
    *("set_train_batch_size", "set_train_micro_batch_size"),
)


def attach(
    medic: Medic,
    engine: Any,
    *,
    loader: Any = None,
    checkpoints: str | Path | None = None,
    checkpoint_every: int | None = None,
    checkpoint_at_start: bool = True,
    keep: int | None = 3,
    also: Mapping[str, Any] | None = None,
    rollbacks: int | None = LIMIT,
    seed: int | None = None,
    reread: int = REREAD,
    verify: bool = True,
) -> EngineRun:
    """Carry out Trainmedic's commands in a loop around a DeepSpeed engine. Every rank calls it.

    ``engine`` is the first result of ``deepspeed.initialize``. ``loader`` defaults to the engine's
    ``training_dataloader``. ``checkpoints`` is a directory shared by all ranks; its ``latest`` names the newest
    complete one. Other arguments are those of `trainmedic.torch.attach`. Raises ConfigurationError.
    """
    check_positive(checkpoint_every=checkpoint_every, keep=keep)
    check_options(checkpoints, checkpoint_every, also, rollbacks, seed, reread)
    _check_engine(engine)
    if checkpoints is not None:
        _check_checkpoints(engine)
    if also is not None and "model" in also:
        raise ConfigurationError("also: the name model is taken")
    more, named = split_also(also or {})
    parts = EngineParts(engine, **more)
    join_ranks(medic)
    storage = None if checkpoints is None else engine_checkpoints(checkpoints, keep, medic, engine)
    loader = loader if loader is not None else getattr(engine, "training_dataloader", None)
    source = None if loader is None else batch_source_for(_as_pytorch_loader(loader), seed, medic.rank, reread)
    budget, changes = make_records(medic, storage, rollbacks)
    rate = LearningRate(engine.optimizer, engine.lr_scheduler)
    accumulation = int(engine.gradient_accumulation_steps())
    training = TrainingState(medic, parts, rate, source, storage, budget, changes, accumulation)
    # An interrupted step leaves data in the engine's buffers, which only the engine can clear.
    training.is_interruptible = False
    training.verifies = verify
    training.carried = CarriedState(StateParts(model=engine.module, **more), named, generators_of(loader))
    training.carried.record_start()
    training.global_step = int(engine.global_steps)
    return EngineRun(training, engine, checkpoint_every, checkpoint_at_start and checkpoint_every is not None)


def _check_engine(engine: Any) -> None:
    # Ask the class: an engine forwards attributes of its model.
    missing = [name for name in _CALLED if not hasattr(type(engine), name)]
    if missing:
        raise ConfigurationError(
            f"engine: a {type(engine).__name__} has no {missing[0]}(); give the first result of deepspeed.initialize()"
        )
    if hasattr(type(engine), "train_batch"):
        raise ConfigurationError(
            "engine: a PipelineEngine draws its batches by itself, in train_batch(), and cannot be attached; "
            "call medic.report() and medic.commands() around train_batch() instead"
        )
    if getattr(engine, "optimizer", None) is None or not hasattr(engine.optimizer, "param_groups"):
        raise ConfigurationError("engine: it has no optimizer; give deepspeed.initialize() one")


def _check_checkpoints(engine: Any) -> None:
    reasons = {
        "checkpoint.use_node_local_storage": "use_node_local_storage",
        "checkpoint.load_universal": "load_universal_checkpoint",
        "zero_optimization.offload_optimizer.device: nvme": "zero_nvme_offload_optimizer",
    }
    for setting, name in reasons.items():
        if hasattr(type(engine), name) and getattr(engine, name)():
            raise ConfigurationError(
                f"checkpoints: with {setting} in DeepSpeed's configuration they cannot be kept here; switch it off, "
                "or attach without checkpoints"
            )
    decoupled = getattr(engine.checkpoint_engine, "is_decoupled", None)
    if decoupled is not None and decoupled():
        raise ConfigurationError(
            "checkpoints: DeepSpeed's configuration has them written in the background (checkpoint.writer), so that "
            "it is unknown when one is complete; switch that off, or attach without checkpoints"
        )


def _as_pytorch_loader(loader: Any) -> Any:
    """Return DeepSpeed's loader as PyTorch's, unless it changes batches."""
    kind = type(loader)
    if kind.__name__ != "DeepSpeedDataLoader" or not kind.__module__.startswith("deepspeed"):
        return loader
    if loader.curriculum_learning_enabled or loader.post_process_func is not None:
        return loader
    return DataLoader(
        loader.dataset,
        batch_size=loader.batch_size,
        sampler=loader.data_sampler,
        num_workers=loader.num_local_io_workers,
        collate_fn=loader.collate_fn,
        pin_memory=loader.pin_memory,
        drop_last=loader.dataloader_drop_last,
    )
