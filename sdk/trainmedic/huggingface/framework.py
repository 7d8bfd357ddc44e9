from __future__ import annotations

from pathlib import Path
from typing import Any, Callable, Mapping, Sequence

from transformers.trainer_utils import get_last_checkpoint

from trainmedic.client import Medic
from trainmedic.errors import Rejected
from trainmedic.huggingface import checkpoints
from trainmedic.huggingface.batches import LoadedBatches, UsedBatches, batches_per_sampling
from trainmedic.huggingface.other_models import SYNCHRONIZED, ReferenceModel, RolloutEngine
from trainmedic.huggingface.trainer_state import TrainerState
from trainmedic.job.command import JobCommand
from trainmedic.job.parameters import ScaleBatch
from trainmedic.recovery.changes import agreed_workers
from trainmedic.recovery.checkpoints import SavedCheckpoint, write_rank_record
from trainmedic.recovery.health import problem
from trainmedic.recovery.loop_restart import LoopRestart
from trainmedic.recovery.restarts import RestartLimits
from trainmedic.torch.checkpoints.digests import Modules, Optimizers
from trainmedic.torch.sources.batch_sources import NOT_REPLAYED, REPLAYED
from trainmedic.trainer.framework import Framework
from trainmedic.trainer.held_state import PutBack
from trainmedic.trainer.loop import TrainerLoop

_MODEL_ONLY = "the Trainer saves the model alone (save_only_model), and cannot resume from that"
_NO_PLACE = "with ignore_data_skip the Trainer does not know which batches to leave out"
_BEGINS_ANEW = f"{NOT_REPLAYED}: with ignore_data_skip the Trainer restarts its data"
_OTHER_BATCHES = "the same samples come in other batches: a command has changed their size since"
_SAMPLED_ELSEWHERE = f"{NOT_REPLAYED}: a rollout engine samples them, and keeps the random numbers for it"
_SAMPLED = f"{NOT_REPLAYED}: the model samples new ones"
_UNTIL_SAMPLED = f"{REPLAYED}, until the model samples the next ones"
_SHARDED = "DeepSpeed or FSDP keeps the parameters in shards of its own"
_BATCH = "per_device_train_batch_size"
_ACCUMULATION = "gradient_accumulation_steps"
_WORKERS = "dataloader_num_workers"
_ROUNDING = 1 + 1e-9  # so that a third of a batch, times three, is the batch again


