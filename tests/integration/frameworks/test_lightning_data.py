"""A Lightning fit's place in its data: after a rollback the batches come again, or the answer says that they do not."""

from __future__ import annotations

import inspect
import pickle
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.utilities import CombinedLoader
from torch.utils._pytree import tree_leaves
from torch.utils.data import DataLoader, IterableDataset
from torchdata.stateful_dataloader import StatefulDataLoader

import trainmedic
import trainmedic.lightning
from tests.integration.frameworks.line import Line, Points, Script, make_trainer
from tests.integration.frameworks.test_lightning import QUICK, weights
from tests.support.command_sender import Sent

# Lightning's own: it speaks to itself through what is deprecated, and advises on tiny runs.
pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning")

Row = tuple[torch.Tensor, torch.Tensor]


class OneCycle(Line):
    """It asks Lightning for the number of steps, which has Lightning prepare the data before it loads a checkpoint."""

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.001)
        steps = int(self.trainer.estimated_stepping_batches)
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.01, total_steps=steps)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


class OfSeveral(Line):
    """It learns from two loaders at once."""

    def training_step(self, batch: Any, index: int) -> torch.Tensor:
        return super().training_step(batch["first"], index) + super().training_step(batch["second"], index)


class Hooked(Line):
    """The loader is the model's own."""

    def train_dataloader(self) -> Any:
        return shuffled()


class Module(pl.LightningDataModule):
    def train_dataloader(self) -> Any:
        return shuffled()


class Streamed(IterableDataset[Row]):
    """Rows that can only be read in their order."""

    def __init__(self, keeps: bool = True) -> None:
        self.points = Points()
        self.keeps = keeps
        self.reads = 0

    def __iter__(self) -> Iterator[Row]:
        self.reads += 1
        first = 0 if self.keeps else self.reads
        for number in range(first, len(self.points)):
            yield self.points[number]


class Mixed(Streamed):
    """The same rows from a shuffle buffer, which the state of no loader holds."""

    def __iter__(self) -> Iterator[Row]:
        order, buffer = random.Random(5), list[Row]()
        for row in super().__iter__():
            buffer.append(row)
            if len(buffer) > 9:
                yield buffer.pop(order.randrange(len(buffer)))
        yield from buffer

    def state_dict(self) -> dict[str, Any]:
        return {"reads": self.reads}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.reads = state["reads"]


class Kept(DataLoader[Row]):
    """A loader that keeps its place, as torchdata's does: here by the number of batches that it has given."""

    given = 0
    begins_at = 0

    def __iter__(self) -> Any:
        self.given, self.begins_at = self.begins_at, 0
        return self.counted(super().__iter__(), self.given)

    def counted(self, iterator: Any, behind: int) -> Iterator[Row]:
        for _ in range(behind):
            next(iterator)
        for batch in iterator:
            self.given += 1
            yield batch

    def state_dict(self) -> dict[str, Any]:
        return {"given": self.given}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.begins_at = state["given"]


class Seen(Script):
    """It keeps the batches, too."""

    def __init__(self, **acts: Callable[[Any], None]) -> None:
        super().__init__(**acts)
        self.batches: list[Any] = []

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, index: int) -> None:
        self.batches.append([leaf.tolist() for leaf in tree_leaves(batch)])
        super().on_train_batch_end(trainer, module, outputs, batch, index)


def shuffled(**options: Any) -> DataLoader[Row]:
    return DataLoader(Points(), batch_size=4, shuffle=True, **options)


def own_generator() -> DataLoader[Row]:
    return shuffled(generator=torch.Generator().manual_seed(7))


def two_lengths() -> dict[str, DataLoader[Row]]:
    return {"first": shuffled(), "second": DataLoader(Points(28), batch_size=4, shuffle=True)}


def run(
    directory: Path,
    medic: trainmedic.Medic,
    make: Callable[[], Line],
    data: Callable[[], Any],
    script: Script,
    **options: Any,
) -> Line:
    trainer = make_trainer(directory, script, **options)
    model = make()  # after the random numbers were seeded
    loaders = data()
    named = {"datamodule": loaders} if isinstance(loaders, pl.LightningDataModule) else {"train_dataloaders": loaders}
    trainmedic.lightning.fit(trainer, model, **named, medic=medic, limits=QUICK)
    return model


