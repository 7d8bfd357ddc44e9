"""What the steps' time goes into, the tokens and the evaluations, as the Trainers of both frameworks report them."""

from __future__ import annotations

import math
import sys
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from prometheus_client.parser import text_string_to_metric_families

import trainmedic
import trainmedic.lightning
from tests.conftest import RedisServer
from tests.integration.frameworks import hf, line
from tests.support.programs import PYTHON_PATH, Program
from trainmedic import huggingface

PROGRAM = Path(__file__).with_name("slow_rank.py")
RANKS = 2

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning")

Metrics = dict[tuple[str, str | None], float]
"""By name, and rank where the metric has one."""


@pytest.fixture(scope="module")
def metrics(shared_redis: RedisServer, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Metrics]:
    """Of one start of the processes for both frameworks, as loading those takes most of the time."""
    directory = tmp_path_factory.mktemp("slow-rank")
    environment = {"PYTHONPATH": PYTHON_PATH, "TRAINMEDIC_REDIS_URL": "redis://127.0.0.1:1", "OMP_NUM_THREADS": "1"}
    launcher = ("-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={RANKS}")
    with Program([sys.executable, *launcher, PROGRAM], directory / "log", environment) as torchrun:
        assert torchrun.process.wait(240) == 0, torchrun.tail()
    return {job: read(directory / f"{job}.metrics") for job in ("huggingface", "lightning")}


def read(file: Path) -> Metrics:
    samples = [each for family in text_string_to_metric_families(file.read_text()) for each in family.samples]
    return {(sample.name, sample.labels.get("rank")): sample.value for sample in samples}


@pytest.mark.parametrize("job", ["huggingface", "lightning"])
def test_the_rank_with_slow_data_has_the_most_own_time(metrics: dict[str, Metrics], job: str) -> None:
    """The other one waits for it: where gradients are summed, and in Hugging Face's Trainer where the ranks count
    their tokens before they train on them."""
    own = {rank: seconds for (name, rank), seconds in metrics[job].items() if name == "training_rank_own_seconds"}
    data = {rank: seconds for (name, rank), seconds in metrics[job].items() if name == "training_rank_data_seconds"}
    assert own.keys() == data.keys() == {"0", "1"}
    assert own["1"] > 1.3 * own["0"]
    assert data["1"] > 0.15 > data["0"]
    assert own["0"] > data["0"]


def test_an_evaluation_of_several_ranks_is_reported(metrics: dict[str, Metrics]) -> None:
    """The report has its step, and the tokens of all ranks."""
    shown = metrics["huggingface"]
    assert shown["training_evaluation_step", None] == 30
    assert shown["training_evaluation_perplexity", None] == pytest.approx(
        math.exp(shown["training_evaluation_loss", None])
    )
    assert shown["training_throughput_tokens_per_second", None] == pytest.approx(
        hf.LENGTH * shown["training_throughput_samples_per_second", None]
    )


def test_a_trainer_reports_the_parts_and_tokens_of_its_steps(tmp_path: Path, medic: trainmedic.Medic) -> None:
    """The job has one rank. Steps of two batches count both."""
    huggingface.train(hf.make_trainer(tmp_path, max_steps=8, gradient_accumulation_steps=2), medic=medic)
    parts = medic.progress.pace.parts()
    assert parts.wait == 0.0
    assert parts.data is not None
    assert parts.own is not None
    assert 0.0 < parts.data < parts.own
    values = medic.progress.values(0.0)
    assert values["training_throughput_tokens_per_second"] == pytest.approx(
        hf.LENGTH * values["training_throughput_samples_per_second"]
    )


def test_a_callback_alone_reports_no_data_wait(tmp_path: Path, medic: trainmedic.Medic) -> None:
    """It does not see when the Trainer draws its batches; but it knows that it waits for no other rank."""
    hf.make_trainer(tmp_path, huggingface.Callback(medic), max_steps=6).train()
    parts = medic.progress.pace.parts()
    assert (parts.data, parts.compute, parts.wait) == (None, None, 0.0)


def test_the_trainer_is_unchanged_after_training(tmp_path: Path, medic: trainmedic.Medic) -> None:
    """The wrappers around its batches are removed."""
    trainer = hf.make_trainer(tmp_path, max_steps=3)
    before = set(vars(trainer))
    huggingface.train(trainer, medic=medic)
    assert {name for name in set(vars(trainer)) - before if "batch" in name} == set()


class Evaluated(line.Line):
    def validation_step(self, batch: Any, index: int) -> None:
        x, y = batch
        self.log("val_loss", torch.nn.functional.mse_loss(self.layers(x), y))
        self.log("val_perplexity", torch.tensor(7.5))


def test_a_fit_reports_the_parts_of_its_steps_and_its_validations(tmp_path: Path, medic: trainmedic.Medic) -> None:
    """The sanity check that Lightning runs before the training is not reported."""
    reported: list[Any] = []

    class Watch(pl.Callback):
        def on_train_batch_end(self, *_: Any) -> None:
            reported.append(medic.progress.evaluation)

    trainer = line.make_trainer(tmp_path, Watch(), max_steps=40)
    trainmedic.lightning.fit(trainer, Evaluated(), line.loader(), val_dataloaders=line.loader(), medic=medic)
    assert reported[0] is None
    assert medic.progress.evaluation is not None
    assert medic.progress.evaluation.step == 30
    values = medic.progress.values(0.0)
    assert values["training_evaluation_perplexity"] == 7.5
    assert values["training_evaluation_loss"] > 0.0
    parts = medic.progress.pace.parts()
    assert parts.wait == 0.0
    assert parts.data is not None
    assert parts.compute is not None
