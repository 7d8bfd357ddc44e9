"""In place of ``torchtitan.trainer``: the methods that Trainmedic puts itself around or calls, for CPUs.

torchtitan needs a release of PyTorch that is often newer than the one here, and asks for a GPU. Here are the places
where a return to a checkpoint within a process can go wrong, as they are there: ``train`` loads by itself and keeps its
data iterator in a local name; the checkpoint manager takes whatever has "step-" and a number in its name for a
checkpoint, loads the weights alone of step 0, asks a checkpoint for every entry that the optimizer's groups have now,
and writes the weights alone at the last step; the schedules keep their step and not their base rates; the place in the
data is that of the loader.

Not modelled: parameters that are sharded, pipelines, CUDA graphs, validation, saving in the background, the clearing of
old checkpoints, and torchtitan's own models, logs and profiler. The same tests run with torchtitan itself where
``TRAINMEDIC_TEST_TORCHTITAN`` names the folder that it is installed in.
"""

from __future__ import annotations

import random
import re
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.optim.lr_scheduler import LambdaLR

from tests.integration.engines.carrying_model import CarryingModel

Batch = tuple[dict[str, torch.Tensor], torch.Tensor]


class Noise:
    """What makes the labels of a data set: a generator of its own."""

    def __init__(self, rank: int) -> None:
        self.generator = random.Random(rank)

    def labels(self, tokens: torch.Tensor) -> torch.Tensor:
        return tokens + 1 + self.generator.randrange(3)


class Loader:
    """Batches of two samples of four tokens that count up, for each data rank its own, and the place in them. The
    labels come from the data set's generator, whose state is not part of the place."""

    def __init__(self, rank: int, world_size: int) -> None:
        self._rank, self._world_size = rank, world_size
        self._drawn = 0
        self.dataset = Noise(rank)

    def __iter__(self) -> Iterator[Batch]:
        while True:
            first = (self._drawn * self._world_size + self._rank) * 8
            self._drawn += 1
            tokens = torch.arange(first, first + 8).reshape(2, 4)
            yield {"input": tokens}, self.dataset.labels(tokens)

    def state_dict(self) -> dict[str, Any]:
        return {f"rank_{self._rank}": self._drawn}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._drawn = state[f"rank_{self._rank}"]


class Optimizers:
    """One optimizer; in a checkpoint its state is by the parameters' names, and each entry of its group has one."""

    def __init__(self, model: nn.Module) -> None:
        self._names = [name for name, _ in model.named_parameters()]
        self._optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        for parameter in model.parameters():
            parameter.grad = torch.zeros_like(parameter)
        self._optimizer.step()  # its state is there from the beginning, with nothing in it
        for values in self._optimizer.state.values():
            values["step"].zero_()

    def __iter__(self) -> Iterator[torch.optim.Optimizer]:
        return iter([self._optimizer])

    def state_dict(self) -> dict[str, Any]:
        held = self._optimizer.state_dict()
        states = {name: held["state"][number] for number, name in enumerate(self._names)}
        group = {key: value for key, value in held["param_groups"][0].items() if key != "params"}
        return {"state": states, "group": group}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        states = {number: state["state"][name] for number, name in enumerate(self._names)}
        group = {**state["group"], "params": list(states)}
        self._optimizer.load_state_dict({"state": states, "param_groups": [group]})


class Schedulers:
    """A warmup, then a decay; only the number of the step is kept."""

    def __init__(self, optimizers: Optimizers) -> None:
        self.schedulers = [LambdaLR(each, lambda step: min((step + 1) / 4, 1 - step / 2000)) for each in optimizers]

    def __iter__(self) -> Iterator[LambdaLR]:
        return iter(self.schedulers)

    def state_dict(self) -> dict[str, Any]:
        return {"last_epoch": self.schedulers[0].last_epoch}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for scheduler in self.schedulers:
            scheduler.last_epoch = state["last_epoch"]
            scheduler._last_lr = [rate * scheduler.lr_lambdas[0](scheduler.last_epoch) for rate in scheduler.base_lrs]


