"""In-memory checkpoints of a training of one rank: going back to them, and finding them after the process has died."""

from __future__ import annotations

import json
import resource
import shutil
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.integration.plain_torch.training import Training, same
from trainmedic.torch import Memory
from trainmedic.torch.memory.memory_start import MemoryStart

Begin = Callable[..., Training]

pytestmark = pytest.mark.usefixtures("shared")


def settled(training: Training) -> Training:
    """Once what it does in the background is done."""
    memory = training.run.training.memory
    assert memory is not None
    assert memory.background.settle(30)
    return training


def in_memory(training: Training) -> list[int]:
    memory = settled(training).run.training.memory
    assert memory is not None
    return [checkpoint.step for checkpoint in memory.checkpoints()]


def pause(training: Training) -> Callable[[], Any]:
    return lambda: settled(training)


def options(tmp_path: Path, **more: Any) -> dict[str, Any]:
    return {
        "directory": tmp_path / "saved",
        "checkpoint_every": 100,
        "memory": Memory(every=5, share=1e6),
        **more,
    }


def test_a_rollback_uses_a_nearer_memory_checkpoint_and_repeats_to_the_bit(begin: Begin, tmp_path: Path) -> None:
    """It restores weights, moments, schedule, EMA, random numbers and data position as from disk."""
    training = begin(**options(tmp_path))
    wait = {step: pause(training) for step in range(4, 60)}
    training.train(33, wait | {32: training.order("job.rollback", steps_back=1)})
    (output,) = training.outputs()
    assert output["step"] == 30
    assert output["checkpoint"].startswith("memory-step-00000030-")
    assert output["data"] == "the same batches again"
    verified = output["verified"]["parameters"]
    assert verified["compared"] == verified["agreed"] > 4 * 3  # of each parameter itself, and its two moments
    calm = begin(directory=tmp_path / "calm")
    calm.train(33)
    assert same(training.state(), calm.state())
    assert training.losses == calm.losses
    assert training.seen[-3:] == calm.seen[-3:]


def test_a_crashed_process_resumes_from_its_memory_checkpoint(begin: Begin, tmp_path: Path) -> None:
    """Its successor loses the steps since the last copy, not those since the last checkpoint on disk."""
    dead = begin(**options(tmp_path))

    def die() -> None:
        settled(dead)
        raise MemoryError("a crash")

    with pytest.raises(MemoryError), dead.run:
        dead.train(48, {step: pause(dead) for step in range(4, 47)} | {48: die})
    successor = begin(**options(tmp_path))
    assert successor.run.resume() == 45
    successor.train(60)
    calm = begin(directory=tmp_path / "calm")
    calm.train(60)
    assert same(successor.state(), calm.state())
    assert {step: calm.losses[step] for step in range(46, 61)} == successor.losses


def test_an_orderly_end_leaves_nothing_in_memory(begin: Begin, tmp_path: Path, shared: Path) -> None:
    """A training that starts from scratch does not see what an earlier one has left, either."""
    training = begin(**options(tmp_path))
    training.train(20, {step: pause(training) for step in range(4, 20)})
    assert in_memory(training) == [10, 15, 20]
    assert list(shared.rglob("slot-*"))
    training.run.close()
    assert list(shared.rglob("*")) == [next(shared.iterdir())]
    assert begin(**options(tmp_path)).run.resume() == 0


