"""`attach`, which makes a `Run` of the user's model, optimizer and loader.

Not here: the loop itself (``run``).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Mapping

from trainmedic import distributed
from trainmedic.client import Medic
from trainmedic.errors import ConfigurationError
from trainmedic.recovery.changes import AppliedChanges
from trainmedic.recovery.rollback_budget import LIMIT, RollbackBudget
from trainmedic.torch.batch_sources import REREAD
from trainmedic.torch.checkpoint_storage import CheckpointDirectory, CheckpointStorage
from trainmedic.torch.joint_checkpoints import (
    JointCheckpointDirectory,
    JointContents,
    JointOwnCheckpoints,
    ReplicatedContents,
)
from trainmedic.torch.learning_rate import LearningRate
from trainmedic.torch.run import Run
from trainmedic.torch.source_choice import batch_source_for
from trainmedic.torch.state_parts import StateParts, is_sharded, is_wrapped_by_fsdp1
from trainmedic.torch.training_state import TrainingState


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
    also: Mapping[str, Any] | None = None,
    accumulation: int | None = None,
    rollbacks: int | None = LIMIT,
    seed: int | None = None,
    reread: int = REREAD,
) -> Run:
    """Let Trainmedic's commands be carried out in a plain PyTorch loop, at its step boundaries.

    ``model``, ``optimizer``, ``scheduler``, ``scaler`` and ``ema``, each one object or a list or dict of several,
    are what a checkpoint holds, with whatever else has ``state_dict`` and ``load_state_dict`` in ``also``.
    ``loader`` is where `Run.batches` come from: a ``DataLoader``, or anything that gives batches. ``seed`` makes
    the order of its data, by default PyTorch's own; ``reread`` is how many batches may be read again to come back
    to a position in data that has no random access. ``accumulation`` is how many batches make an optimizer step in a
    loop that heeds ``Step.is_update``; without it the loop is taken not to, and cannot change how many.

    ``checkpoints`` is a directory, of which the newest ``keep`` complete ones stay (None: all), or the user's
    own way, see `OwnCheckpoints`. One is written every ``checkpoint_every`` steps, and when one is ordered; with
    ``checkpoint_every`` also before the first step, unless ``checkpoint_at_start`` is false or the run was
    resumed. ``rollbacks`` is how often training may go back without getting further, None for any number.

    Every rank of a job calls it, after ``torch.distributed`` was initialised and the model was wrapped or
    sharded. Raises ConfigurationError.
    """
    _check_positive(checkpoint_every=checkpoint_every, keep=keep, accumulation=accumulation)
    parts = _state_parts(also or {}, model=model, optimizer=optimizer, scheduler=scheduler, scaler=scaler, ema=ema)
    _join_ranks(medic)
    storage = _storage(medic, parts, checkpoints, keep)
    source = None if loader is None else batch_source_for(loader, seed, medic.rank, reread)
    budget, changes = _records(medic, storage, rollbacks)
    rate = LearningRate(optimizer, scheduler)
    training = TrainingState(medic, parts, rate, source, storage, budget, changes, accumulation or 1)
    at_start = checkpoint_at_start and checkpoint_every is not None
    return Run(training, checkpoint_every, at_start, accumulates=accumulation is not None)


def _check_positive(**options: int | None) -> None:
    for name, value in options.items():
        if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
            raise ConfigurationError(f"{name} is {value!r}; it is a whole number of 1 or more, or None")


def _state_parts(also: Mapping[str, Any], **own: Any) -> StateParts:
    if also.keys() & own.keys():
        raise ConfigurationError("also: the names model, optimizer, scheduler, scaler and ema are taken")
    return StateParts(**own, **also)


def _join_ranks(medic: Medic) -> None:
    """In a job of several ranks, agree with the others, so that all carry out the same commands at the same steps."""
    if medic.share is None and distributed.is_needed():
        distributed.share(medic)
    if medic.share is None and medic.world_size > 1:
        raise ConfigurationError(
            f"this is rank {medic.rank} of {medic.world_size}, and they have not found each other yet: call "
            "torch.distributed.init_process_group() before attach(); or, where each trains by itself, give each a "
            "job name of its own and connect(rank=0, world_size=1)"
        )


def _storage(
    medic: Medic, parts: StateParts, checkpoints: str | Path | CheckpointStorage | None, keep: int | None
) -> CheckpointStorage | None:
    if checkpoints is None:
        return None
    if not isinstance(checkpoints, (str, Path)):
        return checkpoints if medic.world_size == 1 else JointOwnCheckpoints(checkpoints, medic.rank, medic.group)
    if medic.world_size == 1 and not distributed.is_started():
        return CheckpointDirectory(checkpoints, keep)
    if is_wrapped_by_fsdp1(parts):
        raise ConfigurationError(
            "checkpoints: what FullyShardedDataParallel wraps is not saved to a directory: shard it with "
            "torch.distributed.fsdp.fully_shard, or give checkpoints=OwnCheckpoints(...)"
        )
    contents: JointContents = ReplicatedContents(medic.rank)
    if is_sharded(parts):
        # PyTorch takes seconds to load what this needs; a job with a sharded model has loaded most of it already.
        from trainmedic.torch.sharding import ShardedContents

        contents = ShardedContents(parts)
    return JointCheckpointDirectory(checkpoints, keep, medic.rank, medic.world_size, medic.group, contents)


def _records(
    medic: Medic, storage: CheckpointStorage | None, rollbacks: int | None
) -> tuple[RollbackBudget, AppliedChanges]:
    """The records of rollbacks and changes, in small files beside the checkpoints that only rank 0 writes."""
    directory = storage.directory if storage is not None else None
    writes = medic.rank == 0
    return RollbackBudget(directory, rollbacks, writes), AppliedChanges(directory, writes)
