"""`attach`, which creates a `Run`."""

from __future__ import annotations

import logging
import math
from numbers import Integral
from pathlib import Path
from typing import Any, Mapping

import torch

from trainmedic import distributed
from trainmedic.client import Medic
from trainmedic.errors import ConfigurationError
from trainmedic.recovery.changes import AppliedChanges
from trainmedic.recovery.memory_cadence import MemoryCadence
from trainmedic.recovery.rollback_budget import LIMIT, RollbackBudget
from trainmedic.torch.accelerated_steps import AcceleratedSteps
from trainmedic.torch.attach_checks import check_parts
from trainmedic.torch.carried_state import CarriedState, CarriedValue, generators_of, split_also, state_of_object
from trainmedic.torch.checkpoints.background_saves import BackgroundSaves
from trainmedic.torch.checkpoints.checkpoint_storage import CheckpointDirectory, CheckpointStorage
from trainmedic.torch.checkpoints.checkpoint_tiers import TieredCheckpoints
from trainmedic.torch.checkpoints.joint_checkpoints import (
    JointCheckpointDirectory,
    JointContents,
    JointOwnCheckpoints,
)
from trainmedic.torch.checkpoints.replicated_contents import ReplicatedContents
from trainmedic.torch.learning_rate import LearningRate
from trainmedic.torch.memory.memory_checkpoints import MemoryCheckpoints
from trainmedic.torch.memory.memory_contents import MemoryContents, WholeContents
from trainmedic.torch.memory.memory_start import Memory, MemoryStart
from trainmedic.torch.run import Run
from trainmedic.torch.sources.batch_sources import REREAD, BatchSource
from trainmedic.torch.sources.source_choice import batch_source_for, is_prepared_by_accelerate
from trainmedic.torch.state_parts import StateParts, is_sharded, is_wrapped_by_fsdp1
from trainmedic.torch.training_state import TrainingState

log = logging.getLogger("trainmedic")


def attach(
    medic: Medic,
    *,
    model: Any,
    optimizer: Any,
    scheduler: Any = None,
    scaler: Any = None,
    ema: Any = None,
    loader: Any = None,
    checkpoints: str | Path | CheckpointStorage | None = None,
    checkpoint_every: int | None = None,
    checkpoint_at_start: bool = True,
    keep: int | None = 3,
    memory: Memory | None = None,
    also: Mapping[str, Any] | None = None,
    accumulation: int | None = None,
    rollbacks: int | None = LIMIT,
    seed: int | None = None,
    reread: int = REREAD,
    accelerator: Any = None,
    verify: bool = True,
    keep_global_batch: bool | None = None,
) -> Run:
    """Carry out Trainmedic's commands at a plain PyTorch loop's step boundaries.

    Args:
        model, optimizer, scheduler, scaler, ema: Parts in a checkpoint, each one object or a list or dict.
        loader: Source of `Run.batches`: a ``DataLoader``, any other source of batches, or a function that draws one.
        checkpoints: A directory, or the user's own `OwnCheckpoints`.
        checkpoint_every: Steps between checkpoints; commands write further ones.
        checkpoint_at_start: Write one before the first step, unless the run was resumed.
        keep: Newest checkpoints that stay in the directory; None for all.
        memory: Additional checkpoints in host memory.
        also: Further state by name: objects with ``state_dict`` and ``load_state_dict``, tensors, lists and dicts that
            the loop changes in place, random generators, or two functions ``(get, set)``. Tensor attributes of modules
            are found without it.
        accumulation: Batches per step in a loop that heeds ``Step.is_update``.
        rollbacks: Most rollbacks without progress; None for no limit.
        seed: Seed for the order of the data; PyTorch's by default.
        reread: Most batches to read again to reach a position without random access.
        accelerator: Hugging Face Accelerate's: accumulation, gradient scaler and registered objects.
        verify: Compare what was loaded with what was saved, which ``load_state_dict`` must not change.
        keep_global_batch: Let ``accumulation`` compensate for another number of ranks at a resume. None: if possible;
            True: else raise TrainmedicError; False: never.

    Raises ConfigurationError.
    """
    check_positive(checkpoint_every=checkpoint_every, keep=keep, accumulation=accumulation)
    check_options(checkpoints, checkpoint_every, also, rollbacks, seed, reread, keep_global_batch)
    steps = AcceleratedSteps(accelerator, accumulation)
    scaler = scaler if scaler is not None else steps.scaler
    more, named = split_also(also or {})
    parts = _state_parts(more, model=model, optimizer=optimizer, scheduler=scheduler, scaler=scaler, ema=ema)
    named.update(_registered_with_accelerator(steps, parts))
    keeps_own = checkpoints is not None and not isinstance(checkpoints, (str, Path))
    check_parts(medic.job, parts, keeps_own, [each.get() for each in named.values()])
    join_ranks(medic)
    storage, start = _with_memory(medic, parts, _storage(medic, parts, checkpoints, keep), memory)
    source = _source(medic, storage, loader, seed, reread)
    rate, (budget, changes) = LearningRate(optimizer, scheduler), make_records(medic, storage, rollbacks)
    training = TrainingState(medic, parts, rate, source, storage, budget, changes, steps.accumulation or 1, steps)
    training.carried = CarriedState(parts, named, generators_of(loader))
    training.carried.record_start()
    training.verifies, training.keep_global_batch = verify, keep_global_batch
    return Run(training, checkpoint_every, checkpoint_at_start, steps.accumulation is not None, memory_start=start)


