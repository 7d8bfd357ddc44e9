"""What is called at which point of an iteration of a Megatron-LM training.

An iteration is reported when its ``train_step`` has returned, and commands are carried out in
``checkpoint_and_decide_exit``, which Megatron-LM calls last in each iteration, on every rank. Not here: going back
(``loop``).
"""

from __future__ import annotations

from typing import Any, Callable, Mapping

import torch
import torch.distributed as dist

from trainmedic.client import Medic
from trainmedic.errors import Rejected
from trainmedic.job.command import JobCommand
from trainmedic.job.progress import CHECKPOINT, EVALUATION
from trainmedic.megatron import checkpoints
from trainmedic.megatron.loop import MegatronLoop
from trainmedic.recovery.health import health_now
from trainmedic.recovery.loop_restart import LoopEnds
from trainmedic.torch.learning_rate import MARK
from trainmedic.trainer.callback import log_errors
from trainmedic.trainer.self_saving import SelfSavingCallback

_FIXED = "--micro-batch-size, --global-batch-size and --num-workers of Megatron-LM"


class MegatronCallback(SelfSavingCallback[MegatronLoop]):
    """Carries out commands between two iterations. ``megatron`` is the module ``megatron.training.training``."""

    def __init__(self, medic: Medic, megatron: Any) -> None:
        super().__init__(medic, "trainmedic.megatron.protect", _FIXED)
        self._megatron = megatron
        self._decide_exit: Callable[..., bool] = megatron.checkpoint_and_decide_exit
        self._step: Callable[..., Any] = megatron.train_step
        self._save: Callable[..., Any] = megatron.save_checkpoint_and_time
        self._evaluate: Callable[..., Any] = megatron.evaluate_and_print_results
        self._result: Any = None  # of the last ``train_step``
        self._consumed = 0
        self._state: dict[str, Any] = {}  # what Megatron-LM's functions that save are given
        self._has_begun = False
        medic.on("job.checkpoint")(self._checkpoint)

    def begin(self, models: Any, optimizer: Any, scheduler: Any) -> None:
        """The training begins, before its first iteration in this process; every rank calls it once."""
        if self._has_begun:
            return
        self._has_begun = True
        args, loop = self._megatron.get_args(), self._required_loop
        for group in optimizer.param_groups:
            group.pop(MARK, None)  # the schedule has set the rate of a loaded state, and not scaled
        loop.begin(models if isinstance(models, list) else [models])
        self.attach(loop)  # it is known by now what can be carried out
        directory = loop.directories[0]
        start = checkpoints.path_of(directory, args.iteration) if args.iteration else None
        self._training_begins(optimizer, scheduler, directory, start, self.medic.rank == 0)
        self._consumed = args.consumed_train_samples

    def end(self) -> None:
        """The training ends, as it should or by an error: answer a change of the rate that waits."""
        self._loop_ends()

    # --- in place of Megatron-LM's functions ------------------------------------------------------------

    def train_step(self, *arguments: Any, **options: Any) -> Any:
        """In place of ``train_step``."""
        self._result = self._step(*arguments, **options)
        return self._result

    def save(self, iteration: int, *arguments: Any, **options: Any) -> Any:
        """In place of ``save_checkpoint_and_time``."""
        self._required_loop.proof.losses.log.expect_from(iteration)
        with self.medic.window(CHECKPOINT):
            result = self._save(iteration, *arguments, **options)
            self._keep(iteration)
        self._begun, self._health = iteration, health_now(self.medic.progress)
        return result

    @log_errors
    def _keep(self, iteration: int) -> None:
        self._required_loop.keep(iteration)

    def evaluate(self, *arguments: Any, **options: Any) -> Any:
        """In place of ``evaluate_and_print_results``."""
        with self.medic.window(EVALUATION):
            return self._evaluate(*arguments, **options)

    def decide_exit(self, **state: Any) -> bool:
        """In place of ``checkpoint_and_decide_exit``: whether the training ends now."""
        iteration: int = state["iteration"]
        self._report(iteration, state["optimizer"], state["opt_param_scheduler"])
        if self._decide_exit(**state):
            return True
        self._state = state
        self._note_saved()
        self._end_iteration(iteration)
        self._state = {}
        loop = self._required_loop
        if not self._stops and (loop.restarts.is_asked or loop.is_to_skip(iteration)):
            raise LoopEnds
        return self._stops

    @log_errors
    def _end_iteration(self, iteration: int) -> None:
        self._carry_out(iteration)

    # --- commands ---------------------------------------------------------------------------------------

    def _checkpoint(self, command: JobCommand | None = None) -> Mapping[str, Any]:
        megatron, state = self._megatron, self._state
        args = megatron.get_args()
        if not args.save:
            raise Rejected("there is no place for checkpoints: --save")
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
        self._note_saved()
        return {"checkpoint": f"iter_{state['iteration']:07d}", "directory": str(args.save)}

    # --- reports ----------------------------------------------------------------------------------------

    @log_errors
    def _report(self, iteration: int, optimizer: Any, scheduler: Any) -> None:
        consumed = self._megatron.get_args().consumed_train_samples
        group, loss = optimizer.param_groups[0], self._loss()
        self._required_loop.proof.losses.add(loss)
        self.medic.report(
            step=iteration,
            loss=loss,
            grad_norm=_grad_norm(self._result),
            learning_rate=group["lr"],
            expected_learning_rate=scheduler.get_lr(group) * self._live.lr_scale,
            samples=max(consumed - self._consumed, 0) or None,
        )
        self._consumed = consumed

    def _loss(self) -> Any:
        """The first of the losses that the last stage of the pipeline has, also on the rank that reports it."""
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


def _grad_norm(result: Any) -> Any:
    """The gradients' norm in what ``train_step`` returned; releases before core 0.9 return it in the third place."""
    if not isinstance(result, tuple):
        return None
    return result[5] if len(result) >= 7 else result[2] if len(result) == 4 else None
