"""Trainers that hold batches between the loader and the loss: after a rollback none of the abandoned course is used."""

from __future__ import annotations

import json
import os
import sys
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from transformers import Trainer

import trainmedic
import trainmedic.lightning
from tests.conftest import RedisServer
from tests.integration.frameworks import hf, line
from tests.integration.frameworks.test_lightning import QUICK as LIGHTNING_QUICK
from tests.support.command_sender import Sent
from tests.support.programs import PYTHON_PATH, Program
from trainmedic import huggingface
from trainmedic.lightning.framework import LightningFramework

# Lightning's own: it speaks to itself through what is deprecated, and advises on tiny runs.
pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning")

TRL = Path(sys.prefix) / "trl"
"""The folder where `scripts/setup all` installs TRL."""
PROGRAM = "tests.integration.frameworks.trl_trainers"
KINDS = ("grpo", "rloo", "engine", "reference", "kto", "online-dpo", "packed", "lora")
LOADING = 600.0  # seconds, to import TRL and to train sixteen times on a busy machine
QUICK = huggingface.Limits(delay=0.0)

Story = dict[str, Any]


@pytest.fixture(scope="module")
def stories(shared_redis: RedisServer, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Story]:
    """One process for all trainers, because loading TRL takes most of the time."""
    assert TRL.is_dir(), "no TRL; run scripts/setup all"
    if shared_redis.process is None:
        shared_redis.start()
    directory = tmp_path_factory.mktemp("trl")
    environment = {
        "PYTHONPATH": os.pathsep.join((PYTHON_PATH, str(TRL))),
        "HF_HOME": str(directory / "cache"),
        "HF_HUB_OFFLINE": "1",
        "TRANSFORMERS_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
    }
    told = directory / "told.json"
    command = [sys.executable, "-m", PROGRAM, shared_redis.url, str(told)]
    with Program(command, directory / "log", environment) as program:
        assert program.process.wait(LOADING) == 0, program.tail()
    stories: dict[str, Story] = json.loads(told.read_text())
    return stories


@pytest.mark.parametrize("kind", KINDS)
def test_each_step_after_a_rollback_trains_on_the_right_samples(stories: dict[str, Story], kind: str) -> None:
    """Completions and losses of steps 11 to 24 are those of a training that was never spoiled. The losses of
    ``reference`` depend on a model that follows the trained one. Nobody said when the weights were spoiled, so losses
    that differ from there on make the answer ``failed``; the course is right all the same."""
    story = stories[kind]
    status, output = story["answer"]
    if kind in (
        "reference",
        "kto",
        "lora",
    ):  # only here the losses of the spoiled model are others that can be compared
        assert status == "failed"
        assert "one of the two courses has a fault from there on" in output["reason"]
        assert output["verified"]["losses"]["agreed"] == 2
    else:  # of ``packed`` too, but they show where the fault began
        assert status == "applied", output
    assert (output["checkpoint_step"], output["step"]) == (10, 11)
    plain = {step: rest for step, *rest in story["plain"]}
    again = story["repaired"][18:]
    assert [step for step, *_ in again] == list(range(11, 25))
    assert all(rest == plain[step] for step, *rest in again)


def test_an_adapters_checkpoint_excludes_the_frozen_model(stories: dict[str, Story]) -> None:
    saved = stories["lora"]["saved"]
    assert "adapter_model.safetensors" in saved
    assert "model.safetensors" not in saved


def test_a_changed_frozen_model_damages_no_checkpoint_of_its_adapter(stories: dict[str, Story]) -> None:
    """Nothing in the process can restore it. The training continues, and its checkpoints stay for the next one."""
    status, output = stories["base"]["answer"]
    assert status == "failed"
    assert "parameters that no checkpoint of an adapter holds have changed since" in output["reason"]
    assert output["checkpoint_step"] == 10
    assert stories["base"]["repaired"][-1][0] == 24
    assert "adapter_model.safetensors" in stories["base"]["saved"]