class CheckpointManager:
    """Checkpoints in the format of ``torch.distributed.checkpoint``, the newest of which is loaded by default."""

    def __init__(self, options: Any, states: dict[str, Any], model: nn.Module) -> None:
        self.enable, self.load_only, self.last_save_model_only = True, False, options.last_save_model_only
        self.exclude_from_loading: list[str] = []
        self.folder, self.interval = options.folder, options.interval
        self.save_future = None
        self._states, self._model = states, model

    def load(self, step: int = -1) -> bool:
        if step == -1:
            found = [re.search(r"step-(\d+)", path.parent.name) for path in Path(self.folder).glob("*/.metadata")]
            step = max((int(match[1]) for match in found if match), default=-1)
        if step == -1:
            return False
        weights = self._model.state_dict()
        dcp.load({**weights, **(self._states if step else {})}, checkpoint_id=f"{self.folder}/step-{step}")
        self._model.load_state_dict(weights)
        return True

    def save(self, curr_step: int, last_step: bool = False) -> bool:
        if not self._should_save(curr_step, last_step):
            return False
        states = {} if last_step and self.last_save_model_only else self._states
        dcp.save({**self._model.state_dict(), **states}, checkpoint_id=f"{self.folder}/step-{curr_step}")
        return True

    def _should_save(self, curr_step: int, last_step: bool = False) -> bool:
        return last_step or curr_step % self.interval == 0

    def maybe_wait_for_staging(self) -> None:
        pass

    def maybe_wait_for_saving(self) -> None:
        pass


class Trainer:
    """Each rank has the whole model, and data of its own. ``config`` has what is read of torchtitan's."""

    def __init__(self, config: SimpleNamespace) -> None:
        self.config = config
        self.device = torch.device("cpu")
        self.parallel_dims = SimpleNamespace(pp_enabled=False, non_data_parallel_size=1)
        self.gradient_accumulation_steps = 2
        self.metrics_processor = SimpleNamespace(log=lambda *values, **more: None)
        torch.manual_seed(3)
        model = CarryingModel(nn.Linear(4, 9), nn.Tanh(), nn.Dropout(0.1), nn.Linear(9, 1))
        self.model_parts = [model]
        self.optimizers = Optimizers(model)
        self.lr_schedulers = Schedulers(self.optimizers)
        self.dataloader = Loader(dist.get_rank(), dist.get_world_size())
        self.step = 0
        states = {
            "train_state": self,
            "optimizer": self.optimizers,
            "lr_scheduler": self.lr_schedulers,
            "dataloader": self.dataloader,
        }
        self.checkpointer = CheckpointManager(config.checkpoint, states, model)

    def state_dict(self) -> dict[str, Any]:
        return {"step": self.step}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.step = state["step"]

    def batch_generator(self, data_iterable: Any) -> Iterator[Batch]:
        data_iterator = iter(data_iterable)
        while True:
            yield next(data_iterator)

    def train_step(self, data_iterator: Iterator[Batch]) -> None:
        [model], [optimizer] = self.model_parts, self.optimizers
        optimizer.zero_grad()
        total = torch.zeros(())
        for _ in range(self.gradient_accumulation_steps):
            inputs, labels = next(data_iterator)
            values = model((inputs["input"].float() / 50).sin())
            loss = (values - (labels[:, :1].float() / 50).cos()).square().mean() / self.gradient_accumulation_steps
            loss.backward()
            total += loss.detach() / dist.get_world_size()
        for parameter in model.parameters():
            dist.all_reduce(parameter.grad)
            parameter.grad /= dist.get_world_size()
        dist.all_reduce(total)
        norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        for scheduler in self.lr_schedulers:
            scheduler.step()
        self.metrics_processor.log(self.step, total.item(), total.item(), norm.item(), extra_metrics={})

    def should_continue_training(self) -> bool:
        return bool(self.step < self.config.training.steps)

    def train(self) -> None:
        self.checkpointer.load(step=self.config.checkpoint.load_step)
        data_iterator = self.batch_generator(self.dataloader)
        while self.should_continue_training():
            self.step += 1
            self.train_step(data_iterator)
            self.checkpointer.save(self.step, last_step=self.step == self.config.training.steps)
        time.sleep(0.1)  # for the other ranks

    def close(self) -> None:
        pass


def build(directory: str, steps: int) -> Trainer:
    """A trainer whose checkpoints lie in that directory."""
    folder = f"{directory}/checkpoint"
    checkpoint = SimpleNamespace(folder=folder, interval=10, load_step=-1, last_save_model_only=False)
    return Trainer(
        SimpleNamespace(
            checkpoint=checkpoint,
            dump_folder=directory,
            training=SimpleNamespace(steps=steps),
            validator=SimpleNamespace(enable=False),
        )
    )
