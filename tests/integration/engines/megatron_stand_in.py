"""In place of ``megatron.training.training``: the functions that Trainmedic puts itself around or calls, for CPUs.

Megatron-LM itself asks for a GPU, and is in no package; the same tests run on it where
``TRAINMEDIC_TEST_MEGATRON`` names a checkout (``megatron_itself``). Here are the places where a return to a
checkpoint within a process can go wrong, as they are there: ``train`` keeps its iteration and data in local names,
expects the configuration as it was and a timer that does not run; ``load_checkpoint`` asserts that nothing was
consumed, and adds to the schedule's steps; the hooks that gather parameters can be taken away only where they are;
the loss is known on the last stage of the pipeline alone; batches follow from the samples consumed; the end of a
training is that of the process.

Not modelled: tensors that are split over tensor or pipeline ranks (each rank has the whole model), a virtual pipeline,
asynchronous saving, ramped batch sizes, CUDA graphs, reinforcement learning, and the formats of checkpoints.
"""

from __future__ import annotations

import sys
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from tests.integration.engines.carrying_model import CarryingModel

ARGS = Namespace()
_SCALE = 1e4


def get_args() -> Namespace:
    return ARGS


class _Timer:
    def __init__(self) -> None:
        self.runs = False

    def start(self, barrier: bool = False) -> None:
        assert not self.runs, "timer has already been started"
        self.runs = True

    def stop(self, barrier: bool = False) -> None:
        assert self.runs, "timer is not started"
        self.runs = False


_TIMERS: dict[str, _Timer] = {}


def get_timers() -> Any:
    return lambda name, log_level=None: _TIMERS.setdefault(name, _Timer())


class mpu:
    """The ranks as data parallel ones, or as the stages of one pipeline."""

    @staticmethod
    def get_pipeline_model_parallel_world_size() -> int:
        return dist.get_world_size() if ARGS.kind == "pipeline" else 1

    @staticmethod
    def get_pipeline_model_parallel_last_rank() -> int:
        return dist.get_world_size() - 1

    @staticmethod
    def get_pipeline_model_parallel_group() -> Any:
        return dist.group.WORLD


def _data_ranks() -> tuple[int, int]:
    return (0, 1) if ARGS.kind == "pipeline" else (dist.get_rank(), dist.get_world_size())