@pytest.mark.parametrize("kind", ["grpo", "rloo"])
def test_the_answer_counts_batches_up_to_the_next_sampling(stories: dict[str, Story], kind: str) -> None:
    """The checkpoint holds the completions of steps 11 to 16. The spoiled model has sampled those of 17 and 18."""
    _, output = stories[kind]["answer"]
    batches = output["verified"]["batches"]
    assert (batches["compared"], batches["agreed"]) == (6, 6)
    assert batches["why"] == "the model samples its batches, and samples new ones from here on"
    assert output["data"] == "the same batches again, until the model samples the next ones"


def test_an_engine_samples_with_the_weights_of_the_checkpoint(stories: dict[str, Story]) -> None:
    """It sampled at step 16 of the abandoned run, and samples at step 16 again."""
    assert stories["engine"]["sampled"] == [[0, True], [8, True], [16, True], [16, True]]
    _, output = stories["engine"]["answer"]
    assert output["rollout_engine"] == "it gets the weights of the checkpoint before it samples again"
    assert output["data"].startswith("not the same batches: a rollout engine samples them")
    assert output["verified"]["batches"]["compared"] == 0


def test_a_skip_over_the_end_of_an_epoch_skips_whole_samplings(stories: dict[str, Story]) -> None:
    """Steps 9 to 16 share four prompts, 17 to 24 four of the next epoch. None of the first is trained on, although
    three batches were to be left out, and the second take their place. Then the next four prompts follow."""
    plain, repaired = (
        [(step, {tuple(prompt) for prompt in prompts}) for step, prompts in each]
        for each in stories["epoch"]["prompts"]
    )
    status, output = stories["epoch"]["answer"]
    assert (status, output["checkpoint_step"], output["step"]) == ("applied", 10, 11), output
    assert output["skipped_batches"] == 8
    assert output["verified"]["batches"]["why"].startswith("the batches to leave out reach beyond the end of the epoch")
    again = repaired[18:]
    assert [step for step, _ in again] == list(range(11, 25))
    everything, epoch_2 = (set().union(*(prompts for _, prompts in part)) for part in (plain, plain[16:]))
    assert (len(everything), len(epoch_2)) == (8, 4)
    assert set().union(*(prompts for _, prompts in again[:6])) == epoch_2
    assert set().union(*(prompts for _, prompts in again[6:])) == everything - epoch_2


