"""A step that hangs is ended when a command waits that helps it: real processes, a real Redis."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.support.command_sender import Commander
from tests.support.programs import PYTHON_PATH, Program, eventually

JOB = Path(__file__).with_name("hanging_job.py")


@contextmanager
def hanging(commander: Commander, directory: Path, *ways: str) -> Iterator[Program]:
    """The job, which ends by itself when its hangs are over."""
    argv = [sys.executable, JOB, commander.url, directory, *ways]
    with Program(argv, directory / "job.log", {"PYTHONPATH": PYTHON_PATH}) as job:
        yield job
        assert job.process.wait(timeout=30) == 0, job.tail()


def wait_for_hang(job: Program, how: str) -> None:
    def printed() -> bool:
        assert job.process.poll() is None, job.tail()
        return f"hangs: {how}" in job.log.read_text()

    eventually(printed, 90, f"the hang {how}", every=0.05)


def test_a_hanging_step_is_rolled_back(commander: Commander, tmp_path: Path) -> None:
    """With a lock, a sleep, a socket or a loop that swallows every exception, the rollback is applied, and
    training goes on to its end. A handler of the same signal from before is called for what is not ours."""
    with hanging(commander, tmp_path, "event", "sleep", "socket", "swallow") as job:
        sent = []
        for how in ("event", "sleep", "socket", "swallow"):  # the next one ends the comparison after the last
            wait_for_hang(job, how)
            sent.append(commander.send("job.rollback", seconds=300))
        for reply in [commander.final(each, within=120) for each in sent]:
            assert reply.status == "applied", (reply, job.tail())
            assert (reply.output["step"], reply.output["left_step"]) == (7, 7)
    assert "finished 40 others heard" in job.log.read_text()
    assert job.log.read_text().count("hung and was interrupted") == 4


def test_a_data_loader_with_a_stuck_worker_is_restarted(commander: Commander, tmp_path: Path) -> None:
    """Its processes are ended, and new ones deliver the same batches again."""
    with hanging(commander, tmp_path, "worker") as job:
        wait_for_hang(job, "worker")  # told at the end of step 8; the batch of step 9 does not come
        reply = commander.final(commander.send("job.rollback", seconds=120))
        assert (reply.status, reply.output.get("step")) == ("applied", 7), (reply, job.tail())
        assert reply.output["data"] == "the same batches again"
    assert "finished 16" in job.log.read_text()
    assert "the data loader hung and was interrupted" in job.log.read_text()


def test_only_a_hanging_step_is_interrupted_and_only_where_it_helps(commander: Commander, tmp_path: Path) -> None:
    """An evaluation between two steps is not interrupted, nor is a step for a rollback that would be rejected,
    or for another learning rate. A stop ends it, without a checkpoint: half a step is no state to go on from."""
    with hanging(commander, tmp_path, "between", "event") as job:
        wait_for_hang(job, "between")
        reply = commander.final(commander.send("job.scale_lr", seconds=120, factor=0.5))
        assert (reply.status, reply.output["step"]) == ("applied", 9)
        wait_for_hang(job, "event")
        useless = [
            commander.send("job.rollback", seconds=1.5, before="2020-01-01T00:00:00Z"),
            commander.send("job.scale_lr", seconds=1.5, factor=0.5),
        ]
        eventually(lambda: all(commander.replies(one) for one in useless), 60, "their arrival")
        stop = commander.final(commander.send("job.stop", seconds=120, checkpoint=True))
        assert "interrupted" in stop.output["no_checkpoint"]
    assert job.log.read_text().count("hung and was interrupted") == 1
    assert "finished 15 others heard stopping" in job.log.read_text()
    assert sorted((tmp_path / "saved").glob("step-*"))[-1].name == "step-00000014"
