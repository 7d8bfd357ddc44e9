"""A Megatron-LM training, rolled back within its processes.

``train()`` keeps iteration and data in local variables. So for a rollback an exception ends it, and it is called again.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any, Callable, Mapping

import torch
import torch.distributed as dist

from trainmedic.client import Medic
from trainmedic.errors import Rejected, TrainmedicError
from trainmedic.job.command import JobCommand
from trainmedic.job.progress import CHECKPOINT, EVALUATION
from trainmedic.megatron import checkpoints
from trainmedic.recovery import skipped_data
from trainmedic.recovery.health import health_now
from trainmedic.recovery.loop_restart import LoopEnds, LoopRestart
from trainmedic.torch import randomness
from trainmedic.torch.learning_rate import MARK
from trainmedic.trainer.attachment import log_errors
from trainmedic.trainer.carried_files import CarriedFiles
from trainmedic.trainer.self_saving import SelfSavingFramework

REPLAYED = "the same batches again, by the samples consumed up to the checkpoint"

_SET_BY_TRAIN = (
    "no_sync_func",
    "grad_sync_func",
    "param_sync_func",
)  # configuration that ``train()`` sets and must find unset

# Options of the first load, such as of foreign weights, with their values for a rollback.
_OPTIONS_FOR_ROLLBACK = {
    "finetune": False,
    "no_load_optim": False,
    "no_load_rng": False,
    "ckpt_step": None,
    "override_ckpt_iteration": None,
}


class MegatronTraining(SelfSavingFramework):
    restarter = "trainmedic.megatron.protect"
    fixed_by = "--micro-batch-size, --global-batch-size and --num-workers of Megatron-LM"
    layout = checkpoints.LAYOUT
    data = REPLAYED
    newly_skipped = 0

    def __init__(self, medic: Medic, megatron: Any, rollbacks: int | None, carried: CarriedFiles) -> None:
        super().__init__(medic, rollbacks, carried)
        self._megatron = megatron
        self._build_data: Callable[[Any], Any] = megatron.build_train_valid_test_data_iterators
        self._decide_exit: Callable[..., bool] = megatron.checkpoint_and_decide_exit
        self._step: Callable[..., Any] = megatron.train_step
        self._save: Callable[..., Any] = megatron.save_checkpoint_and_time
        self.evaluate = self.in_window(EVALUATION, megatron.evaluate_and_print_results)
        self._providers: list[Any] = []  # of the data, one per call that built some
        self._result: Any = None  # of the last ``train_step``
        self._consumed = 0  # samples of all ranks, at the last report
        self._state: dict[str, Any] = {}  # arguments of Megatron-LM's functions that save, between two steps
        self._configuration: dict[str, Any] | None = None  # `_SET_BY_TRAIN` before ``train()``; None until then
        self.attachment.attach(self.loop)
        medic.on("job.checkpoint")(self.checkpoint)

    # --- replacements of Megatron-LM's functions -------------------------------------------------------------

    def build_data(self, provider: Any) -> Any:
        self._providers.append(provider)
        return self._build_data(provider)

    def train(self, call: Callable[..., Any], named: dict[str, Any]) -> Any:
        """Replace ``train()``, with its arguments ``named``."""
        if self._configuration is None:
            self._begin(named)
        self._configuration = {name: getattr(named["config"], name, None) for name in _SET_BY_TRAIN}

        def attempt(restart: LoopRestart | None) -> Any:
            if restart is not None:
                self._go_back(self.loop.prepare(restart), restart, named)
            elif self._is_to_skip(self._args.iteration):
                self._move_data(named)
            while True:
                try:
                    return call(**named)
                except LoopEnds:
                    self._clean_up_after_train(named)
                    if self.attachment.restart_is_due:
                        return None
                    self._move_data(named)

        try:
            return self.loop.restarts.run(attempt)
        finally:  # also after an error; a program may call it again with the same optimizer
            self.attachment.live.finish("training ended")

    def train_step(self, *arguments: Any, **options: Any) -> Any:
        self._result = self._step(*arguments, **options)
        return self._result

    def save(self, iteration: int, *arguments: Any, **options: Any) -> Any:
        self.loop.proof.losses.log.expect_from(iteration)
        with self.medic.window(CHECKPOINT):
            result = self._save(iteration, *arguments, **options)
            self._save_carried(iteration)
        self.save_begins(iteration, health_now(self.medic.progress))
        return result

    @log_errors
    def _save_carried(self, iteration: int) -> None:
        path = self.path_of(iteration)
        if path.is_dir():  # else it went to another place
            self.carried.save(path)

    def decide_exit(self, **state: Any) -> bool:
        """Replace ``checkpoint_and_decide_exit``: return whether ``train()`` ends."""
        iteration: int = state["iteration"]
        self._report(iteration, state["optimizer"], state["opt_param_scheduler"])
        if self._decide_exit(**state):
            return True
        self._state = state
        self.end_step(iteration)
        self._state = {}
        return self.must_end(has_to_move=self._is_to_skip(iteration))

    def _begin(self, named: Mapping[str, Any]) -> None:
        args, optimizer = self._args, named["optimizer"]
        for group in optimizer.param_groups:
            group.pop(MARK, None)  # the schedule has set the loaded state's rate, unscaled
        self.no_restart_because = _why_no_restart(args)
        self.no_skip_because = _why_no_skip(args)
        if args.save:
            self.directory.mkdir(parents=True, exist_ok=True)
        self.carried.begin(_models(named))
        if args.iteration == 0:
            self.start_fresh()
        elif args.load:
            loaded = self.layout.path_of(Path(args.load), args.iteration)
            self.restore_carried(loaded, with_random=not getattr(args, "no_load_rng", None))
        self.attachment.attach(self.loop)
        self.begins(optimizer, named["opt_param_scheduler"], args.iteration)
        self._consumed = args.consumed_train_samples

    def resume_from(self, step: int) -> None:
        checkpoints.write_tracker(self.directory, step)

    def prepare(self, checkpoint: Path, restart: LoopRestart) -> None:
        self.medic.group("put-aside").poll()  # every rank reads the tracker, which rank 0 writes in `resume_from`

    def _go_back(self, checkpoint: Path, restart: LoopRestart, named: dict[str, Any]) -> None:
        self._load(checkpoint, named)
        self.restore_carried(checkpoint)
        iterations = math.ceil(restart.skip_batches / self.accumulation)
        self.newly_skipped = iterations * self.accumulation
        self.leave_out(self._args.iteration, iterations)
        self._move_data(named)
        self.loop.begin_comparison(restart, self.step_of(checkpoint), _models(named), [named["optimizer"]])

    def _load(self, checkpoint: Path, named: Mapping[str, Any]) -> None:
        args, megatron = self._args, self._megatron
        model, optimizer, scheduler = named["model"], named["optimizer"], named["opt_param_scheduler"]
        before = {name: getattr(args, name) for name in ("load", *_OPTIONS_FOR_ROLLBACK) if hasattr(args, name)}
        vars(args).update({name: value for name, value in _OPTIONS_FOR_ROLLBACK.items() if name in before})
        args.load = args.save
        # Megatron-LM adds to the first and asserts that the others are zero, as it loads only at its start.
        scheduler.num_steps = 0
        args.consumed_train_samples = args.skipped_train_samples = args.consumed_valid_samples = 0
        overlaps = megatron.should_disable_forward_pre_hook(args)
        if overlaps:  # pending gathers would overwrite loaded weights
            megatron.disable_forward_pre_hook(model)
        try:
            loaded = megatron.load_checkpoint(
                model, optimizer, scheduler, checkpointing_context=named.get("checkpointing_context")
            )
        finally:
            vars(args).update(before)
            if overlaps:
                megatron.enable_forward_pre_hook(model)
        args.iteration, args.num_floating_point_operations_so_far = loaded
        if args.iteration != self.step_of(checkpoint):
            raise TrainmedicError(f"Megatron-LM loaded iteration {args.iteration} in place of {checkpoint.name}")

    def _move_data(self, named: dict[str, Any]) -> None:
        """Skip left-out iterations, and replace the data iterators among `train`'s arguments."""
        args = self._args
        while self._is_to_skip(args.iteration):
            stop = max(stop for start, stop in self.left_out if start <= args.iteration < stop)
            samples = (stop - args.iteration) * args.global_batch_size
            args.iteration = stop
            args.consumed_train_samples += samples
            args.skipped_train_samples += samples
        # Loaders draw random numbers when they begin; the repeated training had drawn them already.
        with randomness.preserved():
            built = [self._build_data(provider) for provider in self._providers]
        train, valid = ([iterators[index] for iterators in built] for index in (0, 1))
        several = len(built) > 1  # with a virtual pipeline, one per part of the model
        named["train_data_iterator"] = train if several else train[0]
        named["valid_data_iterator"] = valid if several else valid[0]

    def _is_to_skip(self, iteration: int) -> bool:
        return skipped_data.contains(self.left_out, iteration)

    def _clean_up_after_train(self, named: Mapping[str, Any]) -> None:
        megatron = self._megatron
        megatron.maybe_finalize_async_save(blocking=True)
        megatron.get_timers()("interval-time", log_level=0).stop()
        for name, value in (self._configuration or {}).items():
            setattr(named["config"], name, value)

    def checkpoint(self, command: JobCommand | None = None) -> Mapping[str, Any]:
        megatron, state = self._megatron, self._state
        args = megatron.get_args()
        if not args.save:
            raise Rejected("no checkpoint directory is set: --save")
        self.save(
            state["iteration"],
            state["model"],
            state["optimizer"],
            state["opt_param_scheduler"],
            state["num_floating_point_operations_so_far"],
            state["checkpointing_context"],
            train_data_iterator=state["train_data_iterator"],
        )
        megatron.maybe_finalize_async_save(blocking=True)
        self.confirm_saved()
        return {"checkpoint": self.path_of(state["iteration"]).name, "directory": str(args.save)}

    def has_saved(self, step: int) -> bool:
        return checkpoints.read_tracker(self.directory) >= step

    @property
    def directory(self) -> Path:
        return Path(self._args.save or ".")

    @property
    def accumulation(self) -> int:
        return int(self._megatron.get_num_microbatches())

    @property
    def _args(self) -> Any:
        return self._megatron.get_args()

    @log_errors
    def _report(self, iteration: int, optimizer: Any, scheduler: Any) -> None:
        consumed = self._args.consumed_train_samples
        group, loss = optimizer.param_groups[0], self._loss()
        self.loop.proof.losses.add(loss)
        self.medic.report(
            step=iteration,
            loss=loss,
            grad_norm=_grad_norm(self._result),
            learning_rate=group["lr"],
            expected_learning_rate=scheduler.get_lr(group) * self.attachment.live.lr_scale,
            samples=max(consumed - self._consumed, 0) or None,
        )
        self._consumed = consumed

    def _loss(self) -> Any:
        """Return the last pipeline stage's loss on all ranks."""
        losses = self._result[0] if self._result else {}
        loss = next(iter(losses.values()), None)
        mpu = self._megatron.mpu
        if mpu.get_pipeline_model_parallel_world_size() == 1:
            return loss
        if loss is None:
            device = "cuda" if torch.cuda.is_available() else "cpu"
            loss = torch.full((), float("nan"), device=device)
        shared: torch.Tensor = loss.detach().float().reshape(()).clone()
        source = mpu.get_pipeline_model_parallel_last_rank()
        dist.broadcast(shared, source, group=mpu.get_pipeline_model_parallel_group())
        return shared


