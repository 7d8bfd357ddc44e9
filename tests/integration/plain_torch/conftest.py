"""What the tests of plain PyTorch training share: a server's part over a real Redis, and a small training."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import trainmedic
from tests.integration.plain_torch.training import Training
from tests.support.command_sender import Commander, Sent
from trainmedic.job import progress
from trainmedic.recovery import memory_slots


@pytest.fixture
def medic(commander: Commander) -> Iterator[trainmedic.Medic]:
    with commander.connect() as connected:
        yield connected


@pytest.fixture
def sent(commander: Commander, medic: trainmedic.Medic) -> Sent:
    return Sent(commander, medic)


@pytest.fixture
def begin(commander: Commander, medic: trainmedic.Medic, tmp_path: Path) -> Iterator[Callable[..., Training]]:
    """Begin a training; each is ended with the test."""
    begun: list[Training] = []

    def make(**options: Any) -> Training:
        begun.append(Training(commander, options.pop("medic", medic), options.pop("directory", tmp_path), **options))
        return begun[-1]

    yield make
    for training in begun:
        training.run.close()


@pytest.fixture
def every_report_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps of a fraction of a millisecond would be too many to take the tensors of each."""
    monkeypatch.setattr(progress, "TENSOR_INTERVAL", 0.0)


@pytest.fixture
def shared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory in place of ``/dev/shm``."""
    directory = tmp_path / "shared"
    directory.mkdir()
    monkeypatch.setenv(memory_slots.ENVIRONMENT, str(directory))
    return directory