class Buffering(Trainer):  # type: ignore[misc]
    """It samples from the model every fifth step, and trains on the samples five times; ``used`` are all of them."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.count = 0
        self.buffer: Any = None
        self.average = torch.zeros(())
        Buffering.used = []
        Buffering.counts = []

    used: ClassVar[list[list[Any]]]
    counts: ClassVar[list[tuple[int, int, float]]]

    def _prepare_inputs(self, inputs: Any) -> Any:
        batch = super()._prepare_inputs(inputs)
        if self.buffer is None or self.count % 5 == 0:
            with torch.no_grad():
                odds = self.model(batch["input_ids"]).logits.softmax(-1)
            tokens = torch.multinomial(odds.flatten(0, 1), 1).view(len(odds), -1)
            self.buffer = {"input_ids": tokens, "labels": tokens, "sampled": [self.state.global_step]}
        return self.buffer

    def training_step(self, *arguments: Any, **options: Any) -> Any:
        loss = super().training_step(*arguments, **options)
        self.count += 1
        self.average.lerp_(loss.cpu(), 0.1)
        Buffering.counts.append((self.state.global_step, self.count, float(self.average)))
        return loss

    def compute_loss(self, model: Any, inputs: Any, *arguments: Any, **options: Any) -> Any:
        Buffering.used.append([self.state.global_step, inputs["input_ids"].tolist(), inputs["sampled"][0]])
        inputs = {name: value for name, value in inputs.items() if name != "sampled"}
        return super().compute_loss(model, inputs, *arguments, **options)


def spoil(trainer: Any) -> None:
    with torch.no_grad():
        for parameter in trainer.model.parameters():
            parameter.add_(torch.randn_like(parameter))


@pytest.mark.parametrize("skip", [0, 2])
def test_buffers_counters_and_averages_come_from_the_checkpoint(
    tmp_path: Path, medic: trainmedic.Medic, sent: Sent, skip: int
) -> None:
    """With skipped batches, those in the checkpoint are skipped too; counters and averages stay."""

    def act(control: Any) -> None:
        spoil(trainer)
        sent("job.rollback", step=12, skip_batches=skip)(control)

    trainer = hf.make_trainer(tmp_path, hf.Script(at_18=act), cls=Buffering, save_steps=6, max_steps=24)
    huggingface.train(trainer, medic=medic, limits=QUICK)
    reply, used, counts = sent.reply(), Buffering.used, Buffering.counts
    assert reply.status == "applied", reply.output
    assert counts[18][1] == 13  # 12 steps were done at the checkpoint
    batches = reply.output["verified"]["batches"]
    if not skip:
        assert used[18:24] == used[12:18]
        assert counts[18:24] == counts[12:18]
        assert (batches["compared"], batches["agreed"]) == (3, 3)  # up to step 15, before which it samples
    else:
        assert used[18][2] == 12  # step 13 samples at once
        assert batches["compared"] == 0
        assert reply.output["trainer_state"] == {"restored": ["average", "count"], "reset": ["buffer"]}


def test_the_state_without_copies_is_that_of_a_new_process(tmp_path: Path, medic: trainmedic.Medic, sent: Sent) -> None:
    """This also holds for checkpoints of earlier releases. The answer names what was reset."""

    def act(control: Any) -> None:
        for path in tmp_path.glob("out/checkpoint-*/trainmedic-held-*"):
            path.unlink()
        sent("job.rollback", step=12)(control)

    trainer = hf.make_trainer(tmp_path, hf.Script(at_18=act), cls=Buffering, save_steps=6, max_steps=24)
    huggingface.train(trainer, medic=medic, limits=QUICK)
    reply = sent.reply()
    assert reply.status == "applied", reply.output
    assert reply.output["trainer_state"] == {"restored": [], "reset": ["average", "buffer", "count"]}
    assert reply.output["data"].startswith("not the same batches: the model samples new ones")
    assert Buffering.counts[18][:2] == (12, 1)
    assert Buffering.used[18][2] == 12


class Recurrent(torch.nn.Module):
    """A language model whose layer carries its hidden state from batch to batch, and an average in a buffer."""

    average: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.layer = torch.nn.Embedding(32, 8), torch.nn.GRU(8, 8, batch_first=True)
        self.head = torch.nn.Linear(8, 32)
        self.hidden: torch.Tensor | None = None
        self.register_buffer("average", torch.zeros(8), persistent=False)

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        outputs, hidden = self.layer(self.embedding(input_ids), self.hidden)
        self.hidden = hidden.detach()
        self.average.lerp_(outputs.detach().mean((0, 1)), 0.1)
        logits = self.head(outputs - self.average)
        return {"loss": torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())}


@pytest.mark.parametrize("skip", [0, 3])
def test_a_models_carried_state_is_restored(tmp_path: Path, medic: trainmedic.Medic, sent: Sent, skip: int) -> None:
    """A hidden state with NaN would make every loss after the rollback NaN. The losses repeat."""

    def act(control: Any) -> None:
        with torch.no_grad():
            model.hidden = torch.full_like(model.hidden, float("nan")) if model.hidden is not None else None
            model.average.fill_(float("nan"))
        sent("job.rollback", step=10, skip_batches=skip)(control)

    script = hf.Script(at_18=act)
    trainer = hf.make_trainer(tmp_path, script, max_steps=24)
    before: dict[int, float] = {}
    model = Recurrent()
    trainer = Trainer(model=model, args=trainer.args, train_dataset=hf.Windows(), callbacks=[script])
    script.acts[17] = lambda _: before.update(script.losses)
    huggingface.train(trainer, medic=medic, limits=QUICK)
    assert sent.reply().status == "applied", sent.reply().output
    again = {step: script.losses[step] for step in range(11, 17)}
    assert all(loss == loss for loss in script.losses.values())
    if not skip:
        assert again == {step: before[step] for step in again}


class BufferingLine(line.Line):
    """It gathers batches, and trains on the last three together."""

    def __init__(self) -> None:
        super().__init__()
        self.replay: deque[Any] = deque(maxlen=3)
        self.count = 0
        self.average = torch.zeros(1)
        self.used: Callable[[Any], None] = lambda _: None

    def training_step(self, batch: Any, index: int) -> torch.Tensor:
        self.replay.append(batch)
        self.count += 1
        x, y = (torch.cat(parts) for parts in zip(*self.replay, strict=True))
        loss: torch.Tensor = torch.nn.functional.mse_loss(self.layers(x), y)
        self.average.lerp_(loss.detach(), 0.1)
        self.used((self.count, x.tolist(), loss.item(), self.average.item()))
        return loss


@pytest.mark.parametrize("has_copies", [True, False])
def test_a_lightning_models_collected_state_is_restored(
    tmp_path: Path, medic: trainmedic.Medic, sent: Sent, has_copies: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each step trains on the same as before. Without copies in the checkpoint, collecting starts again, and
    the first loss shows it."""
    if not has_copies:
        monkeypatch.setattr(LightningFramework, "held", lambda _: {})
    used: list[Any] = []
    model = BufferingLine()
    model.used = used.append
    script = line.Script(at_18=sent("job.rollback", step=10))
    trainer = line.make_trainer(tmp_path, script, max_steps=24)
    trainmedic.lightning.fit(trainer, model, line.loader(), medic=medic, limits=LIGHTNING_QUICK)
    reply = sent.reply()
    assert reply.status == ("applied" if has_copies else "failed"), reply.output
    if has_copies:
        assert used[18:26] == used[10:18]
        assert "trainer_state" not in reply.output
    else:
        assert [count for count, *_ in used[18:26]] == list(range(1, 9))
        assert len(used[18][1]) == 4
        assert reply.output["trainer_state"] == {"restored": [], "reset": ["average", "count", "replay"]}


