"""A job of several processes under torchrun, commanded by the server's own bus over a real Redis.

``TRAINMEDIC_RANKS_TRIALS`` is the number of commands sent at random times (10; the full proof is 200),
``TRAINMEDIC_RANKS_KILLS`` how often the reading rank is killed (1; 10). Where these ask for more than every day's,
the job has four ranks instead of two.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
from pathlib import Path
from typing import Any

import redis
import torch
from redis.asyncio import Redis
from torch.distributed import HashStore, TCPStore  # type: ignore[attr-defined]

import trainmedic.distributed
from tests.support.messages import KEY, make_command
from tests.support.rank_processes import RankProcesses, ask, until_present
from trainmedic.wire import envelope
from trainmedic.wire.command_memory import CommandMemory
from trainmedic.wire.signing import Signer
from trainmedic_server.adapters.redis_bus import RedisBus

TRIALS = int(os.environ.get("TRAINMEDIC_RANKS_TRIALS", "10"))
KILLS = int(os.environ.get("TRAINMEDIC_RANKS_KILLS", "1"))
RANKS = 4 if TRIALS > 10 or KILLS > 1 else 2
PROGRAM = Path(__file__).with_name("ranks_job.py")


async def test_ranks_apply_the_same_at_the_same_step_and_a_killed_reader_loses_nothing(
    job: RankProcesses, bus: RedisBus, redis_server: Any
) -> None:
    """Times and delays of ranks are random, over DDP and gloo: no two ranks differ. Then the reading rank is
    killed, and torchrun starts the ranks again: what was under way is answered for every rank, and applied at most
    once; what comes later is applied. In one job, because starting it takes longer than all the rest."""
    torchrun = job.torchrun(RANKS, "--max-restarts", str(KILLS), str(PROGRAM))
    await until_present(redis_server.url, job, RANKS)
    sent = await asyncio.gather(*(trial(bus, number) for number in range(TRIALS)))
    first = job.applied(0)
    assert all(job.applied(rank) == first for rank in range(1, RANKS))
    assert sorted(line["id"] for line in first) == sorted(sent)
    for life in range(1, KILLS + 1):
        await until_present(redis_server.url, job, RANKS, life)
        await kill_the_reader(bus, job)
    await until_present(redis_server.url, job, RANKS, KILLS + 1)
    await trial(bus, 0)
    stopped = await ask(bus, make_command("job.stop", params={"checkpoint": False}))
    assert [reply.status for reply in stopped.values()] == [envelope.APPLIED] * RANKS
    assert await asyncio.to_thread(torchrun.wait, 30) == 0, job.log()
    async with Redis.from_url(redis_server.url) as client:
        assert await client.xlen(envelope.job_commands("llm-1")) == 0


async def trial(bus: RedisBus, number: int) -> str:
    """A command in its turn, at a random moment, that all ranks apply alike; its id."""
    await asyncio.sleep(number * 0.12 + random.random() * 0.3)
    sent = make_command("job.scale_lr", params={"factor": 0.999})
    replies = await ask(bus, sent)
    assert sorted(replies, key=str) == list(range(RANKS)), replies
    assert {reply.status for reply in replies.values()} == {envelope.APPLIED}
    assert len({json.dumps(reply.output, sort_keys=True) for reply in replies.values()}) == 1
    return sent.id


async def kill_the_reader(bus: RedisBus, job: RankProcesses) -> None:
    """At a random moment after a command was sent."""
    sent = make_command("job.scale_lr", seconds=90, params={"factor": 0.999})
    asked = asyncio.create_task(ask(bus, sent))
    await asyncio.sleep(random.random() * 1.5)
    os.kill(job.pids(0)[-1], signal.SIGKILL)
    replies = await asked
    assert sorted(replies, key=str) == list(range(RANKS)), (replies, job.log())
    assert len({reply.status for reply in replies.values()}) == 1
    for rank in range(RANKS):
        assert [line["id"] for line in job.applied(rank)].count(sent.id) <= 1


async def test_a_rank_that_outlives_the_reading_rank_continues(
    job: RankProcesses, bus: RedisBus, redis_server: Any
) -> None:
    """Without a common launcher it waits for it once, and trains on without commands."""
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    alone = {"LONE": f"127.0.0.1:{store.port}", "WORLD_SIZE": "2", "PATIENCE": "0.5", "TRAINMEDIC_JOB": "llm-1"}
    for rank in range(2):
        job.start(str(PROGRAM), RANK=str(rank), **alone)
    async with asyncio.timeout(60):
        while not all(any("at" in line for line in job.lines(rank)) for rank in range(2)):
            await asyncio.sleep(0.05)
    job.processes[0].kill()
    reached = max(line.get("at", 0) for line in job.lines(1))
    async with asyncio.timeout(60):
        while job.lines(1)[-1].get("at", 0) < reached + 300:
            assert job.processes[1].poll() is None, job.log()
            await asyncio.sleep(0.05)
    assert "rank 0 did not decide" in job.log()


async def test_a_restarted_job_answers_for_all_of_its_ranks(bus: RedisBus, redis_server: Any) -> None:
    """It answers commands of its former life only after the ranks have found each other, however long that takes."""
    sent = make_command("job.scale_lr", params={"factor": 0.999})
    with redis.Redis.from_url(redis_server.url) as direct:
        assert CommandMemory("job:llm-1", envelope.new_id(), Signer.of(KEY.encode())).claim(direct, sent.id) is None
    asked = asyncio.create_task(ask(bus, sent))
    ranks = [
        trainmedic.connect(job="llm-1", redis_url=redis_server.url, rank=rank, world_size=2, signing_key=KEY)
        for rank in range(2)
    ]
    try:
        await asyncio.sleep(0.3)
        assert not asked.done()
        store = HashStore()
        for medic in ranks:
            trainmedic.distributed.share(medic, store=store)
        replies = await asyncio.wait_for(asked, 60)
    finally:
        for medic in reversed(ranks):
            medic.close()
    assert {rank: reply.status for rank, reply in replies.items()} == {0: envelope.FAILED, 1: envelope.FAILED}
    assert "interrupted" in replies[1].output["reason"]


async def test_the_job_reports_the_loss_of_each_of_its_ranks(bus: RedisBus, redis_server: Any) -> None:
    """Each rank has its own, without a call between their training threads; NaN is that of its rank."""
    ranks = [
        trainmedic.connect(job="llm-1", redis_url=redis_server.url, rank=rank, world_size=2, signing_key=KEY)
        for rank in range(2)
    ]
    try:
        ranks[0].report(step=40, loss=2.5)
        ranks[1].report(step=41, loss=torch.tensor(float("nan")))
        store = HashStore()
        for medic in ranks:
            trainmedic.distributed.share(medic, store=store)
        said: Any = None
        async with asyncio.timeout(60):
            while said is None or said["ranks"] < 2:
                ranks[0]._announce()
                await asyncio.sleep(0.1)
                said = next((job.details.get("losses") for job in await bus.jobs() if job.name == "llm-1"), None)
    finally:
        for medic in reversed(ranks):
            medic.close()
    assert said["nan"] == {"count": 1, "ranks": "1"}
    assert (said["lowest"]["loss"], said["lowest"]["rank"], said["steps"]) == (2.5, 0, [40, 41])
