"""``trainmedic-run -- torchrun …``: a real DDP training that dies in the middle goes on from its newest checkpoint."""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import RedisServer
from tests.integration.launch.launched import Launched
from tests.support.command_sender import Commander

Launch = Callable[..., Launched]
STEPS = 40


def torchrun(directory: Path, accident: str, ranks: int = 2, steps: int = STEPS) -> list[str]:
    program = Path(__file__).with_name("fragile_job.py")
    run = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    return [*run, str(program), str(directory), accident, str(steps)]


def result(directory: Path, rank: int = 0) -> Any:
    return json.loads((directory / f"result-{rank}.json").read_text())


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """What a training comes to that meets with no accident."""
    directory = tmp_path_factory.mktemp("undisturbed")
    job = Launched(directory, torchrun(directory, "none"))
    assert job.wait() == 0, job.printed()
    return result(directory)


def test_a_rank_that_dies_costs_the_steps_since_the_checkpoint(
    launch: Launch, tmp_path: Path, undisturbed: Any
) -> None:
    """The result equals that of an undisturbed training, bit for bit; each rank's output is stored."""
    job = launch(torchrun(tmp_path, "killed"), "--delay=0s")
    assert job.wait() == 0, job.printed()
    (failed,) = job.attempts()
    assert (failed["status"], failed["rank"]) == (-9, 1), failed
    for rank in (0, 1):
        assert result(tmp_path, rank) == {**undisturbed, "resumed": 20}
    (kept,) = job.kept().path.glob("ranks-*/**/1/stdout.log")
    assert kept.read_text().startswith("rank 1 begins at None\n")
    job.wait_until_all_are_gone()


def test_a_hang_in_a_collective_is_ended_and_the_job_continues(
    launch: Launch, tmp_path: Path, undisturbed: Any
) -> None:
    """A rank never reaches its collective, whose own timeout has not passed."""
    job = launch(torchrun(tmp_path, "hangs"), "--delay=0s", "--hang-after=3s", "--grace=5s")
    assert job.wait() == 0, job.printed()
    (failed,) = job.attempts()
    assert (failed["cause"], failed["checkpoint"]) == ("the job hung", 20)
    assert result(tmp_path) == {**undisturbed, "resumed": 20}


@pytest.mark.long
def test_a_waiting_rollback_ends_the_hang_and_the_next_attempt_carries_it_out(
    launch: Launch, tmp_path: Path, undisturbed: Any, redis_server: RedisServer
) -> None:
    """Long before the hang would be ended by itself. It restores the right one, not just the newest checkpoint;
    each rank answers it, and the training comes to what it would have come to."""
    commander = Commander(redis_server.url, "fragile")
    options = ("--delay=0s", "--hang-after=1h", "--grace=5s")
    job = launch(torchrun(tmp_path, "hangs"), *options, STEP_SECONDS="0.2", TRAINMEDIC_REDIS_URL=redis_server.url)
    try:
        job.wait_for_output("comes to no collective")
        command = commander.send("job.rollback", 300.0, step=10)
        assert job.wait() == 0, job.printed()
        final = {reply.rank: reply for reply in commander.replies(command) if reply.is_final}
    finally:
        commander.close()
    (failed,) = job.attempts()
    assert (failed["cause"], failed["checkpoint"]) == ("the job hung", 20)
    assert "and a rollback waits; ending the attempt" in job.printed()
    assert {rank: (reply.status, reply.output["step"]) for rank, reply in final.items()} == {
        0: ("applied", 10),
        1: ("applied", 10),
    }
    assert result(tmp_path) == {**undisturbed, "resumed": 20}