class Leaking(Trainer):  # type: ignore[misc]
    """It trains on the batch before, which it holds where nothing copies it."""

    late: ClassVar[list[Any]] = []

    def _prepare_inputs(self, inputs: Any) -> Any:
        self.late.append(super()._prepare_inputs(inputs))
        return self.late[-2:][0]


def test_other_batches_at_the_loss_are_failed_though_the_loader_gives_the_same(
    tmp_path: Path, medic: trainmedic.Medic, sent: Sent
) -> None:
    """The first step after the rollback trains on a batch of the abandoned run."""
    Leaking.late.clear()
    trainer = hf.make_trainer(tmp_path, hf.Script(at_18=sent("job.rollback", step=10)), cls=Leaking, max_steps=30)
    huggingface.train(trainer, medic=medic, limits=QUICK)
    reply = sent.reply()
    assert reply.status == "failed"
    assert reply.output["verified"]["batches"] == {"compared": 8, "agreed": 7}


class Sampling(Trainer):  # type: ignore[misc]
    """Its completions come from a program of which nothing is known."""

    @staticmethod
    def rollout_func(prompts: Any, trainer: Any) -> Any:
        raise NotImplementedError


class SamplingBeside(Trainer):  # type: ignore[misc]
    """Its completions come from a queue that a worker fills beside the training, as in TRL's AsyncGRPOTrainer. Of that
    it has the attribute alone."""

    rollout_worker = object()


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        (Sampling, "give rollout_func a method sync_weights()"),
        (SamplingBeside, "its queue holds completions of the abandoned model"),
    ],
)
def test_a_trainer_with_an_unreachable_engine_is_not_rolled_back(
    tmp_path: Path, medic: trainmedic.Medic, sent: Sent, kind: type[Trainer], reason: str
) -> None:
    """It would continue with completions of the abandoned run."""
    trainer = hf.make_trainer(tmp_path, hf.Script(at_8=sent("job.rollback")), cls=kind, save_steps=5, max_steps=9)
    huggingface.train(trainer, medic=medic, limits=QUICK)
    reply = sent.reply()
    assert reply.status == "unsupported"
    assert reason in reply.output["reason"]


def test_trls_worker_has_the_expected_attribute_name() -> None:
    """Its trainer needs a vLLM server and cannot be created here."""
    trainer = (TRL / "trl" / "experimental" / "async_grpo" / "async_grpo_trainer.py").read_text()
    assert "self.rollout_worker = rollout_worker" in trainer
