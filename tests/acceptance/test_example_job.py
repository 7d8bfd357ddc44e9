"""The training example is repaired as it promises: it goes back, passes over its spoiled data, and resumes."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="PyTorch is not installed")
from examples import train_char_model as example  # noqa: E402 (needs torch)
from tests.support.command_sender import Commander  # noqa: E402 (goes with it)

# PyTorch says so where NumPy is not installed; nothing here needs it.
pytestmark = pytest.mark.filterwarnings("ignore:Failed to initialize NumPy")

STEP = re.compile(r"step (\d+): loss ([\d.]+), learning rate ([\d.e-]+)")


class Rows(example.Rows):
    """Those of the example; ``seen`` are the batches that were read, ``acts`` what happens when one is."""

    def __init__(self, poisoned: range = range(0)) -> None:
        super().__init__(Path(__file__).read_text(), poisoned)
        self.seen: list[int] = []
        self.acts: dict[int, Callable[[], Any]] = {}

    def __getitem__(self, number: int) -> tuple[Any, Any]:
        if number % example.BATCH == 0:
            self.seen.append(number // example.BATCH)
            self.acts.pop(self.seen[-1], lambda: None)()
        return super().__getitem__(number)


@pytest.fixture
def commander(redis_url: str) -> Iterator[Commander]:
    made = Commander(redis_url)
    yield made
    made.close()


def train(commander: Commander, rows: Rows, directory: Path, steps: int, **orders: Any) -> None:
    """Let the example train; while it does step 15, on batch 14, it is ordered what ``orders`` say."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    options = example.parse(["--checkpoints", str(directory), "--checkpoint-every", "10", "--steps", str(steps)])
    with commander.connect() as medic:
        rows.acts = {
            14: lambda: [commander.send_and_wait(medic, f"job.{name}", **params) for name, params in orders.items()]
        }
        example.train(medic, rows, options)


def test_a_rollback_skips_the_spoiled_batches(commander: Commander, tmp_path: Path, capsys: Any) -> None:
    """The rollback loads the last checkpoint, applies the ordered rate and skips the spoiled data."""
    rows = Rows(range(12, 30))
    train(commander, rows, tmp_path, 30, rollback={"skip_batches": 20}, scale_lr={"factor": 0.5})
    assert rows.seen == [*range(15), *range(30, 50)]
    told = STEP.findall(capsys.readouterr().out)
    assert [(int(step), float(rate)) for step, _, rate in told] == [(10, 0.003), (20, 0.0015), (30, 0.0015)]


def test_a_fault_before_the_first_checkpoint_rolls_back_to_the_start(commander: Commander, tmp_path: Path) -> None:
    """A checkpoint from before the first step exists."""
    rows = Rows()
    train(commander, rows, tmp_path, 20, rollback={"step": 5})
    assert rows.seen == [*range(15), *range(20)]


def test_the_job_resumes_where_it_was_stopped(commander: Commander, tmp_path: Path) -> None:
    """After a stop, the job continues with the next data."""
    train(commander, Rows(), tmp_path, 1000, stop={})
    rows = Rows()
    train(commander, rows, tmp_path, 18)
    assert rows.seen == [15, 16, 17]


def test_poisoned_batches_make_the_loss_jump(commander: Commander, tmp_path: Path, capsys: Any) -> None:
    """The labels are noise, so a model that has learned anything does worse on them."""
    train(commander, Rows(range(30, 40)), tmp_path, 40)
    losses = {int(step): float(loss) for step, loss, _ in STEP.findall(capsys.readouterr().out)}
    assert losses[40] > losses[30] + 1.0
