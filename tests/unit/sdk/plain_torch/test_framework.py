"""A framework with no more than `Framework` requires is restarted, and its functions are replaced for a while."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

import trainmedic
from tests.support.clocks import START
from tests.support.messages import make_job_command
from trainmedic.job.parameters import Rollback
from trainmedic.recovery.checkpoints import SavedCheckpoint
from trainmedic.recovery.health import CheckpointHealth
from trainmedic.recovery.loop_restart import LoopRestart
from trainmedic.recovery.restarts import RestartLimits
from trainmedic.trainer.framework import Framework
from trainmedic.trainer.loop import TrainerLoop
from trainmedic.trainer.patching import replaced
from trainmedic.trainer.step_directories import StepDirectories

LAYOUT = StepDirectories("step-", 1, Path.is_dir, lambda path, is_complete: path.stat().st_mtime)


@pytest.fixture
def medic(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[trainmedic.Medic]:
    """Of a job whose server has not said where Redis is, so that nothing is connected to."""
    monkeypatch.setenv("TRAINMEDIC_STATE_DIR", str(tmp_path / "state"))
    monkeypatch.delenv("TRAINMEDIC_REDIS_URL", raising=False)
    with trainmedic.connect(job="llm-1", rank=0, world_size=1) as connected:
        yield connected


class Counting(Framework):
    """Its training counts steps, and saves at every second one."""

    writes = True
    accumulation = 1
    data = "the same batches again"
    newly_skipped = 0

    def __init__(self, medic: trainmedic.Medic, directory: Path) -> None:
        self._directory = directory
        self.loop = TrainerLoop(medic, self, RestartLimits(retries=0, delay=0.0))
        self.steps: list[int] = []

    @property
    def directories(self) -> list[Path]:
        return [self._directory]

    def all_checkpoints(self) -> list[SavedCheckpoint]:
        return LAYOUT.in_directory(self._directory)

    def is_complete(self, checkpoint: Path) -> bool:
        return LAYOUT.is_complete(checkpoint)

    def step_of(self, checkpoint: Path) -> int:
        return LAYOUT.step_of(checkpoint) or 0

    def train(self, steps: int, ask_at: int, ask: Any) -> None:
        def attempt(restart: LoopRestart | None) -> None:
            if restart is None:
                begin, _ = 0, self.loop.start_fresh()
            else:
                begin = self.step_of(self.loop.prepare(restart))
                self.loop.proof.expect_return(None, lambda: 0)
            with self.loop.attempting():
                self.loop.begins(begin, {}, {})
                for step in range(begin + 1, steps + 1):
                    self.steps.append(step)
                    self.loop.proof.drawn(torch.tensor(step), 0)
                    if step % 2 == 0:
                        path = LAYOUT.path_of(self._directory, step)
                        path.mkdir()
                        LAYOUT.mark(path, CheckpointHealth())
                    self.loop.stepped(step)
                    if step == ask_at and restart is None and ask():
                        return
                self.loop.ends()

        self.loop.restarts.run(attempt)


class Telling(Counting):
    """It uses what is optional, too."""

    def __init__(self, medic: trainmedic.Medic, directory: Path) -> None:
        super().__init__(medic, directory)
        self.calls: list[Any] = []

    def abandoned(self, name: str, number: int) -> str:
        return f"{name}.{number}"

    def resume_from(self, step: int) -> None:
        self.calls.append((step, sorted(path.name for path in self._directory.glob("step-*"))))

    def prepare(self, checkpoint: Path, restart: LoopRestart) -> None:
        self.calls.append(checkpoint.name)

    def outcome(self, restart: LoopRestart) -> Mapping[str, Any]:
        return {"data": "others"}


def rolled_back(framework: Counting) -> tuple[str, Mapping[str, Any]]:
    """The answer to a rollback at step 7."""
    answers: list[tuple[str, Mapping[str, Any]]] = []
    command = make_job_command("job.rollback", answers, START, seconds=1e9)
    command.parameters = Rollback()
    framework.train(9, ask_at=7, ask=lambda: framework.loop.roll_back(command))
    [answer] = answers
    return answer


def test_the_required_members_are_enough_to_go_back(tmp_path: Path, medic: trainmedic.Medic) -> None:
    """Steps after the checkpoint are trained again, and the answer states where it went."""
    framework = Counting(medic, tmp_path)
    status, output = rolled_back(framework)
    assert framework.steps == [*range(1, 8), 7, 8, 9]
    assert (status, output["checkpoint"], output["left_step"], output["step"]) == ("applied", "step-6", 7, 7)
    assert output["data"] == "the same batches again"


def test_the_optional_members_are_called_at_their_time(tmp_path: Path, medic: trainmedic.Medic) -> None:
    """The framework learns where it goes on before anything is renamed, and its part of the answer counts."""
    framework = Telling(medic, tmp_path)
    _, output = rolled_back(framework)
    assert framework.calls == [(6, ["step-2", "step-4", "step-6"]), "step-6"]
    assert output["data"] == "others"


def test_what_the_framework_refuses_is_rejected_with_its_reason(tmp_path: Path, medic: trainmedic.Medic) -> None:
    framework = Counting(medic, tmp_path)
    framework.no_skip_because = "its data have no place"
    command = make_job_command("job.rollback", [], START)
    command.parameters = Rollback(skip_batches=3)
    with pytest.raises(trainmedic.Rejected, match="its data have no place"):
        framework.loop.roll_back(command)


@dataclass(slots=True)
class Settings:
    interval: int = 10


class Held:
    kind = "of the class"

    def save(self) -> str:
        return "saved"


def test_what_is_replaced_is_as_before_afterwards() -> None:
    """An inherited attribute is inherited again, one in a slot or of the object itself has its value."""
    held, settings = Held(), Settings()
    vars(held)["own"] = 1
    with replaced(held, save=lambda: "not saved", own=2), replaced(settings, interval=1), replaced(Held, kind="other"):
        assert (held.save(), vars(held)["own"], settings.interval, held.kind) == ("not saved", 2, 1, "other")
    assert (held.save(), vars(held), settings.interval, held.kind) == ("saved", {"own": 1}, 10, "of the class")
