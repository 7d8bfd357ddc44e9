"""A training of two ranks under torchrun, with DDP and with FSDP, commanded by the server's own bus."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.long_tests import some_of
from tests.support.messages import make_command
from tests.support.rank_processes import RankProcesses, ask, until_present
from trainmedic.wire import envelope
from trainmedic_server.adapters.redis_bus import RedisBus

PROGRAM = Path(__file__).with_name("ranks_training.py")
RANKS = 2


async def order(bus: RedisBus, action: str, expected: str = envelope.APPLIED, **params: Any) -> dict[Any, Any]:
    """What each rank has answered."""
    replies = await ask(bus, make_command(action, params=params))
    assert [replies[rank].status for rank in range(RANKS)] == [expected] * RANKS, replies
    return {rank: replies[rank].output for rank in range(RANKS)}


async def until(job: RankProcesses, file: str, step: int = 0) -> None:
    """Until every rank has written that file; with a step number of at least that in it, where one is given."""
    async with asyncio.timeout(60):
        for rank in range(RANKS):
            path = job.directory / file.format(rank)
            while not path.exists() or (step and int(path.read_text() or 0) < step):
                assert job.processes[0].poll() is None, job.log()
                await asyncio.sleep(0.02)


def written(job: RankProcesses, name: str) -> list[dict[str, Any]]:
    return [torch.load(job.directory / f"{name}-{rank}.pt", weights_only=False) for rank in range(RANKS)]


def is_same(one: dict[str, Any], other: dict[str, Any]) -> bool:
    """To the bit, and with the same random numbers and data to come."""
    tensors = zip(one["tensors"], other["tensors"], strict=True)
    return (
        all(torch.equal(mine, theirs) for mine, theirs in tensors)
        and torch.equal(one["random"], other["random"])
        and one["step"] == other["step"]
        and one["epoch"] == other["epoch"]
    )


@pytest.mark.parametrize("kind", some_of(["ddp", "fsdp"]))
async def test_ranks_roll_back_together_to_the_bit(
    kind: str, job: RankProcesses, bus: RedisBus, redis_server: Any
) -> None:
    """To the start and to later checkpoints, at the same rate; all ranks skip a damaged part; a rank that
    cannot load ends the job on all ranks with the reason, instead of training on with the ranks apart. A sharded
    checkpoint of two ranks is resumed by one, too."""
    torchrun = job.torchrun(RANKS, str(PROGRAM), kind)
    await until_present(redis_server.url, job, RANKS)
    await until(job, "at-{}", 3)
    begun = await order(bus, "job.rollback", step=0)
    assert [(told["step"], told["data"]) for told in begun.values()] == [(0, "the same batches again")] * RANKS
    for told in begun.values():
        parameters, batches = told["verified"]["parameters"], told["verified"]["batches"]
        assert parameters["compared"] == parameters["agreed"] > 0
        assert parameters["ranks"] == RANKS
        assert batches["compared"] == batches["agreed"] > 0
    await until(job, "ordered/step-00000030/.trainmedic-complete")  # of now: those from before were put aside
    saved = await order(bus, "job.checkpoint")
    assert saved[0]["checkpoint"] == saved[1]["checkpoint"]
    slower = make_command("job.scale_lr", params={"factor": 0.5})
    replies = await ask(bus, slower)
    assert [replies[rank].output["after"] for rank in range(RANKS)] == [replies[0].output["after"]] * RANKS
    undone = await ask(bus, replace(make_command("job.scale_lr", params={"factor": 2.0}), undo_of=slower.id))
    assert [undone[rank].output["scale"] for rank in range(RANKS)] == [1.0] * RANKS
    # One part of the newest checkpoint up to step 30 is damaged: all go to the one before.
    part = job.directory / "ordered" / "step-00000030" / "rank-00001.pt"
    part.write_bytes(part.read_bytes()[::-1])
    back = await order(bus, "job.rollback", step=30)
    assert [told["step"] for told in back.values()] == [20, 20]
    assert "rank 1" in back[0]["unusable"][0]
    assert [told["data"] for told in back.values()] == ["the same batches again"] * RANKS
    await until(job, "at-{}", 25)
    stopped = await order(bus, "job.stop", checkpoint=False)
    assert stopped[0]["step"] == stopped[1]["step"]
    await until(job, "resumed-{}.pt")
    ordered, calm, resumed = (written(job, name) for name in ("ordered", "calm", "resumed"))
    for rank in range(RANKS):
        losses = ordered[rank]["losses"]
        assert {step: losses[step] for step in calm[rank]["losses"]} == calm[rank]["losses"]
        assert is_same(ordered[rank], calm[rank])
        assert is_same(resumed[rank], calm[rank])
        assert is_same(written(job, "back")[rank], written(job, "calm-then")[rank])
    assert calm[0]["losses"] != calm[1]["losses"]  # each on data of its own
    await until(job, "broken/step-00000010/.trainmedic-complete")
    await order(bus, "job.rollback", envelope.FAILED, step=10)
    assert await asyncio.to_thread(torchrun.wait, 60) == 0, job.log()
    for rank in range(RANKS):
        told = json.loads((job.directory / f"broken-{rank}.json").read_text())["ended"]
        assert told.startswith("HalfLoaded: a checkpoint was loaded only in part (rank 1: RuntimeError: out of memory)")
    if kind == "fsdp":
        single = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
        alone = job.start(str(PROGRAM), kind, "alone", **single)
        assert await asyncio.to_thread(alone.wait, 60) == 0, job.log()
        found = torch.load(job.directory / "alone-0.pt", weights_only=False)
        before = written(job, "back")[0]
        assert found["step"] == before["step"]
        parameters = before["parameters"]
        assert all(torch.equal(found["parameters"][name], parameters[name]) for name in parameters)
