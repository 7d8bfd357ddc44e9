"""The training without PyTorch really learns, is really spoiled, and really goes back."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

import trainmedic
from tests.support.messages import make_command
from trainmedic.job.command import JobCommand
from trainmedic.job.parameters import parse
from trainmedic_server.demo.faults import FaultKind
from trainmedic_server.demo.plain_training import PlainTraining
from trainmedic_server.demo.training_text import EXPLODED_SECONDS, Explosion, FaultFile


class Reports:
    """A medic that takes reports, and hands commands to the registered handlers."""

    def __init__(self) -> None:
        self.losses: list[float] = []
        self.norms: list[float] = []
        self.saves: list[int] = []
        self.handlers: dict[str, Callable[[JobCommand], Mapping[str, Any]]] = {}

    def on(self, action: str) -> Callable[[Any], Any]:
        return lambda handler: self.handlers.setdefault(action, handler)

    def report(self, step: int, loss: float, norm: float, rate: float, samples: int) -> None:
        self.losses.append(loss)
        self.norms.append(norm)

    def saved(self, step: int) -> None:
        self.saves.append(step)

    def commands(self, step: int) -> list[JobCommand]:
        return []

    def order(self, action: str, **params: Any) -> Mapping[str, Any]:
        sent = make_command(action, params=params)
        return self.handlers[action](JobCommand(sent, parse(action, params), b"", lambda *_: None))


@pytest.fixture
def medic() -> Reports:
    return Reports()


def run(training: PlainTraining, steps: int) -> None:
    for _ in range(steps):
        training.take_step()


def test_a_spoiled_job_rolls_back_and_skips_the_spoiled_batches(medic: Reports, tmp_path: Path) -> None:
    """The loss falls, jumps, and is as before after the rollback."""
    faults = FaultFile(tmp_path, "llm-1")
    training = PlainTraining(medic, faults)  # type: ignore[arg-type]
    run(training, 100)
    learned = medic.losses[-1]
    assert learned < medic.losses[0] - 1
    began = datetime.now(UTC)
    faults.write(FaultKind.DATA)
    run(training, 15)
    assert medic.losses[-1] > learned + 0.9
    assert medic.saves == [40, 80]
    output = medic.order("job.rollback", before=began.isoformat().replace("+00:00", "Z"), skip_batches=200)
    assert output == {"step": 80, "left_step": 115, "skipped_batches": 200}
    run(training, 5)
    assert medic.losses[-1] < learned + 0.5


def test_rollback_does_not_use_a_checkpoint_with_the_fault(medic: Reports, tmp_path: Path) -> None:
    """The next rollback does not use it either, though it was written before that fault."""
    faults = FaultFile(tmp_path, "llm-1")
    training = PlainTraining(medic, faults)  # type: ignore[arg-type]
    run(training, 75)
    began = datetime.now(UTC)
    faults.write(FaultKind.DATA)
    run(training, 10)
    assert medic.saves == [40, 80]
    for before in (began, datetime.now(UTC)):
        output = medic.order("job.rollback", before=before.isoformat().replace("+00:00", "Z"), skip_batches=200)
        assert output["step"] == 40


def test_exploded_gradients_are_reported_and_end(medic: Reports, tmp_path: Path) -> None:
    """They are clipped before they are applied, so the weights stay good; the rate is scaled and reverted."""
    faults = FaultFile(tmp_path, "llm-2")
    seconds = 0.0
    training = PlainTraining(medic, faults, Explosion(lambda: seconds))  # type: ignore[arg-type]
    run(training, 20)
    usual = medic.norms[-1]
    faults.write(FaultKind.GRADIENTS)
    run(training, 2)
    assert medic.norms[-1] > 20 * usual
    halved = medic.order("job.scale_lr", factor=0.5)
    assert medic.order("job.scale_lr", factor=2.0) == {"before": halved["after"], "after": halved["before"]}
    seconds = EXPLODED_SECONDS
    run(training, 1)
    assert medic.norms[-1] < 20 * usual


def test_rollback_without_an_earlier_checkpoint_is_impossible(medic: Reports, tmp_path: Path) -> None:
    """The job reports it."""
    PlainTraining(medic, FaultFile(tmp_path, "llm-1"))  # type: ignore[arg-type]
    with pytest.raises(trainmedic.Rejected, match="no checkpoint"):
        medic.order("job.rollback")


def test_a_fault_file_is_consumed_once(tmp_path: Path) -> None:
    """A file that does not contain a fault yet is left to its writer."""
    faults = FaultFile(tmp_path, "llm-1")
    (tmp_path / "llm-1.fault").write_text("")
    assert faults.take() is None
    faults.write(FaultKind.DATA)
    assert [faults.take(), faults.take()] == [FaultKind.DATA, None]
