"""Making a `Run` out of what the user's training loop has.

Not here: the loop itself (``run``).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Mapping

import torch

from trainmedic import distributed
from trainmedic.client import Medic
from trainmedic.errors import ConfigurationError
from trainmedic.recovery.changes import AppliedChanges
from trainmedic.recovery.rollback_budget import LIMIT, RollbackBudget
from trainmedic.torch.batch_sources import REREAD
from trainmedic.torch.checkpoint_storage import CheckpointDirectory, CheckpointStorage
from trainmedic.torch.handlers import CommandHandlers
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

    ``model``, ``optimizer``, ``scheduler``, ``scaler`` and ``ema`` are what a checkpoint holds, with whatever
    else has ``state_dict`` and ``load_state_dict`` in ``also``; each may be one object, or a list or dict of
    several. ``loader`` is where `Run.batches` come from: a ``DataLoader``, or anything that gives batches.

    ``checkpoints`` is a directory, of which the newest ``keep`` complete ones stay (None: all), or the user's
    own way, see `OwnCheckpoints`. One is written every ``checkpoint_every`` steps, and when one is ordered. With
    ``checkpoint_every`` one is also written before the first step, unless the run was resumed: so that there is
    one to go back to from the beginning. ``checkpoint_at_start=False`` saves that time.

    ``accumulation``: how many batches make an optimizer step, in a loop that heeds ``Step.is_update``. Without
    it the loop is taken not to, and cannot change how many.

    ``rollbacks`` is how often training may go back without getting further, None for any number. ``seed`` makes
    the order of the data; the default is PyTorch's own. ``reread`` is how many batches may be read again to come
    back to a place in data that cannot be gone to.

    In a job of several ranks every rank calls it, after ``torch.distributed`` was initialised and the model was
    wrapped or sharded; from there on the ranks carry out the same commands at the same steps.

    Raises ConfigurationError.
    """
    _check("checkpoint_every", checkpoint_every)
    _check("keep", keep)
    _check("accumulation", accumulation)
    if also and set(also) & {"model", "optimizer", "scheduler", "scaler", "ema"}:
        raise ConfigurationError("also: the names model, optimizer, scheduler, scaler and ema are taken")
    parts = StateParts(model=model, optimizer=optimizer, scheduler=scheduler, scaler=scaler, ema=ema, **(also or {}))
    _join(medic)
    storage = _storage(medic, parts, checkpoints, keep)
    directory = storage.directory if storage is not None else None
    writes = medic.rank == 0
    run = Run(
        medic,
        parts,
        LearningRate(optimizer, scheduler),
        None
        if loader is None
        else batch_source_for(loader, torch.initial_seed() if seed is None else seed, medic.rank, reread),
        storage,
        RollbackBudget(directory, rollbacks, writes),
        AppliedChanges(directory, writes),
        accumulation or 1,
        checkpoint_every,
        checkpoint_at_start and checkpoint_every is not None,
    )
    CommandHandlers(run, accumulation is not None).register(medic)
    return run


def _join(medic: Medic) -> None:
    """In a job of several ranks, agree with the others."""
    if medic.share is None and distributed.is_needed():
        distributed.share(medic)
    if medic.share is None and medic.world_size > 1:
        raise ConfigurationError(
            f"this is rank {medic.rank} of {medic.world_size}, and they have not found each other yet: call "
            "torch.distributed.init_process_group() before attach(); or, where each trains by itself, give each a "
            "job name of its own and connect(rank=0, world_size=1)"
        )


def _storage(
    medic: Medic, parts: StateParts, given: str | Path | CheckpointStorage | None, keep: int | None
) -> CheckpointStorage | None:
    if not isinstance(given, (str, Path)):
        return given if given is None or medic.world_size == 1 else JointOwnCheckpoints(given, medic.rank, medic.group)
    if medic.world_size == 1 and not distributed.is_started():
        return CheckpointDirectory(given, keep)
    if is_wrapped_by_fsdp1(parts):
        raise ConfigurationError(
            "checkpoints: what FullyShardedDataParallel wraps is not saved to a directory: shard it with "
            "torch.distributed.fsdp.fully_shard, or give checkpoints=OwnCheckpoints(...)"
        )
    contents: JointContents = ReplicatedContents(medic.rank)
    if is_sharded(parts):
        # PyTorch takes seconds to load what this needs; who has sharded a model has loaded most of it.
        from trainmedic.torch.sharding import ShardedContents

        contents = ShardedContents(parts)
    return JointCheckpointDirectory(given, keep, medic.rank, medic.world_size, medic.group, contents)


def _check(name: str, value: int | None) -> None:
    if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
        raise ConfigurationError(f"{name} is {value!r}; it is a whole number of 1 or more, or None")
