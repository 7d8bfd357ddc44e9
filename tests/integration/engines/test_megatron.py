"""Trainings by Megatron-LM's functions or their stand-in, of two ranks under torchrun, commanded by the server's bus.

With ``TRAINMEDIC_TEST_MEGATRON`` set to a checkout of Megatron-LM without its folder ``tests`` it is its own
``pretrain_gpt.py``, unmodified; ``PYTHONPATH`` has to name what that imports.
"""

from __future__ import annotations

import asyncio
import json
import os
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.long_tests import some_of
from tests.support.messages import make_command
from tests.support.programs import PYTHON_PATH
from tests.support.rank_processes import RankProcesses, ask, until_present
from trainmedic.wire import envelope
from trainmedic_server.adapters.redis_bus import RedisBus

PROGRAM = str(Path(__file__).with_name("megatron_training.py"))
ITSELF = os.environ.get("TRAINMEDIC_TEST_MEGATRON")
_PATHS = (PYTHON_PATH, ITSELF or "", os.environ.get("PYTHONPATH", ""))
_ITSELF = {"ITSELF": "1", "PYTHONPATH": os.pathsep.join(filter(None, _PATHS)), "CUDA_DEVICE_MAX_CONNECTIONS": "1"}
ENVIRONMENT = _ITSELF if ITSELF else {}
SECONDS = 180
RANKS = 2
CARRIED = 1 if ITSELF else 3
"""What the script has named, and of the stand-in two values of its model."""
BATCHES = {"pipeline": 4, "tensor": 4}  # of a rank, in an iteration; else 2
KINDS: dict[str, dict[str, Any]] = {"pipeline": {}, "data": {}}
if ITSELF:
    KINDS |= {
        "tensor": {},
        # Not the distributed optimizer: without CUDA its Adam is PyTorch's, and Megatron-LM cannot load its state.
        "torch_dist": {"ckpt_format": "torch_dist", "async_save": True},
        # The first 13 iterations are skipped, until the scaled gradients are finite.
        "fp16": {"fp16": True, "initial_loss_scale": 2**32},
    }
SAMPLES = 8  # of all ranks, in an iteration


async def order(bus: RedisBus, action: str, expected: str = envelope.APPLIED, **params: Any) -> dict[str, Any]:
    """What the first rank has answered, once every rank has."""
    replies = await ask(bus, make_command(action, params=params))
    answers = [(replies[rank].status, replies[rank].output) for rank in range(RANKS)]
    assert [status for status, _ in answers] == [expected] * RANKS, answers
    return dict(answers[0][1])


async def until(job: RankProcesses, path: str) -> None:
    """Until there is such a file."""
    async with asyncio.timeout(SECONDS):
        while not (job.directory / path).exists():
            assert job.processes[-1].poll() is None, job.log()
            await asyncio.sleep(0.02)


def start(job: RankProcesses, kind: str, directory: str, **environment: str) -> Any:
    options = {"OPTIONS": json.dumps(KINDS[kind])}
    return job.torchrun(RANKS, PROGRAM, kind, directory, **ENVIRONMENT, **options, **environment)


async def run(job: RankProcesses, kind: str, directory: str, **environment: str) -> None:
    """To its end, with nothing ordered."""
    program = start(job, kind, directory, **environment)
    assert await asyncio.to_thread(program.wait, SECONDS) == 0, job.log()


def weights(job: RankProcesses, directory: str) -> list[torch.Tensor]:
    return [tensor for rank in range(RANKS) for tensor in torch.load(job.directory / f"{directory}-{rank}.pt")]


def are_same(some: list[torch.Tensor], others: list[torch.Tensor]) -> bool:
    return all(torch.equal(one, other) for one, other in zip(some, others, strict=True))


def course(job: RankProcesses, directory: str, rank: int = 0) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (job.directory / f"{directory}-{rank}.jsonl").read_text().splitlines()]


@pytest.mark.long
@pytest.mark.parametrize("kind", some_of(list(KINDS)))
async def test_all_ranks_roll_back_in_the_running_process(
    kind: str, job: RankProcesses, bus: RedisBus, redis_server: Any
) -> None:
    """After rollbacks and a scaled rate that is taken back the training is the same to the bit as one in which nothing
    happened. What a rollback leaves out is left out by iterations, and again by a process that starts from before it.
    Rank 0 reports the loss that the last stage of a pipeline has."""
    start(job, kind, "ordered")
    await until_present(redis_server.url, job, RANKS, seconds=SECONDS)
    await until(job, "ordered/iter_0000020")
    back = await order(bus, "job.rollback", step=10)
    assert (back["checkpoint"], back["skipped_batches"]) == ("iter_0000010", 0)
    assert back["verified"]["carried"]["compared"] == back["verified"]["carried"]["agreed"] >= CARRIED
    losses = back["verified"]["losses"]
    assert losses["compared"] == losses["agreed"] > 0, losses
    assert list(job.directory.glob("ordered/abandoned-1-iter_0000020"))
    slower = make_command("job.scale_lr", params={"factor": 0.5})
    replies = await ask(bus, slower)
    assert [replies[rank].output["scale"] for rank in range(RANKS)] == [0.5] * RANKS
    await order(bus, "job.accumulate", envelope.UNSUPPORTED, factor=2)
    undone = await ask(bus, replace(make_command("job.scale_lr", params={"factor": 2.0}), undo_of=slower.id))
    assert [undone[rank].output["scale"] for rank in range(RANKS)] == [1.0] * RANKS
    await order(bus, "job.rollback", step=10)  # what was trained at half the rate is undone
    await until(job, "ordered/iter_0000030")
    stopped = await order(bus, "job.stop", checkpoint=True)
    last = int(stopped["checkpoint"].removeprefix("iter_"))
    assert await asyncio.to_thread(job.processes[-1].wait, SECONDS) == 0, job.log()
    await run(job, kind, "calm", ITERATIONS=str(last), ALONE="1")
    assert are_same(weights(job, "ordered"), weights(job, "calm"))
    assert all(line["reported"] is not None for line in course(job, "ordered")[1:])

    start(job, kind, "ordered")
    await until_present(redis_server.url, job, RANKS, pids=2, seconds=SECONDS)
    left_out = await order(bus, "job.rollback", step=20, skip_batches=5)
    iterations = -(-5 // BATCHES.get(kind, 2))
    assert left_out["skipped_batches"] == iterations * BATCHES.get(kind, 2)
    shutil.copytree(job.directory / "ordered", job.directory / "again", ignore=shutil.ignore_patterns("abandoned-*"))
    stopped = await order(bus, "job.stop", checkpoint=True)
    last = int(stopped["checkpoint"].removeprefix("iter_"))
    assert await asyncio.to_thread(job.processes[-1].wait, SECONDS) == 0, job.log()
    samples = [line["sample"] for line in course(job, "ordered")]
    begin = len(samples) - (last - 20 - iterations)
    assert samples[begin:] == [SAMPLES * number for number in range(20 + iterations, last)]
    # A job that died right after the rollback, before it had saved anything.
    (job.directory / "again" / "latest_checkpointed_iteration.txt").write_text("20")
    await run(job, kind, "again", ITERATIONS=str(last))
    assert are_same(weights(job, "again"), weights(job, "ordered"))
    assert [line["sample"] for line in course(job, "again")] == samples[begin:]