def _registered_with_accelerator(steps: AcceleratedSteps, parts: StateParts) -> dict[str, CarriedValue]:
    given = [id(part) for part in parts.by_name.values()]
    objects = enumerate(steps.registered)
    return {f"accelerator.{number}": state_of_object(each) for number, each in objects if id(each) not in given}


def check_positive(**options: int | None) -> None:
    for name, value in options.items():
        if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
            raise ConfigurationError(f"{name} is {value!r}; it is a whole number of 1 or more, or None")


def check_options(
    checkpoints: Any,
    checkpoint_every: int | None,
    also: Any,
    rollbacks: Any,
    seed: Any,
    reread: Any,
    keep_global_batch: Any = None,
) -> None:
    if checkpoint_every is not None and checkpoints is None:
        raise ConfigurationError(f"checkpoint_every is {checkpoint_every}, but checkpoints=... is missing")
    count, storage = "a whole number from 0 on", "the name of a directory, or OwnCheckpoints(...)"
    for name, value, is_valid, expected in (
        ("checkpoints", checkpoints, checkpoints is None or _is_storage(checkpoints), f"{storage}, or None"),
        ("also", also, also is None or isinstance(also, Mapping), "a dict of what else a checkpoint holds, or None"),
        ("rollbacks", rollbacks, rollbacks is None or _is_whole(rollbacks, 0), f"{count}, or None"),
        ("seed", seed, seed is None or _is_whole(seed), "a whole number, or None"),
        ("reread", reread, _is_whole(reread, 0), count),
        ("keep_global_batch", keep_global_batch, keep_global_batch in (None, True, False), "True, False or None"),
    ):
        if not is_valid:
            raise ConfigurationError(f"{name} is {value!r}; it is {expected}")


def _is_whole(value: Any, least: float = -math.inf) -> bool:
    return isinstance(value, Integral) and not isinstance(value, bool) and int(value) >= least


def _is_storage(value: Any) -> bool:
    if isinstance(value, (str, Path)):
        return value != ""
    return callable(getattr(value, "save", None)) and callable(getattr(value, "load", None))


def _state_parts(also: Mapping[str, Any], **own: Any) -> StateParts:
    if also.keys() & own.keys():
        raise ConfigurationError("also: the names model, optimizer, scheduler, scaler and ema are reserved")
    for name in ("model", "optimizer"):
        if own[name] is None or own[name] in ([], (), {}):
            evaluates = "; a loop that only evaluates needs connect() without attach()" if name == "optimizer" else ""
            raise ConfigurationError(f"{name} must not be {own[name]!r}: rollback needs it{evaluates}")
    return StateParts(**own, **also)


