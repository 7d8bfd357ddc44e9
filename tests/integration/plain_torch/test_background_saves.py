"""Checkpoints that are written to the disk in the background, in a training of one rank."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.integration.plain_torch.training import Training
from trainmedic.recovery import checkpoints
from trainmedic.torch import Memory
from trainmedic.torch.checkpoints import checkpoint_storage
from trainmedic.torch.checkpoints.checkpoint_tiers import TieredCheckpoints

Begin = Callable[..., Training]

pytestmark = pytest.mark.usefixtures("shared")


class Disk:
    """The disk of a training, which can be held up, and can be full."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.moves = threading.Event()
        self.moves.set()
        self.is_full = threading.Event()
        self.threads: list[str] = []
        write = checkpoint_storage.write_file

        def write_file(path: Path, content: Any) -> int:
            self.threads.append(threading.current_thread().name)
            assert self.moves.wait(60)
            size = write(path, content)
            if self.is_full.is_set():
                raise OSError(28, "No space left on device")
            return size

        monkeypatch.setattr(checkpoint_storage, "write_file", write_file)


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> Disk:
    return Disk(monkeypatch)


def settle(training: Training) -> Callable[[], Any]:
    """An act that waits until what is done in the background is done."""

    def act() -> None:
        storage = training.run.training.storage
        assert isinstance(storage, TieredCheckpoints)
        storage.memory.background.settle(60)
        if storage.background is not None:
            storage.background.settle()

    return act


def options(tmp_path: Path, **more: Any) -> dict[str, Any]:
    memory = Memory(every=1000, asynchronous=True)
    return {"directory": tmp_path / "saved", "memory": memory, **more}


def flattened(state: Any) -> list[Any]:
    if isinstance(state, torch.Tensor):
        return [state.dtype, *state.flatten().tolist()]
    if isinstance(state, Mapping):
        return [entry for name in state for entry in (name, *flattened(state[name]))]
    return [entry for each in state for entry in flattened(each)] if isinstance(state, (list, tuple)) else [state]


def saved(directory: Path) -> list[int]:
    return sorted(int(path.parent.name.split("-")[1]) for path in directory.glob(f"step-*/{checkpoints.COMPLETE}"))


def test_background_saves_write_the_same_files(begin: Begin, tmp_path: Path, disk: Disk) -> None:
    """Though training continues meanwhile: the same files with the same content, in a usual size, for any reader."""
    training = begin(**options(tmp_path))
    training.train(40, {step: settle(training) for step in range(8, 41)})
    training.run.close()
    assert set(disk.threads[4:]) == {"trainmedic-checkpoint"}  # the first two find no memory yet
    calm = begin(directory=tmp_path / "calm")
    calm.train(40)
    assert saved(tmp_path / "saved") == saved(tmp_path / "calm") == [0, 10, 20, 30, 40]
    for step in (20, 40):
        for name in ("training.pt", "run.pt"):
            ours, theirs = (tmp_path / kind / f"step-{step:08d}" / name for kind in ("saved", "calm"))
            states = [torch.load(file) for file in (ours, theirs)]
            for state in states:
                for name_of_reported in ("loss", "health", "follows_schedule"):  # which reports are read, time decides
                    state.pop(name_of_reported, None)
            assert flattened(states[0]) == flattened(states[1])
            assert ours.stat().st_size < 1.2 * theirs.stat().st_size
    assert begin(directory=tmp_path / "saved").run.resume() == 40
    assert not list((tmp_path / "saved").glob("unfinished-*"))


def test_training_does_not_wait_for_a_slow_disk(
    begin: Begin, tmp_path: Path, disk: Disk, caplog: pytest.LogCaptureFixture
) -> None:
    """One checkpoint is written at a time, others due during this time are skipped; the end waits for the last."""
    training = begin(**options(tmp_path))
    acts: dict[int, Any] = {step: settle(training) for step in range(8, 19)}
    training.train(59, acts | {19: disk.moves.clear})
    assert saved(tmp_path / "saved") == [0, 10]
    assert "no checkpoint of step 30: the one before is still being written" in caplog.text
    threading.Timer(0.3, disk.moves.set).start()
    training.run.close()
    assert saved(tmp_path / "saved") == [0, 10, 20]


def test_a_rollback_during_a_save_abandons_the_checkpoint(begin: Begin, tmp_path: Path, disk: Disk) -> None:
    """It belongs to the abandoned run, so no restart continues from it."""
    training = begin(**options(tmp_path))
    acts: dict[int, Any] = {step: settle(training) for step in range(8, 19)}
    release = threading.Timer(0.5, disk.moves.set)
    back = training.order("job.rollback", step=10, skip_batches=2)
    training.train(22, acts | {19: disk.moves.clear, 21: (release.start, back)})
    training.run.close()
    assert training.outputs()[0]["step"] == 10
    assert saved(tmp_path / "saved") == [0, 10, 20]
    left_out = torch.load(tmp_path / "saved" / "step-00000020" / "run.pt")["feed"]["left_out"]
    assert left_out  # it is of the course that training went on with


def test_a_full_disk_costs_only_the_checkpoint(
    begin: Begin, tmp_path: Path, disk: Disk, caplog: pytest.LogCaptureFixture
) -> None:
    """Nothing is left of it, and the next one is written again."""
    training = begin(**options(tmp_path))
    acts: dict[int, Any] = {step: settle(training) for step in range(8, 41)}
    training.train(40, acts | {19: disk.is_full.set, 25: (settle(training), disk.is_full.clear)})
    training.run.close()
    assert saved(tmp_path / "saved") == [0, 10, 30, 40]
    assert "no checkpoint of step 20: OSError: [Errno 28] No space left on device" in caplog.text
    assert not list((tmp_path / "saved").glob("unfinished-*"))