def test_rollbacks_survive_a_swept_shared_memory(
    begin: Begin, tmp_path: Path, shared: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A login manager can remove the files of its user. Only a restart does not find them, which the log says,
    once."""
    training = begin(**options(tmp_path))

    def sweep() -> None:
        settled(training)
        shutil.rmtree(next(shared.iterdir()))

    wait: dict[int, Any] = {step: pause(training) for step in range(4, 60)}
    training.train(53, wait | {22: sweep, 52: training.order("job.rollback", steps_back=1)})
    (output,) = training.outputs()
    assert output["checkpoint"].startswith("memory-step-00000050-")
    assert output["verified"]["parameters"]["agreed"] == output["verified"]["parameters"]["compared"] > 0
    assert caplog.text.count("a restart will not find the checkpoints in memory") == 1
    assert "Traceback" not in caplog.text


def test_a_failed_setup_is_repaired_before_the_first_step(
    begin: Begin, tmp_path: Path, shared: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Another process of the training may end at the same moment and remove its directory."""
    original, fails = MemoryStart._remove_unused, [True]

    def remove_others(self: MemoryStart, *arguments: Any) -> None:
        if fails:
            fails.clear()
            raise FileNotFoundError("it was there a moment ago")
        original(self, *arguments)

    monkeypatch.setattr(MemoryStart, "_remove_unused", remove_others)
    training = begin(**options(tmp_path))
    training.run.resume()
    training.train(20, {step: pause(training) for step in range(4, 20)})
    assert in_memory(training) == [10, 15, 20]
    assert list(shared.rglob("slot-*"))
    assert "held by another run" not in caplog.text


def test_a_damaged_memory_checkpoint_is_skipped(begin: Begin, tmp_path: Path, shared: Path) -> None:
    """The next older one is used, and the answer reports it; nothing of the damaged one is loaded."""
    training = begin(**options(tmp_path))

    def damage() -> None:
        settled(training)
        (mark,) = [file for file in shared.rglob("slot-*.json") if json.loads(file.read_text())["step"] == 30]
        with mark.with_suffix("").open("r+b") as file:
            file.seek(100)
            byte = file.read(1)
            file.seek(100)
            file.write(bytes([byte[0] ^ 1]))

    wait = {step: pause(training) for step in range(4, 60)}
    training.train(33, wait | {32: (damage, training.order("job.rollback", steps_back=1))})
    (output,) = training.outputs()
    assert output["step"] == 25
    assert "was damaged in memory" in output["unusable"][0]
    calm = begin(directory=tmp_path / "calm")
    calm.train(33)
    assert same(training.state(), calm.state())


def test_training_continues_without_memory(begin: Begin, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Shared memory is full: the log reports it once, and rollbacks use the disk."""
    training = begin(**options(tmp_path))
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (60_000, hard))
    try:
        training.train(20, {step: pause(training) for step in range(4, 21)})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert in_memory(training) == []
    assert caplog.text.count("cannot allocate the memory") == 1
    training.train(33, {32: training.order("job.rollback", steps_back=1)})
    assert training.outputs()[0]["step"] == 0


def test_a_limit_that_is_too_small_is_reported(begin: Begin, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    training = begin(**options(tmp_path, memory=Memory(every=5, share=1e6, limit=100_000)))
    training.train(20, {step: pause(training) for step in range(4, 21)})
    assert in_memory(training) == []
    assert "2 slots of 0.1 MB are needed, but the limit is 0.1 MB" in caplog.text


class Unpicklable:
    """A part whose state cannot be written down."""

    def state_dict(self) -> dict[str, Any]:
        return {"lock": threading.Lock()}

    def load_state_dict(self, state: Any) -> None:
        raise AssertionError("there is none")


def test_a_state_that_cannot_be_copied_does_not_stop_the_training(
    begin: Begin, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """After three attempts no more copies are made, and the log gives the reason."""
    training = begin(**options(tmp_path, also={"odd": Unpicklable()}, checkpoint_every=None))
    training.train(60, {step: pause(training) for step in range(4, 60)})
    assert training.run.global_step == 60
    lines = [record.message for record in caplog.records if "no in-memory checkpoint" in record.message]
    assert len(lines) == 3
    assert "no more are made: TypeError: cannot pickle" in lines[-1]


def test_the_copy_interval_follows_the_cost_of_a_copy(
    begin: Begin, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """At this share a copy at each step costs too much; the log states how many are made."""
    caplog.set_level("INFO", "trainmedic")
    training = begin(**options(tmp_path, memory=Memory(every=1, share=0.01)))
    training.train(300)
    memory = settled(training).run.training.memory
    assert memory is not None
    assert memory.cadence.interval > 5
    assert "an in-memory checkpoint every" in caplog.text


def test_a_non_finite_memory_checkpoint_is_unhealthy(begin: Begin, tmp_path: Path, every_report_counts: None) -> None:
    """A copy with a NaN among its weights is skipped, although no loss has shown it yet."""
    training = begin(**options(tmp_path))

    def spoil() -> None:
        settled(training)
        with torch.no_grad():
            training.model[3].bias.fill_(float("nan"))

    finite: dict[int, Any] = {}

    def look() -> None:
        memory = settled(training).run.training.memory
        assert memory is not None
        finite.update({each.step: each.health.finite for each in memory.checkpoints() if each.health is not None})

    wait = {step: pause(training) for step in range(4, 60)}
    training.train(33, wait | {28: spoil, 32: (look, training.order("job.rollback", steps_back=1))})
    assert {step: finite[step] for step in (20, 25, 30)} == {20: True, 25: True, 30: False}
    assert training.outputs()[0]["step"] in (20, 25)
    assert all(bool(tensor.isfinite().all()) for tensor in training.state())
