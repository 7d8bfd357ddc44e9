"""Trainings by torchtitan's ``Trainer`` or its stand-in, of two ranks under torchrun, commanded by the server's bus.

With ``TRAINMEDIC_TEST_TORCHTITAN`` set to a folder (``pip install --target``) it is torchtitan itself.
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

from tests.support.messages import make_command
from tests.support.programs import PYTHON_PATH
from tests.support.rank_processes import RankProcesses, ask, until_present
from trainmedic.wire import envelope
from trainmedic_server.adapters.redis_bus import RedisBus

PROGRAM = str(Path(__file__).with_name("titan_training.py"))
ITSELF = os.environ.get("TRAINMEDIC_TEST_TORCHTITAN")
ENVIRONMENT = {"ITSELF": "1", "PYTHONPATH": os.pathsep.join((PYTHON_PATH, ITSELF))} if ITSELF else {}
RANKS = 2
SECONDS = 180
CARRIED = 1 if ITSELF else 4
"""What the script has named, and of the stand-in two values of its model and the data set's generator."""
BATCHES = 2  # of a rank, in a step


async def order(bus: RedisBus, action: str, expected: str = envelope.APPLIED, **params: Any) -> dict[str, Any]:
    """What the first rank has answered, once every rank has."""
    replies = await ask(bus, make_command(action, params=params))
    answers = [(replies[rank].status, replies[rank].output) for rank in range(RANKS)]
    assert [status for status, _ in answers] == [expected] * RANKS, answers
    return dict(answers[0][1])


async def until(job: RankProcesses, *steps: int, directory: str = "ordered") -> None:
    """Until there are whole checkpoints of these steps."""
    async with asyncio.timeout(SECONDS):
        for step in steps:
            while not (job.directory / f"{directory}/checkpoint/step-{step}/.trainmedic-complete").exists():
                assert job.processes[-1].poll() is None, job.log()
                await asyncio.sleep(0.02)


async def begin(job: RankProcesses, redis_server: Any, directory: str = "ordered") -> None:
    """Until all ranks of it are there."""
    lives = len(job.pids(0))
    job.torchrun(RANKS, PROGRAM, directory, **ENVIRONMENT)
    await until_present(redis_server.url, job, RANKS, pids=lives + 1, seconds=SECONDS)


async def run(job: RankProcesses, directory: str, steps: int, **environment: str) -> None:
    """To that step, with nothing ordered."""
    program = job.torchrun(RANKS, PROGRAM, directory, STEPS=str(steps), **ENVIRONMENT, **environment)
    assert await asyncio.to_thread(program.wait, SECONDS) == 0, job.log()


async def stop(job: RankProcesses, bus: RedisBus) -> int:
    """The step at which it was stopped, with a checkpoint."""
    stopped = await order(bus, "job.stop", checkpoint=True)
    assert await asyncio.to_thread(job.processes[-1].wait, SECONDS) == 0, job.log()
    return int(stopped["checkpoint"].removeprefix("step-"))


def are_same(job: RankProcesses, one: str, other: str) -> bool:
    """To the bit, on each rank."""
    held = [
        [tensor for rank in range(RANKS) for tensor in torch.load(job.directory / f"{name}-{rank}.pt")]
        for name in (one, other)
    ]
    return all(torch.equal(mine, theirs) for mine, theirs in zip(*held, strict=True))


def course(job: RankProcesses, directory: str = "ordered", rank: int = 0) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (job.directory / f"{directory}-{rank}.jsonl").read_text().splitlines()]


def by_step(job: RankProcesses, name: str, directory: str = "ordered") -> dict[int, Any]:
    """Of each step the last time that it was trained."""
    return {line["step"]: line[name] for line in course(job, directory)}