class HuggingFaceFramework(Framework):
    def __init__(self, trainer: Any, medic: Medic, limits: RestartLimits) -> None:
        self.writes = trainer.args.should_save
        self.loop = TrainerLoop(medic, self, limits)
        self._medic = medic
        self._trainer = trainer
        if trainer.args.save_only_model:
            self.no_restart_because = _MODEL_ONLY
        if trainer.args.ignore_data_skip:
            self.no_skip_because = _NO_PLACE
        if trainer.is_deepspeed_enabled or trainer.is_fsdp_enabled:
            self.loop.proof.not_comparable = _SHARDED
        self._used = UsedBatches(trainer, self.loop.proof)  # replaced for each loop, as `_loaded` is
        self._has_sampled = False  # the model sampled batches before the last restart
        self._loaded = LoadedBatches(trainer, 0, self._used)
        self._engine = RolloutEngine(trainer)
        self._reference = ReferenceModel(trainer)
        self.no_restart_because = (
            self.no_restart_because or self._engine.no_rollback_because or self._reference.no_rollback_because
        )
        self._held = TrainerState(trainer)
        self._put_back = PutBack()  # state restored by the last restart
        self._skipped_before = 0  # batches skipped before the checkpoint from which the loop started
        self._in_force: set[str] = set()  # IDs of the commands that changed arguments in this process
        _ = self.loop.budget  # raises ValueError now rather than during the training

    def train(self, original: Callable[..., Any], resume: Any, *arguments: Any, **options: Any) -> Any:
        def attempt(restart: LoopRestart | None) -> Any:
            start = self._first_checkpoint(resume) if restart is None else str(self.loop.prepare(restart))
            if not start:
                self.loop.start_fresh()
            self._skipped_before = checkpoints.skipped_batches(start) if start else 0
            skip = self._skipped_before + (restart.skip_batches if restart else 0)
            self._begin_proof(start, restart)
            why_not = "" if self.data == REPLAYED else self.data
            self._has_sampled |= self._used.makes_batches
            used = self._used = UsedBatches(self._trainer, self.loop.proof, why_not)
            loaded = self._loaded = LoadedBatches(self._trainer, skip, used, lambda: self.loop.meter)
            engine = self._engine.updating(restart is not None)
            with self.loop.attempting(), used.reporting(), loaded.skipping(), engine:
                return original(start, *arguments, **options)

        return self.loop.restarts.run(attempt)

    def _begin_proof(self, start: Any, restart: LoopRestart | None) -> None:
        self.loop.record = checkpoints.rank_record(start, self._trainer.args.process_index) if start else None
        if restart is None:
            self.loop.proof.restore_batches(self.loop.record)
        elif _BATCH in restart.settings:
            self.loop.proof.forget_batches(_OTHER_BATCHES)
        else:
            self.loop.proof.expect_return(self.loop.record, lambda: self.newly_skipped)

    def _first_checkpoint(self, resume: Any) -> Any:
        if resume is True:
            return get_last_checkpoint(self._trainer.args.output_dir) or resume
        return resume or None

    def prepare(self, checkpoint: Path, restart: LoopRestart) -> None:
        args = self._trainer.args
        for name, value in restart.settings.items():
            setattr(args, name, value)
        if _BATCH in restart.settings:
            self._trainer._train_batch_size = args.train_batch_size  # the Trainer's own copy
        self._reference.restore(checkpoint)
        keeps_batches = not restart.skip_batches and _BATCH not in restart.settings
        self._put_back = self._held.restore(checkpoint, self._medic.group("held"), keeps_batches)

    @property
    def directories(self) -> list[Path]:
        return [Path(self._trainer.args.output_dir)]

    def all_checkpoints(self) -> list[SavedCheckpoint]:
        return checkpoints.in_directory(self._trainer.args.output_dir, self._trainer.args.world_size)

    def is_complete(self, checkpoint: Path) -> bool:
        is_complete = checkpoints.is_complete(checkpoint, self._trainer.args.world_size)
        return is_complete and self._reference.is_in(checkpoint)

    def step_of(self, checkpoint: Path) -> int:
        return checkpoints.step_of(checkpoint)

    def restart_order(self, present: Sequence[SavedCheckpoint]) -> list[SavedCheckpoint]:
        complete = [checkpoint for checkpoint in reversed(present) if checkpoint.complete]
        return sorted(complete, key=lambda checkpoint: bool(problem(checkpoint.health)))

    def round_up_skip(self, batches: int) -> int:
        # Loading must stay in step with sampling.
        per_sampling = batches_per_sampling(self._trainer) or 1
        return -(-batches // per_sampling) * per_sampling

    @property
    def newly_skipped(self) -> int:
        return max(self.skipped_batches - self._skipped_before, 0)

    @property
    def accumulation(self) -> int:
        return int(getattr(self._trainer.args, _ACCUMULATION))

    @property
    def data(self) -> str:
        if self._trainer.args.ignore_data_skip:
            return _BEGINS_ANEW
        return _SAMPLED_ELSEWHERE if self._engine.samples else REPLAYED

    @property
    def _data_after_first_step(self) -> str:
        # Only a step shows whether the model samples its batches.
        if self.data != REPLAYED or not (self._has_sampled or self._used.makes_batches):
            return self.data
        return _SAMPLED if self._used.makes_batches else _UNTIL_SAMPLED

    def outcome(self, restart: LoopRestart) -> Mapping[str, Any]:
        command = restart.command
        if command is not None and restart.settings:
            self._in_force ^= {command.undo_of or command.id}  # an undo removes its command
        engine = {"rollout_engine": SYNCHRONIZED} if self._engine.samples else {}
        held = {"trainer_state": self._put_back.to_json()} if self._put_back.reset else {}
        data = {"data": self._data_after_first_step} if restart.is_rollback else {}
        return {**data, **engine, **held}

    def save_records(self, checkpoint: Path, modules: Modules, optimizers: Optimizers) -> None:
        """Store this rank's data for comparison; rank 0 adds digests of the weights. Raises OSError."""
        proof, step = self.loop.proof, self.step_of(checkpoint)
        record = proof.record(step, modules, optimizers) if self.writes else proof.rank_record(step, optimizers)
        write_rank_record(checkpoint, self._trainer.args.process_index, record)
        self._held.save(checkpoint)
        self._reference.save(checkpoint)

    @property
    def skipped_batches(self) -> int:
        return self._loaded.skipped

    @property
    def passes_over_epoch(self) -> bool:
        return self._loaded.is_passed_over

    def is_in_force(self, command_id: str) -> bool:
        return command_id in self._in_force

    def scale_batch(self, command: JobCommand, here: Path) -> bool:
        """Request a restart from ``here``; False if refused. Raises Rejected."""
        scale, args = command.parameters, self._trainer.args
        assert isinstance(scale, ScaleBatch)
        if not scale.keep_global_batch:
            raise Rejected("the Trainer finds its place in the data by the global batch, so that has to stay")
        if batches_per_sampling(self._trainer) is not None:
            raise Rejected("the Trainer plans the sampling of its completions by the batch size, so that has to stay")
        if args.auto_find_batch_size:
            raise Rejected("the Trainer was told to find its batch size by itself (auto_find_batch_size)")
        batch, accumulation = split(getattr(args, _BATCH), getattr(args, _ACCUMULATION), scale.factor)
        return self._request_restart({_BATCH: batch, _ACCUMULATION: accumulation}, command, here)

    def set_workers(self, command: JobCommand, here: Path) -> bool:
        previous = int(getattr(self._trainer.args, _WORKERS))
        count = agreed_workers(command, previous)
        settings: dict[str, Any] = {_WORKERS: count}
        if count == 0:  # torch refuses both without workers
            settings.update(dataloader_persistent_workers=False, dataloader_prefetch_factor=None)
        output = {"count": count, "previous": previous}
        return self._request_restart(settings, command, here, output)

    def _request_restart(
        self, settings: Mapping[str, Any], command: JobCommand, here: Path, output: Mapping[str, Any] | None = None
    ) -> bool:
        previous = {name: getattr(self._trainer.args, name) for name in settings}
        output = output or {**settings, "previous": previous}
        restart = LoopRestart(here, command, settings=settings, previous=previous, output=output)
        return self.loop.restarts.request(restart)


def split(batch: int, accumulation: int, factor: float) -> tuple[int, int]:
    """Return the largest micro-batch up to ``batch * factor`` that keeps ``batch * accumulation``.

    Also return its accumulation. Raises Rejected if the micro-batch is the current one.
    """
    whole = batch * accumulation
    largest = max(batch * factor * _ROUNDING, 1)
    size = max(size for size in range(1, whole + 1) if whole % size == 0 and size <= largest)
    if size == batch:
        raise Rejected(f"the micro-batch is {batch} of {whole}; there is no other that keeps the global batch")
    return size, whole // size
