"""Trainings around real DeepSpeed engines, of two ranks under torchrun, commanded by the server's own bus."""

from __future__ import annotations

import asyncio
import os
import sys
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

ENGINES = Path(sys.prefix) / "engines"
"""Where `scripts/setup all` installs what is not to be seen by the other frameworks."""
ENVIRONMENT = {"PYTHONPATH": os.pathsep.join((PYTHON_PATH, str(ENGINES))), "DS_ACCELERATOR": "cpu"}
PROGRAM = Path(__file__).with_name("deepspeed_training.py")
RANKS = 2
SECONDS = 240
"""For each part of it, where the machine is busy: two processes import DeepSpeed, and train three times."""
CARRIED = 5
"""What the loop has named, the model's three values beside its weights, and the generator of the data set."""


async def order(bus: RedisBus, action: str, expected: str = envelope.APPLIED, **params: Any) -> dict[Any, Any]:
    """What each rank has answered."""
    replies = await ask(bus, make_command(action, params=params))
    assert [replies[rank].status for rank in range(RANKS)] == [expected] * RANKS, [
        replies[rank].output for rank in range(RANKS)
    ]
    return {rank: replies[rank].output for rank in range(RANKS)}


async def until(job: RankProcesses, file: str, step: int = 0) -> None:
    """Until every rank has written that file; with a step number of at least that in it, where one is given."""
    async with asyncio.timeout(SECONDS):
        for rank in range(RANKS):
            path = job.directory / file.format(rank)
            while not path.exists() or (step and int(path.read_text() or 0) < step):
                assert job.processes[0].poll() is None, job.log()
                await asyncio.sleep(0.02)


def written(job: RankProcesses, name: str) -> list[dict[str, Any]]:
    return [torch.load(job.directory / f"{name}-{rank}.pt", weights_only=False) for rank in range(RANKS)]


def is_same(one: dict[str, Any], other: dict[str, Any]) -> bool:
    """To the bit, and with the same random numbers, rates and data to come."""
    tensors = zip(one["tensors"], other["tensors"], strict=True)
    return all(torch.equal(mine, theirs) for mine, theirs in tensors) and all(
        torch.equal(one[name], other[name]) if name == "random" else one[name] == other[name]
        for name in ("random", "step", "epoch", "rates", "micro", "accumulation", "seen")
    )


@pytest.mark.parametrize(
    ("stage", "weights"), some_of([(3, "bf16"), (1, "bf16"), (2, "fp32"), (0, "fp32"), (0, "bf16")])
)
async def test_engines_roll_back_together_bit_for_bit(
    stage: int, weights: str, job: RankProcesses, bus: RedisBus, redis_server: Any
) -> None:
    """With smaller batches and longer accumulation ordered and then a rollback to the beginning, each rank trains as
    one that was started with those; later rollbacks, a scaled rate that is taken back and a restart leave no trace. A
    checkpoint of which one rank's file is damaged is passed over by all. What is newest and whole is ``latest``. Each
    rank has compared the partitions that it holds, and its batches."""
    torchrun = job.torchrun(RANKS, str(PROGRAM), str(stage), weights, **ENVIRONMENT)
    await until_present(redis_server.url, job, RANKS, seconds=SECONDS)
    await until(job, "at-{}", 3)
    smaller = await order(bus, "job.scale_batch", factor=0.5, keep_global_batch=True)
    assert [(told["after"], told["accumulation_after"]) for told in smaller.values()] == [(2, 2)] * RANKS
    begun = await order(bus, "job.rollback", step=0)
    assert [told["step"] for told in begun.values()] == [0] * RANKS
    assert all(told["data"].startswith("the same samples again") for told in begun.values())  # in smaller batches
    await until(job, "ordered/step-00000030/.trainmedic-complete")  # of now: those from before were put aside
    saved = await order(bus, "job.checkpoint")
    assert saved[0]["checkpoint"] == saved[1]["checkpoint"]
    slower = make_command("job.scale_lr", params={"factor": 0.5})
    replies = await ask(bus, slower)
    assert [replies[rank].output["after"] for rank in range(RANKS)] == [replies[0].output["after"]] * RANKS
    undone = await ask(bus, replace(make_command("job.scale_lr", params={"factor": 2.0}), undo_of=slower.id))
    assert [undone[rank].output["scale"] for rank in range(RANKS)] == [1.0] * RANKS
    # A file that DeepSpeed wrote on the last rank, of the newest checkpoint up to step 30, is damaged; or our own.
    newest = job.directory / "ordered" / "step-00000030"
    part = max(newest.glob("*zero_pp_rank_1_mp_rank_00_*.pt" if stage else "rank-00001.pt"))
    part.write_bytes(part.read_bytes()[::-1])
    back = await order(bus, "job.rollback", step=30)
    assert [told["step"] for told in back.values()] == [20, 20]
    assert "rank 1" in back[0]["unusable"][0]
    assert [told["data"] for told in back.values()] == ["the same batches again"] * RANKS
    for told in back.values():  # of each rank, what it holds and what it has drawn
        assert told["verified"]["parameters"]["compared"] == told["verified"]["parameters"]["agreed"] > 0
        assert told["verified"]["carried"]["compared"] == told["verified"]["carried"]["agreed"] >= CARRIED
        assert told["verified"]["batches"]["compared"] == told["verified"]["batches"]["agreed"] > 0
    await until(job, "at-{}", 25)
    stopped = await order(bus, "job.stop", checkpoint=True)
    assert (job.directory / "ordered" / "latest").read_text() == stopped[0]["checkpoint"]
    assert await asyncio.to_thread(torchrun.wait, SECONDS) == 0, job.log()
    ordered, calm, resumed, further = (written(job, name) for name in ("ordered", "calm", "resumed", "further"))
    for rank in range(RANKS):
        assert {step: ordered[rank]["losses"][step] for step in calm[rank]["losses"]} == calm[rank]["losses"]
        assert is_same(ordered[rank], calm[rank])
        assert is_same(resumed[rank], further[rank])
    assert calm[0]["losses"] != calm[1]["losses"]  # each on data of its own
