"""In-memory checkpoints of several ranks, which are killed: real processes under torchrun, with DDP and with FSDP."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.integration.plain_torch.memory_ranks import EVERY, HOLD
from tests.support.long_tests import some_of
from tests.support.messages import make_command
from tests.support.rank_processes import RankProcesses, ask, until_present
from trainmedic.wire import envelope
from trainmedic_server.adapters.redis_bus import RedisBus

PROGRAM = Path(__file__).with_name("memory_ranks.py")
RANKS = 2
STEPS = 52
NEWEST = HOLD // EVERY * EVERY


@pytest.fixture
def shared(job: RankProcesses) -> Path:
    """In place of ``/dev/shm``."""
    directory = job.directory / "shared"
    directory.mkdir()
    return directory


async def reached(job: RankProcesses, step: int, ranks: int = RANKS) -> None:
    async with asyncio.timeout(90):
        for rank in range(ranks):
            path = job.directory / f"at-{rank}"
            while not path.exists() or int(path.read_text() or 0) < step:
                assert job.processes[-1].poll() is None, job.log()
                await asyncio.sleep(0.02)


def resumed(job: RankProcesses, rank: int) -> list[int | None]:
    """The steps from which the rank's processes have gone on, one after the other."""
    lines = (job.directory / f"resumed-{rank}.jsonl").read_text().splitlines()
    return [json.loads(line)["step"] for line in lines]


async def ended(job: RankProcesses, ranks: int = RANKS) -> None:
    """To the bit where a training ends to which nothing happened."""
    assert await asyncio.to_thread(job.processes[-1].wait, 90) == 0, job.log()
    for rank in range(ranks):
        trained, expected = (torch.load(job.directory / f"{name}-{rank}.pt") for name in ("ended", "calm"))
        assert trained["step"] == expected["step"]
        for name in ("parameters", "moments", "buffers"):
            pairs = zip(trained[name], expected[name], strict=True)
            assert all(torch.equal(mine, theirs) for mine, theirs in pairs), name
        assert torch.equal(trained["random"], expected["random"])


def start(job: RankProcesses, shared: Path, kind: str, *steps: str, ranks: int = RANKS, **environment: str) -> Any:
    environment = {"TRAINMEDIC_SHARED_MEMORY": str(shared), **environment}
    arguments = ("-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}", "--max-restarts=1")
    return job.start(*arguments, str(PROGRAM), kind, *steps, **environment)


@pytest.mark.parametrize("kind", ["ddp"])
async def test_a_killed_rank_costs_the_steps_since_the_last_copy(kind: str, job: RankProcesses, shared: Path) -> None:
    """torchrun restarts all ranks, and they resume from their shared memory; the only checkpoint on the
    disk is that of the beginning."""
    start(job, shared, kind, str(STEPS))
    await reached(job, HOLD)
    os.kill(job.pids(1)[-1], signal.SIGKILL)
    (job.directory / "go").touch()
    await ended(job)
    assert [resumed(job, rank)[:2] for rank in range(RANKS)] == [[None, NEWEST]] * RANKS
    assert not list(shared.rglob("slot-*"))  # given back at the end


@pytest.mark.long
@pytest.mark.parametrize("kind", some_of(["ddp", "fsdp"]))
async def test_checkpoints_written_in_the_background_are_complete(kind: str, job: RankProcesses, shared: Path) -> None:
    """When all processes are killed and memory is empty, they resume from it, to the bit."""
    start(job, shared, kind, str(STEPS), DISK_EVERY="20")
    await reached(job, HOLD)
    async with asyncio.timeout(60):
        while not (job.directory / "saved" / "step-00000020" / ".trainmedic-complete").exists():
            await asyncio.sleep(0.05)
    threads = [line for line in job.log().splitlines() if "wrote the checkpoint of step 20 in" in line]
    assert len(threads) == 1  # by rank 0, in the background
    shutil.rmtree(shared)
    shared.mkdir()
    for rank in range(RANKS):
        os.kill(job.pids(rank)[-1], signal.SIGKILL)
    (job.directory / "go").touch()
    await ended(job)
    assert [resumed(job, rank)[:2] for rank in range(RANKS)] == [[None, 20]] * RANKS


@pytest.mark.long
@pytest.mark.parametrize("kind", ["fsdp"])
async def test_ranks_roll_back_to_memory_together(
    kind: str, job: RankProcesses, shared: Path, bus: RedisBus, redis_server: Any
) -> None:
    """All ranks load the same checkpoint, to the bit."""
    (job.directory / "go").touch()
    start(job, shared, kind)
    await until_present(redis_server.url, job, RANKS)
    await reached(job, HOLD)
    replies = await ask(bus, make_command("job.rollback", params={"steps_back": 3}))
    assert [reply.status for reply in replies.values()] == [envelope.APPLIED] * RANKS, replies
    outputs = [reply.output for reply in replies.values()]
    assert {output["checkpoint"] for output in outputs} == {outputs[0]["checkpoint"]}
    assert outputs[0]["checkpoint"].startswith("memory-step-")
    for output in outputs:
        verified = output["verified"]["parameters"]
        assert verified["compared"] == verified["agreed"] > 0
    assert outputs[0]["left_step"] - outputs[0]["step"] in range(3, 3 + EVERY)
    for output in outputs:
        parameters = output["verified"]["parameters"]
        assert parameters["compared"] == parameters["agreed"] > 0, parameters
    await ask(bus, make_command("job.stop", params={"checkpoint": False}))
    await ended(job)


@pytest.mark.parametrize("kind", some_of(["fsdp", "ddp"]))
async def test_the_memory_of_a_lost_node_is_on_its_neighbour(kind: str, job: RankProcesses, shared: Path) -> None:
    """Its shared memory and its process are lost; the job resumes from the newest checkpoint of which
    the other node has a copy, on all ranks."""
    start(job, shared, kind, str(STEPS))
    await reached(job, HOLD)

    def copied() -> set[int]:
        """The steps of which every node has the other's part."""
        marks = [shared.glob(f"*/*/node-{1 - rank}/replica-{rank:05d}/slot-*.json") for rank in range(RANKS)]
        steps = [{json.loads(mark.read_text())["step"] for mark in found} for found in marks]
        return set.intersection(*steps)

    async with asyncio.timeout(60):
        while not copied():
            assert job.processes[-1].poll() is None, job.log()
            await asyncio.sleep(0.05)
    newest = max(copied())
    (lost,) = shared.glob("*/*/node-0")
    shutil.rmtree(lost)
    os.kill(job.pids(0)[-1], signal.SIGKILL)
    (job.directory / "go").touch()
    await ended(job)
    steps = {resumed(job, rank)[1] for rank in range(RANKS)}
    assert len(steps) == 1
    assert (steps.pop() or 0) >= newest >= EVERY
    assert not list(shared.rglob("slot-*"))