@pytest.mark.parametrize(
    ("model", "data", "options"),
    [
        pytest.param(OneCycle, shuffled, {"max_epochs": 2}, id="steps-asked-for-early"),
        pytest.param(Line, Module, {}, id="data-module"),
        pytest.param(Hooked, lambda: None, {}, id="model's-own"),
        pytest.param(Line, own_generator, {}, id="generator-of-its-own"),
        pytest.param(Line, lambda: shuffled(num_workers=1, persistent_workers=True), {}, id="workers-that-stay"),
        pytest.param(OfSeveral, two_lengths, {}, id="several-loaders"),
        pytest.param(OfSeveral, lambda: CombinedLoader(two_lengths(), "min_size"), {}, id="combined-by-the-script"),
        pytest.param(Line, shuffled, {"accumulate_grad_batches": 2, "limit_train_batches": 18}, id="limited"),
        pytest.param(Line, shuffled, {"reload_dataloaders_every_n_epochs": 1}, id="reloaded"),
        pytest.param(Line, shuffled, {"overfit_batches": 9}, id="overfit"),
        pytest.param(Line, lambda: Kept(Points(), batch_size=4), {}, id="keeps-its-place"),
        pytest.param(Line, lambda: Kept(Streamed(), batch_size=4), {}, id="keeps-its-place-without-a-length"),
        pytest.param(Line, lambda: StatefulDataLoader(Mixed(), batch_size=4), {}, id="shuffle-buffer"),
        pytest.param(Line, lambda: DataLoader(Streamed(), batch_size=4), {}, id="read-again"),
        pytest.param(
            Line, lambda: DataLoader(Streamed(), batch_size=4), {"limit_train_batches": 9}, id="read-again-limited"
        ),
    ],
)
def test_the_same_batches_come_again(
    tmp_path: Path,
    medic: trainmedic.Medic,
    sent: Sent,
    model: type[Line],
    data: Callable[[], Any],
    options: dict[str, Any],
) -> None:
    """In the middle of the first epoch and of a later one; the final weights are the same too."""
    plain = Seen()
    undisturbed = run(tmp_path / "plain", medic, model, data, plain, **options)
    script = Seen(at_8=sent("job.rollback", step=5), at_38=sent("job.rollback", step=36))
    again = run(tmp_path, medic, model, data, script, **options)
    first, second = sent.replies()
    assert (first.status, second.status) == ("applied", "applied")
    assert first.output["data"].startswith("the same batches again")
    assert second.output["data"].startswith("the same batches again")
    accumulation = options.get("accumulate_grad_batches", 1)
    assert script.batches[: 8 * accumulation] == plain.batches[: 8 * accumulation]
    assert script.batches[8 * accumulation : -5 * accumulation] == plain.batches[5 * accumulation : 38 * accumulation]
    assert script.batches[-5 * accumulation :] == plain.batches[35 * accumulation :]
    assert torch.equal(weights(again), weights(undisturbed))


@pytest.mark.parametrize("accumulation", [1, 2])
@pytest.mark.parametrize("data", [shuffled, Module, lambda: DataLoader(Streamed(), batch_size=4)])
def test_batches_are_skipped_whatever_their_source(
    tmp_path: Path, medic: trainmedic.Medic, sent: Sent, data: Callable[[], Any], accumulation: int
) -> None:
    """Of 30 in an epoch, six are skipped: the same batches follow, and the epoch is shorter by six."""
    steps = Seen()
    options = {"max_steps": -1, "max_epochs": 1, "accumulate_grad_batches": accumulation}
    run(tmp_path / "plain", medic, Line, data, steps, **options)
    script = Seen(at_7=sent("job.rollback", step=5, skip_batches=6))
    run(tmp_path, medic, Line, data, script, **options)
    assert sent.reply().output["skipped_batches"] == 6
    assert script.batches[7 * accumulation :] == steps.batches[5 * accumulation + 6 :]
    assert script.steps[-1] == (30 - 6) / accumulation


