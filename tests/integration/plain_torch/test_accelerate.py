"""Plain loops with Hugging Face Accelerate go back exactly, or say how far not; over a real Redis.

The loop has the shape of Accelerate's ``nlp_example.py`` and of its guide to gradient accumulation: everything is
prepared, the wrapped optimizer and scheduler are stepped at each batch, and an evaluation has a prepared loader of its
own. Not here: several ranks (``test_accelerate_ranks``).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState, PartialState
from accelerate.utils import DataLoaderConfiguration, GradientAccumulationPlugin
from torch import nn
from torch.optim import lr_scheduler
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

import trainmedic
import trainmedic.torch
from tests.integration.plain_torch.training import same
from tests.support.command_sender import Commander
from trainmedic.errors import ConfigurationError
from trainmedic.recovery.checkpoints import SavedCheckpoint
from trainmedic.torch.sources.batch_sources import REPLAYED
from trainmedic.wire.envelope import Reply

# Of torchdata's loader, which Accelerate's stateful one is made of.
pytestmark = pytest.mark.filterwarnings("ignore:'set_vital' is deprecated:UserWarning")

SAMPLES, BATCH, EPOCH = 50, 4, 13  # the last batch of an epoch is short

Acts = Mapping[int, Callable[[], Any]]


class Streamed(IterableDataset[Any]):
    """Read once an epoch, in an order of its own."""

    def __init__(self) -> None:
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[Any]:
        order = torch.randperm(SAMPLES, generator=torch.Generator().manual_seed(self.epoch))
        return iter([(torch.full((4,), float(number)), number) for number in order])


def numbered() -> Any:
    return TensorDataset(torch.arange(SAMPLES).float().repeat(4, 1).T / SAMPLES, torch.arange(SAMPLES))


class Noisy(TensorDataset):
    """Numbered samples with noise of the data set's own generator."""

    def __init__(self) -> None:
        super().__init__(*numbered().tensors)
        self.noise = torch.Generator().manual_seed(8)

    def __getitem__(self, index: int) -> Any:
        rows, number = super().__getitem__(index)
        return rows + 0.1 * torch.rand(4, generator=self.noise), number


class Average:
    """An object with a state, as scripts register it with Accelerate."""

    def __init__(self) -> None:
        self.value = 0.0

    def add(self, value: float) -> float:
        self.value += 0.1 * (value - self.value)
        return self.value

    def state_dict(self) -> dict[str, float]:
        return {"value": self.value}

    def load_state_dict(self, state: dict[str, float]) -> None:
        self.value = state["value"]


class AcceleratedLoop:
    """``seen`` are the samples of the batches that were trained on."""

    def __init__(
        self,
        commander: Commander,
        medic: trainmedic.Medic,
        directory: Path,
        data: Any = None,
        accumulation: int = 1,
        loader: Mapping[str, Any] | None = None,
        heeded: int | None = None,
        **options: Any,
    ) -> None:
        torch.set_num_threads(1)
        torch.manual_seed(3)
        self.commander, self.medic = commander, medic
        self.accelerator = Accelerator(
            cpu=True,
            gradient_accumulation_plugin=GradientAccumulationPlugin(num_steps=accumulation),
            dataloader_config=DataLoaderConfiguration(**(loader or {})),
        )
        self.average = Average()
        self.accelerator.register_for_checkpointing(self.average)
        model = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.3), nn.Linear(8, 1))
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        scheduler = lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step / 50))
        data = numbered() if data is None else data
        train = DataLoader(data, BATCH, shuffle=not isinstance(data, IterableDataset))
        self.model, self.optimizer, self.loader, self.evaluation, self.scheduler = self.accelerator.prepare(
            model, optimizer, train, DataLoader(numbered(), 16), scheduler
        )
        self.seen: list[list[int]] = []
        self.rates: dict[int, float] = {}
        self.ends: dict[int, int] = {}  # batches seen, by the step that they ended
        self.sent: list[str] = []
        settings = {"checkpoints": directory, "checkpoint_every": 5, "keep": None, **options}
        self.run = trainmedic.torch.attach(
            medic,
            accelerator=self.accelerator,
            model=self.model,
            optimizer=self.optimizer,
            scheduler=self.scheduler,
            loader=self.loader,
            accumulation=heeded,
            **settings,
        )

    def train(self, steps: int, at: Acts | None = None, short: bool = False) -> None:
        """Until so many steps are done; ``short`` is with ``step.backward`` and ``step.update``."""
        waiting = dict(at or {})
        epoch = self.run.epoch
        for rows, numbers in self.run.batches(steps=steps):
            if self.run.epoch > epoch:
                self.evaluate()
            epoch = self.run.epoch
            self.seen.append(numbers.tolist())
            with self.run.step() as step, self.accelerator.accumulate(self.model):
                loss = (self.model(rows) ** 2).mean() * (1 + self.average.value / (1 + self.average.value))
                self.average.add(loss.item())
                norm = self.update_shortly(step, loss) if short else self.update(loss)
                step.report(loss=loss, grad_norm=norm)
                if step.is_update:
                    self.rates[step.number] = self.optimizer.param_groups[0]["lr"]
                    self.ends[step.number] = len(self.seen)
                    waiting.pop(step.number, int)()

    def evaluate(self) -> None:
        """Without a trace in the random numbers, for after a rollback over an epoch's end it does not come again."""
        with torch.no_grad(), torch.random.fork_rng():
            for rows, _ in self.evaluation:
                self.accelerator.gather_for_metrics(self.model(rows))

    def update(self, loss: torch.Tensor) -> Any:
        """As Accelerate's guide has it."""
        self.accelerator.backward(loss)
        norm = None
        if self.accelerator.sync_gradients:
            norm = self.accelerator.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.scheduler.step()
        self.optimizer.zero_grad()
        return norm

    def update_shortly(self, step: trainmedic.torch.Step, loss: torch.Tensor) -> Any:
        step.backward(loss)
        return step.update(max_norm=1.0)

    def order(self, action: str, **params: Any) -> Callable[[], None]:
        return lambda: self.sent.append(self.commander.send_and_wait(self.medic, action, **params))

    def replies(self) -> list[Reply]:
        return [self.commander.final(one) for one in self.sent]

    def state(self) -> list[torch.Tensor]:
        moments = [value for held in self.optimizer.state.values() for value in held.values()]
        return [tensor.detach().clone() for tensor in (*self.model.parameters(), *moments)]


