"""The commands of a plain PyTorch run, each carried out at a step boundary.

A handler returns what the answer tells, or raises `Rejected` or `Unsupported`; anything else that it raises
is answered ``failed``, and training goes on. Each checks before it changes anything. Not here: when they are
called (``trainmedic.Medic.commands``).
"""

from __future__ import annotations

import gc
import logging
import math
from typing import Any, Mapping

import torch

from trainmedic.client import Medic
from trainmedic.errors import Rejected
from trainmedic.job.command import JobCommand
from trainmedic.job.parameters import Accumulate, DataloaderWorkers, Pause, Rollback, ScaleBatch, ScaleLr, Stop
from trainmedic.recovery.changes import ACCUMULATION, BATCH_SIZE, LEARNING_RATE, check_workers, scaled_whole
from trainmedic.torch.learning_rate import rate_change as rates
from trainmedic.torch.rank_agreement import on_all_ranks
from trainmedic.torch.run import Run

log = logging.getLogger("trainmedic")

Output = Mapping[str, Any]

NO_CHECKPOINTS = "the run has no place for checkpoints: attach(..., checkpoints=...)"
NO_ACCUMULATION = "the loop does not say that it accumulates gradients: attach(..., accumulation=...)"
NO_BATCH_SIZE = "the batch size is not that of a plain DataLoader over an indexed data set"
NO_WORKERS = "the data do not come from a plain DataLoader over an indexed data set"
NO_ACCELERATOR = "there is no accelerator whose memory is cached"