async def test_all_ranks_roll_back_in_the_running_process(job: RankProcesses, bus: RedisBus, redis_server: Any) -> None:
    """After rollbacks and a scaled rate that is taken back the training is the same to the bit as one in which nothing
    happened, and each rollback has compared what was loaded and drawn. The rate stays scaled over steps, rollbacks and
    checkpoints, which hold the schedule's own."""
    await begin(job, redis_server)
    await until(job, 10, 20)
    back = await order(bus, "job.rollback", step=10)
    assert (back["checkpoint"], back["skipped_batches"], back["data"]) == ("step-10", 0, "the same batches again")
    for part, least in (("parameters", 1), ("batches", 1), ("carried", CARRIED)):
        assert back["verified"][part]["compared"] == back["verified"][part]["agreed"] >= least
    assert (job.directory / "ordered/checkpoint/abandoned-1-of-20").is_dir()
    await order(bus, "job.accumulate", envelope.UNSUPPORTED, factor=2)
    slower = make_command("job.scale_lr", params={"factor": 0.5})
    replies = await ask(bus, slower)
    assert [replies[rank].output["scale"] for rank in range(RANKS)] == [0.5] * RANKS
    saved = int((await order(bus, "job.checkpoint"))["checkpoint"].removeprefix("step-"))
    await until(job, saved)
    scaled_from = len(course(job))
    await order(bus, "job.rollback", step=saved)
    while course(job)[-1]["step"] < saved + 3:
        await asyncio.sleep(0.02)
    scaled_to = len(course(job))
    undone = await ask(bus, replace(make_command("job.scale_lr", params={"factor": 2.0}), undo_of=slower.id))
    assert [undone[rank].output["scale"] for rank in range(RANKS)] == [1.0] * RANKS
    await order(bus, "job.rollback", step=10)  # what was trained at half the rate is undone
    await until(job, saved // 10 * 10 + 10)
    last = await stop(job, bus)
    await run(job, "calm", last, ALONE="1")
    assert are_same(job, "ordered", "calm")
    rates = by_step(job, "rate", "calm")
    assert rates.items() <= by_step(job, "rate").items()
    assert by_step(job, "first", "calm").items() <= by_step(job, "first").items()
    halved = [line for line in course(job)[scaled_from:scaled_to] if saved < line["step"] <= last]
    assert halved
    assert all(line["rate"] == pytest.approx(rates[line["step"]] / 2) for line in halved)
    assert all(line["reported"] is not None for line in course(job)[1:])


@pytest.mark.long
async def test_skipped_batches_stay_skipped_after_a_restart(
    job: RankProcesses, bus: RedisBus, redis_server: Any
) -> None:
    """Batches are skipped one by one, and again by a process that starts from before them; nothing resumes from what
    was put aside. A changed rate is in force after a restart as well."""
    await begin(job, redis_server)
    await until(job, 10, 20)
    await order(bus, "job.scale_lr", factor=0.5)
    left_out = await order(bus, "job.rollback", step=10, skip_batches=5)
    assert left_out["skipped_batches"] == 5
    assert left_out["verified"]["batches"]["compared"] == left_out["verified"]["batches"]["agreed"] > 0
    shutil.copytree(job.directory / "ordered", job.directory / "again")
    last = await stop(job, bus)
    # A job that died right after the rollback, before it had saved anything.
    for path in (job.directory / "again/checkpoint").glob("step-*"):
        if int(path.name.removeprefix("step-")) > 10:
            shutil.rmtree(path)
    await run(job, "again", last)
    assert are_same(job, "again", "ordered")
    assert by_step(job, "first", "again").items() <= by_step(job, "first").items()
    assert by_step(job, "rate", "again").items() <= by_step(job, "rate").items()
    steps = by_step(job, "first")
    strides = {step: steps[step + 1] - steps[step] for step in range(1, last)}
    assert strides[10] == pytest.approx(strides[9] * (BATCHES + 5) / BATCHES)
    assert steps[11] != steps[10]


async def test_a_damaged_checkpoint_is_replaced_by_an_older_one(
    job: RankProcesses, bus: RedisBus, redis_server: Any
) -> None:
    """All ranks notice after loading that the content differs from what they saved."""
    await begin(job, redis_server)
    await until(job, 10, 20, 30)
    kept = job.directory / "ordered/checkpoint/step-20/.trainmedic-rank-00001.json"
    facts = json.loads(kept.read_text())
    facts["digests"] = dict.fromkeys(facts["digests"], "float32:0")
    kept.write_text(json.dumps(facts))
    back = await order(bus, "job.rollback", step=20)
    assert (back["checkpoint"], back["checkpoint_step"]) == ("step-10", 10)
    assert "not as they were saved" in json.dumps(back)
    assert (job.directory / "ordered/checkpoint/abandoned-1-of-20").is_dir()
    await stop(job, bus)