def join_ranks(medic: Medic) -> None:
    """Let all ranks act on the same commands at the same steps."""
    if medic.share is None and distributed.is_needed():
        distributed.share(medic)
    if medic.share is None and medic.world_size > 1:
        raise ConfigurationError(
            f"rank {medic.rank} of {medic.world_size} is not connected to the others: call "
            "torch.distributed.init_process_group() before attach(); or, if each rank trains alone, give each its "
            "own job name and connect(rank=0, world_size=1)"
        )


def _storage(
    medic: Medic, parts: StateParts, checkpoints: str | Path | CheckpointStorage | None, keep: int | None
) -> CheckpointStorage | None:
    if checkpoints is None:
        return None
    if not isinstance(checkpoints, (str, Path)):
        return checkpoints if medic.world_size == 1 else JointOwnCheckpoints(checkpoints, medic)
    if medic.world_size == 1 and not distributed.is_started():
        return CheckpointDirectory(checkpoints, keep)
    if is_wrapped_by_fsdp1(parts):
        raise ConfigurationError(
            "checkpoints: a directory does not support FullyShardedDataParallel: use "
            "torch.distributed.fsdp.fully_shard, or pass checkpoints=OwnCheckpoints(...)"
        )
    contents: JointContents = ReplicatedContents(medic.rank)
    if is_sharded(parts):
        # Slow to import; a job with a sharded model has loaded most of it.
        from trainmedic.torch.checkpoints.sharding import ShardedContents

        contents = ShardedContents(parts)
    return JointCheckpointDirectory(checkpoints, keep, medic, contents)


def _source(
    medic: Medic, storage: CheckpointStorage | None, loader: Any, seed: int | None, reread: int
) -> BatchSource | None:
    if loader is not None:
        if seed is None and medic.world_size > 1 and is_prepared_by_accelerate(loader):
            # Accelerate deals one order to all ranks, but their seeds may differ.
            seed = medic.group("seed").choose(torch.initial_seed)
        return batch_source_for(loader, seed, medic.rank, reread)
    if storage is not None:
        log.warning("%s: attach() got no loader; rollbacks that skip batches will be rejected", medic.job)
    return None


def _with_memory(
    medic: Medic, parts: StateParts, storage: CheckpointStorage | None, options: Memory | None
) -> tuple[CheckpointStorage | None, MemoryStart | None]:
    if options is None:
        return storage, None
    if not isinstance(options, Memory):
        raise ConfigurationError(f"memory is {options!r}; it is trainmedic.torch.Memory(...), or None")
    if storage is None:
        raise ConfigurationError("memory: in-memory checkpoints need those on disk too: pass checkpoints=...")
    if is_wrapped_by_fsdp1(parts):
        raise ConfigurationError(
            "memory: FullyShardedDataParallel is not supported: use torch.distributed.fsdp.fully_shard"
        )
    contents: MemoryContents = WholeContents()
    if is_sharded(parts):
        from trainmedic.torch.checkpoints.sharding import ShardedContents  # see above

        contents = ShardedContents(parts)
    cadence = MemoryCadence(options.every if options.every != "auto" else None, options.share, options.replica_every)
    memory = MemoryCheckpoints(medic, contents, cadence)
    start = MemoryStart(memory, options, medic.job, storage.directory)
    return TieredCheckpoints(storage, memory, _background(medic, storage, memory, options)), start


def _background(
    medic: Medic, storage: CheckpointStorage, memory: MemoryCheckpoints, options: Memory
) -> BackgroundSaves | None:
    if not options.asynchronous:
        return None
    if not isinstance(storage, CheckpointDirectory):
        raise ConfigurationError("memory: asynchronous needs a checkpoint directory, not your own functions")
    if isinstance(storage, JointCheckpointDirectory):
        storage.allow_background_writes()
    return BackgroundSaves(medic, storage, memory)


def make_records(
    medic: Medic, storage: CheckpointStorage | None, rollbacks: int | None
) -> tuple[RollbackBudget, AppliedChanges]:
    """Return the records of rollbacks and changes, which only rank 0 writes."""
    directory = storage.directory if storage is not None else None
    writes = medic.rank == 0
    return RollbackBudget(directory, rollbacks, writes), AppliedChanges(directory, writes, medic.largest_lr_scale)