class CommandHandlers:
    """Those of one run. ``accumulates`` says that the loop heeds ``Step.is_update``."""

    def __init__(self, run: Run, accumulates: bool) -> None:
        self._run = run
        self._accumulates = accumulates

    def register(self, medic: Medic) -> None:
        """Each that the run can carry out; of the others, why not."""
        run = self._run
        feed = run.feed
        missing = {
            "job.checkpoint": NO_CHECKPOINTS if run.storage is None else "",
            "job.rollback": NO_CHECKPOINTS if run.storage is None else "",
            "job.accumulate": "" if self._accumulates else NO_ACCUMULATION,
            "job.scale_batch": "" if feed is not None and feed.batch_size is not None else NO_BATCH_SIZE,
            "job.dataloader_workers": "" if feed is not None and feed.workers is not None else NO_WORKERS,
            "job.empty_cache": "" if _accelerator() is not None else NO_ACCELERATOR,
        }
        handlers = {
            "job.checkpoint": self.checkpoint,
            "job.rollback": self.rollback,
            "job.scale_lr": self.scale_lr,
            "job.scale_batch": self.scale_batch,
            "job.accumulate": self.accumulate,
            "job.dataloader_workers": self.dataloader_workers,
            "job.empty_cache": self.empty_cache,
            "job.pause": self.pause,
            "job.resume": self.resume,
            "job.stop": self.stop,
        }
        for action, handler in handlers.items():
            if missing.get(action):
                medic.cannot(action, missing[action])
            else:
                medic.on(action)(handler)

    def checkpoint(self, command: JobCommand) -> Output:
        run = self._run
        if run.was_interrupted:
            raise Rejected("the step hung and was interrupted; its state is not whole")
        found = run.save()
        return {"checkpoint": _name(found.path), "saved_at": found.at.isoformat()}

    def rollback(self, command: JobCommand) -> Output:
        wanted = command.parameters
        assert isinstance(wanted, Rollback)
        feed = self._run.feed
        if feed is not None and wanted.skip_batches:
            feed.check_leaving_out(wanted.skip_batches)
        return self._run.returning.roll_back(wanted, command.group)

    def scale_lr(self, command: JobCommand) -> Output:
        run, wanted = self._run, command.parameters
        assert isinstance(wanted, ScaleLr)
        factors = run.changes.with_factor(LEARNING_RATE, command.id, wanted.factor, command.undo_of)
        before, scale = run.rate.values, run.rate.scale
        try:
            on_all_ranks(command.group, lambda: run.rate.set_scale(math.prod(factors.values())))
        except Exception:
            run.rate.set_scale(scale)
            raise
        run.changes.note(LEARNING_RATE, factors)
        return rates(before, run.rate.values, run.rate.scale)

    def scale_batch(self, command: JobCommand) -> Output:
        run, wanted = self._run, command.parameters
        assert isinstance(wanted, ScaleBatch)
        feed, own = run.feed, run.own_batch_size
        assert feed is not None
        assert own is not None
        assert feed.batch_size is not None
        sizes = run.changes.with_factor(BATCH_SIZE, command.id, wanted.factor, command.undo_of)
        accumulations = run.changes.factors(ACCUMULATION)
        if command.id not in sizes:
            accumulations.pop(command.undo_of or "", None)
        elif wanted.keep_global_batch:
            if not self._accumulates:
                raise Rejected(f"the global batch cannot be kept: {NO_ACCUMULATION}")
            accumulations[command.id] = 1 / wanted.factor
        size = scaled_whole(own, sizes, "the micro-batch", round_down=not wanted.keep_global_batch)
        accumulation = scaled_whole(run.own_accumulation, accumulations, "the number of accumulation steps")
        before, accumulated = feed.batch_size, run.accumulation
        try:
            on_all_ranks(command.group, lambda: feed.set_batch_size(size))
        except Exception:  # ranks with batches of different sizes would end their epochs at different steps
            feed.set_batch_size(before)
            raise
        run.accumulation = accumulation
        run.changes.note(BATCH_SIZE, sizes)
        run.changes.note(ACCUMULATION, accumulations)
        return {
            "before": before,
            "after": size,
            "accumulation_before": accumulated,
            "accumulation_after": accumulation,
            "global_batch_before": before * accumulated * run.medic.world_size,
            "global_batch_after": size * accumulation * run.medic.world_size,
        }

    def accumulate(self, command: JobCommand) -> Output:
        run, wanted = self._run, command.parameters
        assert isinstance(wanted, Accumulate)
        factors = run.changes.with_factor(ACCUMULATION, command.id, wanted.factor, command.undo_of)
        before = run.accumulation
        run.accumulation = scaled_whole(run.own_accumulation, factors, "the number of accumulation steps")
        run.changes.note(ACCUMULATION, factors)
        return {"before": before, "after": run.accumulation}

    def dataloader_workers(self, command: JobCommand) -> Output:
        run, wanted = self._run, command.parameters
        assert isinstance(wanted, DataloaderWorkers)
        feed = run.feed
        assert feed is not None
        assert feed.workers is not None
        previous = feed.workers
        check_workers(wanted.count)
        try:
            feed.set_workers(wanted.count)
        except Exception:
            feed.set_workers(previous)
            raise
        run.changes.workers = wanted.count if wanted.count != run.own_workers else None
        run.changes.save()
        return {"previous": previous, "count": wanted.count}

    def empty_cache(self, command: JobCommand) -> Output:
        accelerator = _accelerator()
        assert accelerator is not None
        gc.collect()
        before = _cached(accelerator)
        accelerator.empty_cache()
        after = _cached(accelerator)
        return {"reserved_before": before, "reserved_after": after, "freed": before - after}

    def pause(self, command: JobCommand) -> Output:
        wanted = command.parameters
        assert isinstance(wanted, Pause)
        return self._run.pause.start(wanted.max)

    def resume(self, command: JobCommand) -> Output:
        return self._run.pause.end()

    def stop(self, command: JobCommand) -> Output:
        """It ends whether or not the checkpoint can be written."""
        run, wanted = self._run, command.parameters
        assert isinstance(wanted, Stop)
        told: dict[str, Any] = {"stopping": True}
        run.stopping = True
        run.pause.end()
        if wanted.checkpoint and run.storage is None:
            told["no_checkpoint"] = NO_CHECKPOINTS
        elif wanted.checkpoint and run.was_interrupted:
            told["no_checkpoint"] = "the step hung and was interrupted; its state is not whole"
        elif wanted.checkpoint:
            try:
                told["checkpoint"] = _name(run.save().path)
            except Exception as error:
                log.exception("%s: no checkpoint before the stop", run.medic.job)
                told["no_checkpoint"] = f"{type(error).__name__}: {error}"
        return told


def _name(path: Any) -> str:
    return str(getattr(path, "name", path))


def _accelerator() -> Any:
    """The module of the device in use whose allocator keeps freed memory."""
    if torch.cuda.is_available():
        return torch.cuda
    if hasattr(torch, "xpu") and torch.xpu.is_available():
        return torch.xpu
    return None


def _cached(accelerator: Any) -> int:
    return int(accelerator.memory_reserved())