@pytest.fixture
def begin(commander: Commander, medic: trainmedic.Medic, tmp_path: Path) -> Iterator[Callable[..., AcceleratedLoop]]:
    begun: list[AcceleratedLoop] = []

    def make(directory: str = "checkpoints", **options: Any) -> AcceleratedLoop:
        for state in (AcceleratorState, GradientState, PartialState):
            state._reset_state()
        begun.append(AcceleratedLoop(commander, medic, tmp_path / directory, **options))
        return begun[-1]

    yield make
    for loop in begun:
        loop.run.close()


Begin = Callable[..., AcceleratedLoop]

VARIANTS: dict[str, Callable[[], dict[str, Any]]] = {
    "as nlp_example": dict,
    "accumulating": lambda: {"accumulation": 3},
    "with noise": lambda: {"data": Noisy()},
    "seedable": lambda: {"loader": {"use_seedable_sampler": True}, "accumulation": 2},
    "stateful": lambda: {"loader": {"use_stateful_dataloader": True}},
    "stateful, accumulating": lambda: {"loader": {"use_stateful_dataloader": True}, "accumulation": 3},
    "dispatched": lambda: {"loader": {"dispatch_batches": True}, "accumulation": 2},
    "streamed": lambda: {"data": Streamed(), "accumulation": 3},
    "streamed, stateful": lambda: {"data": Streamed(), "loader": {"use_stateful_dataloader": True}},
}


@pytest.mark.parametrize("variant", VARIANTS)
def test_training_continues_after_rollbacks_as_if_nothing_had_happened(begin: Begin, variant: str) -> None:
    """Bit for bit, within an epoch and across its end; each epoch ends where it would have."""
    calm = begin("calm", **VARIANTS[variant]())
    calm.train(40)
    shaken = begin("shaken", **VARIANTS[variant]())
    orders = {13: shaken.order("job.rollback"), 33: shaken.order("job.rollback", step=15)}
    shaken.train(40, orders)
    assert [reply.status for reply in shaken.replies()] == ["applied", "applied"], shaken.replies()
    assert all(reply.output["data"].startswith(REPLAYED) for reply in shaken.replies())
    assert same(shaken.state(), calm.state())
    assert (shaken.run.epoch, shaken.rates) == (calm.run.epoch, calm.rates)
    assert shaken.seen[-EPOCH:] == calm.seen[-EPOCH:]


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_restart_continues_where_the_job_was(begin: Begin, variant: str) -> None:
    """The next batches follow, in the middle of an epoch, and there are no extra epochs."""
    calm = begin("calm", **VARIANTS[variant]())
    calm.train(30)
    first = begin("shaken", **VARIANTS[variant]())
    first.train(22)
    first.run.close()
    again = begin("shaken", **VARIANTS[variant]())
    torch.manual_seed(77)
    assert again.run.resume() == 20
    again.train(30)
    assert (again.run.epoch, again.run.global_step) == (calm.run.epoch, calm.run.global_step)
    assert again.seen == calm.seen[-len(again.seen) :]
    assert same(again.state(), calm.state())


