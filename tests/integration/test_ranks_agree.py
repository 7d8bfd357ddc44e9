"""A job of four processes under torchrun, commanded by the server's own bus over a real Redis.

``TRAINMEDIC_RANKS_TRIALS`` is the number of commands sent at random times (10; the full proof is 200),
``TRAINMEDIC_RANKS_KILLS`` how often the reading rank is killed (1).
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
from redis.asyncio import Redis
from torch.distributed import HashStore, TCPStore  # type: ignore[attr-defined]

import trainmedic.distributed
from app.adapters.redis_bus import RedisBus
from tests.ranks import KEY, Job, ask, command, until_present
from trainmedic import envelope
from trainmedic.memory import Memory

RANKS = 4
TRIALS = int(os.environ.get("TRAINMEDIC_RANKS_TRIALS", "10"))
KILLS = int(os.environ.get("TRAINMEDIC_RANKS_KILLS", "1"))
KILLED_RANKS = 2 if KILLS == 1 else RANKS
"""A single kill, for every day, is done to as few processes as there can be."""
PROGRAM = Path(__file__).with_name("ranks_job.py")


async def test_all_ranks_apply_the_same_commands_at_the_same_step(job: Job, bus: RedisBus, redis_server: Any) -> None:
    """At random times, with ranks late at random, over DDP and gloo under torchrun: no two ranks differ."""
    torchrun = job.torchrun(RANKS, str(PROGRAM))
    await until_present(redis_server.url, job, RANKS)
    chance = random.Random(3)

    async def trial(number: int) -> envelope.Command:
        await asyncio.sleep(number * 0.12 + chance.random() * 0.3)
        sent = command("job.scale_lr", factor=0.999)
        replies = await ask(bus, sent)
        assert sorted(replies, key=str) == list(range(RANKS)), replies
        assert {reply.status for reply in replies.values()} == {envelope.APPLIED}
        assert len({json.dumps(reply.output, sort_keys=True) for reply in replies.values()}) == 1
        return sent

    sent = await asyncio.gather(*(trial(number) for number in range(TRIALS)))
    stopped = await ask(bus, command("job.stop", checkpoint=False))
    assert [reply.status for reply in stopped.values()] == [envelope.APPLIED] * RANKS
    assert await asyncio.to_thread(torchrun.wait, 30) == 0, job.log()
    first = job.applied(0)
    assert all(job.applied(rank) == first for rank in range(1, RANKS))
    assert sorted(line["id"] for line in first) == sorted(one.id for one in sent)
    async with Redis.from_url(redis_server.url) as client:
        assert await client.xlen(envelope.job_commands("llm-1")) == 0


async def test_a_killed_reading_rank_neither_loses_nor_repeats_a_command(
    job: Job, bus: RedisBus, redis_server: Any
) -> None:
    """torchrun starts the ranks again. What was under way is answered for every rank, and applied at most
    once; what comes later is applied."""
    job.torchrun(KILLED_RANKS, "--max-restarts", str(KILLS), str(PROGRAM))
    chance = random.Random()
    for life in range(1, KILLS + 1):
        await until_present(redis_server.url, job, KILLED_RANKS, life)
        sent = command("job.scale_lr", seconds=90, factor=0.999)
        asked = asyncio.create_task(ask(bus, sent))
        await asyncio.sleep(chance.random() * 1.5)
        os.kill(job.pids(0)[-1], signal.SIGKILL)
        replies = await asked
        assert sorted(replies, key=str) == list(range(KILLED_RANKS)), (replies, job.log())
        assert len({reply.status for reply in replies.values()}) == 1
        for rank in range(KILLED_RANKS):
            assert [line["id"] for line in job.applied(rank)].count(sent.id) <= 1
    await until_present(redis_server.url, job, KILLED_RANKS, KILLS + 1)
    replies = await ask(bus, command("job.scale_lr", factor=0.999))
    assert [replies[rank].status for rank in range(KILLED_RANKS)] == [envelope.APPLIED] * KILLED_RANKS


async def test_a_rank_that_outlives_the_reading_rank_goes_on(job: Job, bus: RedisBus, redis_server: Any) -> None:
    """Where nothing ties them together, it waits for it once, and trains on without commands."""
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    alone = {"LONE": f"127.0.0.1:{store.port}", "WORLD_SIZE": "2", "PATIENCE": "0.5", "TRAINMEDIC_JOB": "llm-1"}
    for rank in range(2):
        job.start(str(PROGRAM), RANK=str(rank), **alone)
    async with asyncio.timeout(60):
        while not all(any("at" in line for line in job.lines(rank)) for rank in range(2)):
            await asyncio.sleep(0.05)
    job.processes[0].kill()
    reached = max(line.get("at", 0) for line in job.lines(1))
    async with asyncio.timeout(30):
        while job.lines(1)[-1].get("at", 0) < reached + 300:
            assert job.processes[1].poll() is None, job.log()
            await asyncio.sleep(0.05)
    assert "rank 0 did not decide" in job.log()


async def test_a_restarted_job_answers_for_all_of_its_ranks(bus: RedisBus, redis_server: Any) -> None:
    """What its former life had begun: not before the ranks have found each other, however long that takes."""
    sent = command("job.scale_lr", factor=0.999)
    with redis.Redis.from_url(redis_server.url) as direct:
        assert Memory("job:llm-1", envelope.new_id()).claim(direct, sent.id) is None
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
        replies = await asyncio.wait_for(asked, 10)
    finally:
        for medic in reversed(ranks):
            medic.close()
    assert {rank: reply.status for rank, reply in replies.items()} == {0: envelope.FAILED, 1: envelope.FAILED}
    assert "interrupted" in replies[1].output["reason"]