def get_num_microbatches() -> int:
    return int(ARGS.global_batch_size // (ARGS.micro_batch_size * _data_ranks()[1]))


class Model(CarryingModel):
    """A model chunk, with the hooks that gather its parameters."""

    def __init__(self) -> None:
        super().__init__(nn.Linear(4, 9), nn.Dropout(0.2), nn.Tanh(), nn.Linear(9, 1))
        self.remove_forward_pre_hook_handles = {"hook": True}


def should_disable_forward_pre_hook(args: Namespace) -> bool:
    return bool(args.overlap_param_gather)


def disable_forward_pre_hook(model_chunks: list[Model], optimizer: Any = None, param_sync: bool = True) -> None:
    for chunk in model_chunks:
        del chunk.remove_forward_pre_hook_handles["hook"]


def enable_forward_pre_hook(model_chunks: list[Model]) -> None:
    for chunk in model_chunks:
        assert not chunk.remove_forward_pre_hook_handles
        chunk.remove_forward_pre_hook_handles["hook"] = True


class Scheduler:
    """A warmup and a linear decay, by samples."""

    def __init__(self, optimizer: Any) -> None:
        self.optimizer = optimizer
        self.num_steps = 0
        self.step(0)

    def get_lr(self, group: Any) -> float:
        return 0.01 * min(self.num_steps / 160, 1.0) * max(1 - self.num_steps / 1e6, 0.0)

    def step(self, increment: int) -> None:
        self.num_steps += increment
        for group in self.optimizer.param_groups:
            group["lr"] = self.get_lr(group)

    def state_dict(self) -> dict[str, Any]:
        return {"num_steps": self.num_steps}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.step(increment=state["num_steps"])


def build_train_valid_test_data_iterators(provider: Any) -> tuple[Any, Any, Any]:
    rows = provider(ARGS.train_iters * ARGS.global_batch_size)
    torch.rand(1)  # as loaders do when they begin
    rank, size = _data_ranks()

    def batches(consumed: int) -> Any:
        for start in range(consumed, len(rows), ARGS.micro_batch_size * size):
            own = start + rank * ARGS.micro_batch_size
            yield rows[own : own + ARGS.micro_batch_size]

    assert len(rows) > ARGS.consumed_train_samples
    return batches(ARGS.consumed_train_samples), batches(0), batches(0)


def train_step(
    forward_step_func: Any, data_iterator: Any, model: Any, optimizer: Any, opt_param_scheduler: Any, config: Any
) -> Any:
    optimizer.zero_grad()
    losses = []
    for _ in range(get_num_microbatches()):
        loss = forward_step_func(next(data_iterator), model[0])
        (loss / get_num_microbatches()).backward()
        losses.append(loss.detach())
    for parameter in model[0].parameters():
        dist.all_reduce(parameter.grad)
        parameter.grad /= dist.get_world_size()
    norm = nn.utils.clip_grad_norm_(model[0].parameters(), 1.0)
    optimizer.step()
    opt_param_scheduler.step(increment=ARGS.global_batch_size)
    is_last = ARGS.kind != "pipeline" or dist.get_rank() == dist.get_world_size() - 1
    loss_dict = {"lm loss": torch.stack(losses).mean()} if is_last else {}
    return loss_dict, 0, False, False, 0, norm.item(), 0, None


def _path(iteration: int) -> Path:
    return Path(ARGS.save) / f"iter_{iteration:07d}"


def save_checkpoint_and_time(
    iteration: int,
    model: Any,
    optimizer: Any,
    opt_param_scheduler: Any,
    num_floating_point_operations_so_far: float,
    checkpointing_context: Any,
    non_persistent_ckpt: bool = False,
    train_data_iterator: Any = None,
) -> None:
    get_timers()("interval-time").stop()
    path = _path(iteration)
    path.mkdir(parents=True, exist_ok=True)
    state = {
        "args": vars(ARGS),
        "model": model[0].state_dict(),
        "optimizer": optimizer.state_dict(),
        "opt_param_scheduler": opt_param_scheduler.state_dict(),
        "rng": torch.get_rng_state(),
        "flops": num_floating_point_operations_so_far,
    }
    torch.save(state, path / f"mp_rank_{dist.get_rank():02d}.pt")
    dist.barrier()
    if dist.get_rank() == 0:
        (Path(ARGS.save) / "latest_checkpointed_iteration.txt").write_text(str(iteration))
    dist.barrier()
    get_timers()("interval-time").start(barrier=True)


def maybe_finalize_async_save(blocking: bool = False, terminate: bool = False) -> None:
    pass


def load_checkpoint(
    model: Any, optimizer: Any, opt_param_scheduler: Any, checkpointing_context: Any = None
) -> tuple[int, float]:
    tracker = Path(ARGS.load) / "latest_checkpointed_iteration.txt"
    if not tracker.exists():
        return 0, 0.0
    assert ARGS.consumed_train_samples == 0
    assert ARGS.consumed_valid_samples == 0
    iteration = int(tracker.read_text())
    state = torch.load(_path(iteration) / f"mp_rank_{dist.get_rank():02d}.pt", weights_only=False)
    for name in ("consumed_train_samples", "skipped_train_samples", "consumed_valid_samples"):
        setattr(ARGS, name, state["args"][name])
    model[0].load_state_dict(state["model"])
    if not ARGS.finetune:
        optimizer.load_state_dict(state["optimizer"])
        opt_param_scheduler.load_state_dict(state["opt_param_scheduler"])
        torch.set_rng_state(state["rng"])
    return iteration, state["flops"]


def evaluate_and_print_results(model: Any) -> None:
    pass


def checkpoint_and_decide_exit(
    model: Any,
    optimizer: Any,
    opt_param_scheduler: Any,
    iteration: int,
    num_floating_point_operations_so_far: float,
    checkpointing_context: Any,
    train_data_iterator: Any,
) -> bool:
    if iteration % ARGS.save_interval == 0:
        save_checkpoint_and_time(
            iteration,
            model,
            optimizer,
            opt_param_scheduler,
            num_floating_point_operations_so_far,
            checkpointing_context,
            train_data_iterator=train_data_iterator,
        )
    return False


def train(
    forward_step_func: Any,
    model: Any,
    optimizer: Any,
    opt_param_scheduler: Any,
    train_data_iterator: Any,
    valid_data_iterator: Any,
    config: Any,
    checkpointing_context: Any,
) -> tuple[int, float]:
    iteration, flops = ARGS.iteration, ARGS.num_floating_point_operations_so_far
    assert config.no_sync_func is None
    config.no_sync_func = model[0].zero_grad
    get_timers()("interval-time", log_level=0).start(barrier=True)
    if should_disable_forward_pre_hook(ARGS):
        disable_forward_pre_hook(model, param_sync=False)
    hooked = should_exit = False
    while iteration < ARGS.train_iters:
        train_step(forward_step_func, train_data_iterator, model, optimizer, opt_param_scheduler, config)
        if should_disable_forward_pre_hook(ARGS) and not hooked:
            enable_forward_pre_hook(model)
            hooked = True
        iteration += 1
        flops += 1.0
        ARGS.consumed_train_samples += ARGS.global_batch_size
        should_exit = checkpoint_and_decide_exit(
            model, optimizer, opt_param_scheduler, iteration, flops, checkpointing_context, train_data_iterator
        )
        if should_exit:
            break
    if should_exit:
        sys.exit(0)
    get_timers()("interval-time").stop()
    return iteration, flops


def _rows(count: int) -> torch.Tensor:
    """The data: as many samples as the training is to consume. The first member of each is its number, scaled."""
    numbers = torch.arange(count, dtype=torch.float64)
    return torch.stack([numbers / _SCALE, numbers.sin(), numbers.cos(), (numbers * 3).sin()], dim=1).float()


def pretrain(note: Callable[[int], Any], **options: Any) -> None:
    """Set up the training, and run it; `note` is called with the number of the first sample of each batch."""
    vars(ARGS).update(
        {
            "iteration": 0,
            "consumed_train_samples": 0,
            "skipped_train_samples": 0,
            "consumed_valid_samples": 0,
            "num_floating_point_operations_so_far": 0.0,
            "finetune": False,
            "overlap_param_gather": True,
            "micro_batch_size": 2,
            "global_batch_size": 8,
            "dataloader_type": "single",
            **options,
        }
    )
    torch.manual_seed(3)
    model = [Model()]
    torch.manual_seed(100 + dist.get_rank())
    optimizer = torch.optim.AdamW(model[0].parameters(), lr=0.01)
    scheduler = Scheduler(optimizer)
    ARGS.iteration, ARGS.num_floating_point_operations_so_far = load_checkpoint(model, optimizer, scheduler)
    before = torch.get_rng_state()
    train_data, valid_data, _ = build_train_valid_test_data_iterators(_rows)
    torch.set_rng_state(before)  # on a GPU, dropout draws from a generator of its own
    config = Namespace(no_sync_func=None, grad_sync_func=None, param_sync_func=None)

    def forward_step(batch: Any, model: Any) -> Any:
        note(round(batch[0, 0].item() * _SCALE))
        return model(batch).square().mean() + 0.1

    train(forward_step, model, optimizer, scheduler, train_data, valid_data, config, {})