@pytest.mark.long
def test_a_job_that_always_fails_at_the_same_place_is_given_up(launch: Launch, tmp_path: Path) -> None:
    """After three attempts that reach the same step and fail by the same error. Each rank's account is stored: the
    error in torchrun's own file, with which torchrun names it in its summary, and the rank's records."""
    job = launch(torchrun(tmp_path, "raises"), "--job=fragile", "--delay=0s", "--retries=9")
    assert job.wait() == 1
    kept = job.kept(2)
    (error,) = kept.path.glob("ranks-*/**/1/error.json")
    assert json.loads(error.read_text())["message"]["message"] == "ValueError: a bad batch"
    assert "ValueError: a bad batch" in job.printed().partition("Root Cause (first observed failure)")[2]
    records = [json.loads(line) for line in kept.records(1).read_text().splitlines()]
    events = [record["event"] for record in records]
    assert (events[0], events[-2:]) == ("restart", ["exception", "end"])
    assert {(record["rank"], record["local_rank"], record["attempt"]) for record in records} == {(1, 1, 2)}
    assert "checkpoint" in [json.loads(line)["event"] for line in job.kept(1).records(0).read_text().splitlines()]
    assert {attempt["cause"] for attempt in job.attempts()} == {"rank 1 ended with exit code 1 (ValueError)"}
    assert "without progress in between" in job.printed()


def test_a_preemption_ends_the_ranks_without_another_attempt(launch: Launch, tmp_path: Path) -> None:
    """A scheduler, for example, sends SIGTERM from outside."""
    job = launch(torchrun(tmp_path, "none", steps=100_000))
    job.wait_for_output("rank 1 begins")
    job.process.send_signal(signal.SIGTERM)
    assert job.wait() != 0
    assert job.attempts() == []
    job.wait_until_all_are_gone()


def test_no_rank_outlives_a_killed_launcher(launch: Launch, tmp_path: Path) -> None:
    """Nor do torchrun and its loaders."""
    job = launch(torchrun(tmp_path, "none", steps=100_000), "--grace=5s")
    job.wait_for_output("rank 1 begins")
    os.kill(job.process.pid, signal.SIGKILL)
    job.process.wait()
    job.wait_until_all_are_gone()


def test_a_warm_attempt_reaches_the_same_result(launch: Launch, tmp_path: Path, undisturbed: Any) -> None:
    """The ranks of every attempt are forks of a process that has already imported PyTorch, and torchrun says how the
    first one ended."""
    job = launch(torchrun(tmp_path, "killed"), "--delay=0s", "--warm", STEP_SECONDS="0.7")
    assert job.wait() == 0, job.printed()
    (failed,) = job.attempts()
    assert (failed["status"], failed["rank"]) == (-9, 1), failed
    for rank in (0, 1):
        assert result(tmp_path, rank) == {**undisturbed, "resumed": 20}
    first, second = (next(job.kept(number).path.glob("ranks-*/**/1/stdout.log")).read_text() for number in (1, 2))
    assert second.startswith("rank 1 begins at 20\n")
    assert "--warm has no effect" not in job.printed()
    assert "in a process that was warm\n" in first
    assert "in a process that was warm\n" in second
    job.wait_until_all_are_gone()


@pytest.mark.parametrize("options", [(), ("--warm",)], ids=["cold", "warm"])
def test_torchrun_itself_restarts_the_ranks(launch: Launch, tmp_path: Path, options: tuple[str, ...]) -> None:
    """It uses --max-restarts. The ranks of the second group find each other, not those of the first."""
    script = tmp_path / "train.py"
    script.write_text("""
import os, signal, torch, torch.distributed as dist
dist.init_process_group("gloo")
dist.barrier()
if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0" and dist.get_rank() == 1:
    os.kill(os.getpid(), signal.SIGKILL)
total = torch.ones(1)
dist.all_reduce(total)
print(f"rank {dist.get_rank()} sees {int(total)} after {os.environ['TORCHELASTIC_RESTART_COUNT']} restarts", flush=True)
dist.destroy_process_group()
""")
    run = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "--max-restarts=1"]
    job = launch([*run, str(script)], "--retries=0", *options)
    assert job.wait() == 0, job.printed()
    assert all(f"rank {rank} sees 2 after 1 restarts" in job.printed() for rank in (0, 1)), job.printed()
    assert job.attempts() == []