def _models(named: Mapping[str, Any]) -> list[Any]:
    return named["model"] if isinstance(named["model"], list) else [named["model"]]


def _grad_norm(result: Any) -> Any:
    length = len(result) if isinstance(result, tuple) else 0
    if length >= 7:
        return result[5]
    return result[2] if length == 4 else None  # 4 members before core 0.9


def _why_no_restart(args: Any) -> str:
    if not args.save:
        return "there are no checkpoints: --save"
    refused = {
        **_options(args, "no_save_optim", "no_save_rng"),
        "--dataloader-type external": getattr(args, "dataloader_type", None) == "external",
        **_options(args, "profile", "log_energy", "perform_rl_step", "use_torch_fsdp2"),
        "--cuda-graph-impl": getattr(args, "cuda_graph_impl", None) not in (None, "none"),
        **_options(args, "enable_cuda_graph", "optimizer_cuda_graph"),
    }
    return _reason_of_first(refused, "with {} the training cannot be restored to an earlier state")


def _why_no_skip(args: Any) -> str:
    refused = _options(args, "rampup_batch_size", "phase_transition_iterations", "override_opt_param_scheduler")
    return _reason_of_first(refused, "with {} the schedule would not know of it; ask with skip_batches: 0")


def _options(args: Any, *names: str) -> dict[str, Any]:
    return {f"--{name.replace('_', '-')}": getattr(args, name, None) for name in names}


def _reason_of_first(refused: Mapping[str, Any], reason: str) -> str:
    return next((reason.format(option) for option, value in refused.items() if value), "")