@pytest.mark.parametrize("variant", VARIANTS)
def test_skipped_batches_do_not_come_again(begin: Begin, variant: str) -> None:
    """The number counts batches, whatever makes a step."""
    calm = begin("calm", **VARIANTS[variant]())
    calm.train(30)
    shaken = begin("shaken", **VARIANTS[variant]())
    shaken.train(12, {7: shaken.order("job.rollback", step=5, skip_batches=2)})
    assert shaken.replies()[0].output["skipped_batches"] == 2
    place = calm.ends[5] + 2
    after = shaken.seen[calm.ends[7] :]
    if variant == "dispatched":  # the order of an epoch follows from the random numbers before it
        after = after[: -place % EPOCH]
    assert after == calm.seen[place : place + len(after)]


def test_the_last_batch_of_an_epoch_completes_a_step(begin: Begin) -> None:
    """Thirteen batches of three make five steps, as in Accelerate, and a step counts as one."""
    loop = begin(accumulation=3)
    loop.train(5)
    assert (len(loop.seen), loop.run.global_step) == (13, 5)
    assert not loop.accelerator.gradient_state.in_dataloader or loop.run.epoch == 0


def test_short_calls_do_what_the_long_ones_do(begin: Begin) -> None:
    """``step.backward`` and ``step.update`` call Accelerate's."""
    long = begin("long", accumulation=3)
    long.train(12)
    short = begin("short", accumulation=3)
    short.train(12, short=True)
    assert same(long.state(), short.state())
    assert long.rates == short.rates


def test_commands_change_rate_and_accumulation_through_accelerate(begin: Begin) -> None:
    """Its wrappers are unwrapped: the scaled schedule continues, and its accelerator counts to the new number."""
    calm = begin("calm", accumulation=3)
    calm.train(12)
    loop = begin(accumulation=3)
    orders = {4: loop.order("job.scale_lr", factor=0.5), 5: loop.order("job.accumulate", factor=2)}
    loop.train(12, orders)
    rate, accumulation = (reply.output for reply in loop.replies())
    assert rate["after"] == rate["before"] / 2
    assert (accumulation["before"], accumulation["after"]) == (3, 6)
    assert loop.rates[9] == calm.rates[9] / 2
    assert loop.accelerator.gradient_accumulation_steps == loop.run.accumulation == 6
    # Five steps of three with the short last one; from then on 13 batches make three steps.
    assert len(loop.seen) == 13 + 13 + 13 + 6


def test_the_scaler_of_mixed_precision_is_part_of_a_checkpoint(begin: Begin, tmp_path: Path) -> None:
    """It is found in the accelerator; optimizer and scheduler both skip a step that overflows."""
    loop = begin()
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**8)
    loop.accelerator.scaler = scaler
    loop.optimizer.scaler = scaler
    run = trainmedic.torch.attach(
        loop.medic, accelerator=loop.accelerator, model=loop.model, optimizer=loop.optimizer, checkpoints=tmp_path / "s"
    )
    saved = run.checkpoint()
    assert saved is not None
    assert torch.load(saved.path / "training.pt", weights_only=True)["scaler"]["scale"] == 2.0**8
    run.close()


def test_two_different_accumulation_numbers_are_an_error(begin: Begin) -> None:
    """One is Accelerate's, the other was given to `attach`."""
    with pytest.raises(ConfigurationError, match=r"accumulation is 2, and Accelerator\(gradient_accumulation_steps=3"):
        begin(accumulation=3, heeded=2)


def test_accelerates_own_states_serve_as_checkpoints(begin: Begin, tmp_path: Path) -> None:
    """The guide's functions use ``accelerator.save_state`` and ``load_state``."""
    calm = begin("calm", accumulation=2)
    calm.train(20)
    directory = tmp_path / "states"
    holder: list[AcceleratedLoop] = []

    def save(step: int, state: Mapping[str, Any]) -> Path:
        path = directory / f"step-{step:08d}"
        holder[0].accelerator.save_state(str(path))
        torch.save(state, path / "trainmedic.pt")
        return path

    def load(checkpoint: SavedCheckpoint) -> Mapping[str, Any]:
        holder[0].accelerator.load_state(str(checkpoint.path))
        state: Mapping[str, Any] = torch.load(checkpoint.path / "trainmedic.pt", weights_only=False)
        return state

    def saved() -> list[SavedCheckpoint]:
        return [
            SavedCheckpoint(int(path.parent.name[5:]), datetime.fromtimestamp(path.stat().st_mtime, UTC), path.parent)
            for path in directory.glob("step-*/trainmedic.pt")
        ]

    own = trainmedic.torch.OwnCheckpoints(save, load, saved, directory=directory)
    holder.append(begin(accumulation=2, checkpoints=own))
    loop = holder[0]
    loop.train(20, {17: loop.order("job.rollback", step=10)})
    assert loop.replies()[0].output["data"] == REPLAYED
    assert same(loop.state(), calm.state())
    assert json.loads((directory / ".trainmedic-rollbacks.json").read_text())["rollbacks"] == 1