@pytest.mark.parametrize("options", [{}, {"max_steps": -1, "max_epochs": 2}])
def test_a_finished_epoch_is_followed_by_the_next(
    tmp_path: Path, medic: trainmedic.Medic, sent: Sent, options: dict[str, Any]
) -> None:
    """The checkpoint is from an epoch's end; Lightning itself would request one more batch of that epoch."""
    plain, script = Seen(), Seen(at_33=sent("job.rollback"))
    for directory, seen in ((tmp_path / "plain", plain), (tmp_path, script)):
        trainer = make_trainer(directory, seen, **options)
        trainer.callbacks[-1] = ModelCheckpoint(dirpath=directory / "out", every_n_epochs=1, save_top_k=-1)
        trainmedic.lightning.fit(trainer, Line(), shuffled(), medic=medic, limits=QUICK)
    assert (sent.reply().status, sent.reply().output["checkpoint_step"]) == ("applied", 30)
    assert script.batches == [*plain.batches[:33], *plain.batches[30:]]


def test_an_iterator_only_continues_and_the_answer_reports_it(
    tmp_path: Path, medic: trainmedic.Medic, sent: Sent
) -> None:
    """Nothing is claimed about its batches."""
    script = Script(at_7=sent("job.rollback"))
    run(tmp_path, medic, Line, lambda: iter(list(shuffled())), script, max_steps=12)
    assert sent.reply().output["data"] == "not the same batches: an iterator cannot go back"


def test_a_checkpoint_written_by_lightning_has_no_position_and_the_answer_reports_it(
    tmp_path: Path, medic: trainmedic.Medic, sent: Sent
) -> None:
    """A fit without the callback wrote it, and one with the callback resumes from it."""
    make_trainer(tmp_path, max_steps=7).fit(Line(), shuffled())
    script = Script(at_8=sent("job.rollback", step=5))
    trainer = make_trainer(tmp_path, script, max_steps=12)
    start = str(tmp_path / "out" / "epoch=0-step=5.ckpt")
    trainmedic.lightning.fit(trainer, Line(), shuffled(), ckpt_path=start, medic=medic, limits=QUICK)
    assert script.steps == [6, 7, 8, *range(6, 13)]
    assert sent.reply().output["data"].startswith("not the same batches: the checkpoint does not hold")


def test_lightning_alone_resumes_from_a_checkpoint_of_the_fit(tmp_path: Path, medic: trainmedic.Medic) -> None:
    """A user who removes Trainmedic from a script keeps the checkpoints."""
    run(tmp_path, medic, Line, shuffled, Script(), max_steps=7)
    script = Script()
    trainer = make_trainer(tmp_path, script, max_steps=9)
    trainer.fit(Line(), shuffled(), ckpt_path=str(tmp_path / "out" / "epoch=0-step=5.ckpt"))
    assert script.steps == [6, 7, 8, 9]


def test_fit_takes_the_same_arguments_as_the_trainers_own(tmp_path: Path, medic: trainmedic.Medic) -> None:
    """They are in the same order, so replacing one with the other needs no other change."""
    own = list(inspect.signature(pl.Trainer.fit).parameters)[1:6]
    assert list(inspect.signature(trainmedic.lightning.fit).parameters)[1:6] == own

    class Validated(Line):
        validated = 0

        def validation_step(self, batch: Any, index: int) -> None:
            self.validated += 1

    model = Validated()
    trainer = make_trainer(tmp_path, max_steps=-1, max_epochs=1, num_sanity_val_steps=0)
    trainmedic.lightning.fit(trainer, model, shuffled(), DataLoader(Points(8), batch_size=4), medic=medic)
    assert model.validated == 2


def test_a_connection_of_this_process_is_rejected_if_others_train(tmp_path: Path, medic: trainmedic.Medic) -> None:
    """Before anything is started, with advice; a connected callback by itself is rejected too."""
    trainer = make_trainer(tmp_path, strategy="ddp_spawn", devices=2)
    with pytest.raises(trainmedic.ConfigurationError, match="with this strategy Lightning trains"):
        trainmedic.lightning.fit(trainer, Line(), shuffled(), medic=medic)
    with pytest.raises(trainmedic.ConfigurationError, match="connects by itself"):
        pickle.dumps(trainmedic.lightning.Callback(medic))
