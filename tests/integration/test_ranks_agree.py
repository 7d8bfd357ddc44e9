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
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from redis.asyncio import Redis
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from app import telemetry
from app.adapters.redis_bus import RedisBus
from app.adapters.system_clock import SystemClock
from tests.programs import ROOT, inherited
from trainmedic import envelope

RANKS = 4
TRIALS = int(os.environ.get("TRAINMEDIC_RANKS_TRIALS", "10"))
KILLS = int(os.environ.get("TRAINMEDIC_RANKS_KILLS", "1"))
PROGRAM = Path(__file__).with_name("ranks_job.py")
KEY = "the key of these tests"


class Job:
    """The processes of the job, in `directory`."""

    def __init__(self, directory: Path, redis_url: str) -> None:
        self.directory = directory
        self.processes: list[subprocess.Popen[bytes]] = []
        self._environment = {
            **inherited(),
            "PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'sdk'}",
            "TRAINMEDIC_REDIS_URL": redis_url,
            "TRAINMEDIC_SIGNING_KEY": KEY,
            "OMP_NUM_THREADS": "1",
            # Else a second start can read the addresses of the first one's ranks, and gloo fails.
            "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
        }

    def start(self, *argv: str, **environment: str) -> subprocess.Popen[bytes]:
        with (self.directory / f"job-{len(self.processes)}.log").open("wb") as out:
            process = subprocess.Popen(
                [sys.executable, *argv],
                cwd=self.directory,
                env={**self._environment, **environment},
                stdout=out,
                stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL,
            )
        self.processes.append(process)
        return process

    def torchrun(self, *options: str) -> subprocess.Popen[bytes]:
        launcher = ("-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={RANKS}")
        return self.start(*launcher, *options, str(PROGRAM))

    def lines(self, rank: int) -> list[dict[str, Any]]:
        path = self.directory / f"rank-{rank}.jsonl"
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []

    def applied(self, rank: int) -> list[dict[str, Any]]:
        return [line for line in self.lines(rank) if "id" in line]

    def pids(self, rank: int) -> list[int]:
        return [line["pid"] for line in self.lines(rank) if "pid" in line]

    def log(self) -> str:
        return "\n".join(path.read_text(errors="replace")[-6000:] for path in self.directory.glob("job-*.log"))

    def end(self) -> None:
        for process in self.processes:
            if process.poll() is None:
                process.terminate()  # torchrun ends its workers
                try:
                    process.wait(10)
                except subprocess.TimeoutExpired:
                    process.kill()
                    process.wait()


@pytest.fixture
def job(tmp_path: Path, redis_server: Any) -> Iterator[Job]:
    made = Job(tmp_path, redis_server.url)
    yield made
    made.end()


@pytest.fixture
async def bus(redis_server: Any) -> AsyncIterator[RedisBus]:
    made = RedisBus(redis_server.url, SystemClock(), telemetry.Metrics(), KEY.encode())
    await made.start()
    yield made
    await made.close()


def command(seconds: float = 30.0, action: str = "job.scale_lr") -> envelope.Command:
    now = datetime.now(UTC)
    return envelope.Command(
        id=envelope.new_id(),
        action=action,
        target={"kind": "job", "job": "llm-1"},
        params={"factor": 0.999} if action == "job.scale_lr" else {"checkpoint": False},
        run_id="run-1",
        playbook="loss-spike",
        reason="TrainingLossSpike",
        issued_at=now,
        expires_at=now + timedelta(seconds=seconds),
    )


async def ask(bus: RedisBus, sent: envelope.Command) -> dict[int | None, envelope.Reply]:
    replies = await bus.request(sent)
    bus.settle(sent.id)
    return {reply.rank: reply for reply in replies if reply.is_final}


async def until_present(url: str, job: Job, pids: int = 1, seconds: float = 90.0) -> None:
    """Until the job shows itself with all its ranks, in its `pids`-th life."""
    async with asyncio.timeout(seconds), Redis.from_url(url) as client:
        while True:
            raw = await client.get(envelope.job_presence("llm-1"))
            said = json.loads(raw) if raw else {}
            lives = job.pids(0)
            if len(lives) >= pids and said.get("pid") == lives[-1] and len(said.get("placement", ())) == RANKS:
                return
            assert job.processes[0].poll() is None, job.log()
            await asyncio.sleep(0.05)


async def test_all_ranks_apply_the_same_commands_at_the_same_step(job: Job, bus: RedisBus, redis_server: Any) -> None:
    """At random times, with ranks late at random, over DDP and gloo under torchrun: no two ranks differ."""
    torchrun = job.torchrun()
    await until_present(redis_server.url, job)
    chance = random.Random(3)

    async def trial(number: int) -> envelope.Command:
        await asyncio.sleep(number * 0.12 + chance.random() * 0.3)
        sent = command()
        replies = await ask(bus, sent)
        assert sorted(replies, key=str) == list(range(RANKS)), replies
        assert {reply.status for reply in replies.values()} == {envelope.APPLIED}
        assert len({json.dumps(reply.output, sort_keys=True) for reply in replies.values()}) == 1
        return sent

    sent = await asyncio.gather(*(trial(number) for number in range(TRIALS)))
    stopped = await ask(bus, command(action="job.stop"))
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
    job.torchrun("--max-restarts", str(KILLS))
    chance = random.Random()
    for life in range(1, KILLS + 1):
        await until_present(redis_server.url, job, life)
        sent = command(seconds=90)
        asked = asyncio.create_task(ask(bus, sent))
        await asyncio.sleep(chance.random() * 1.5)
        os.kill(job.pids(0)[-1], signal.SIGKILL)
        replies = await asked
        assert sorted(replies, key=str) == list(range(RANKS)), (replies, job.log())
        assert len({reply.status for reply in replies.values()}) == 1
        for rank in range(RANKS):
            assert [line["id"] for line in job.applied(rank)].count(sent.id) <= 1
    await until_present(redis_server.url, job, KILLS + 1)
    replies = await ask(bus, command())
    assert [replies[rank].status for rank in range(RANKS)] == [envelope.APPLIED] * RANKS


async def test_ranks_that_outlive_the_reading_rank_go_on(job: Job, bus: RedisBus, redis_server: Any) -> None:
    """Where nothing ties them together, they wait for it once, and train on without commands."""
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    alone = {"LONE": f"127.0.0.1:{store.port}", "WORLD_SIZE": "3", "PATIENCE": "0.5", "TRAINMEDIC_JOB": "llm-1"}
    for rank in range(3):
        job.start(str(PROGRAM), RANK=str(rank), **alone)
    async with asyncio.timeout(60):
        while not all(any("at" in line for line in job.lines(rank)) for rank in range(3)):
            await asyncio.sleep(0.05)
    job.processes[0].kill()
    reached = {rank: max(line.get("at", 0) for line in job.lines(rank)) for rank in (1, 2)}
    async with asyncio.timeout(30):
        while not all(job.lines(rank)[-1].get("at", 0) >= reached[rank] + 300 for rank in (1, 2)):
            assert [process.poll() for process in job.processes[1:]] == [None, None], job.log()
            await asyncio.sleep(0.05)
    assert "rank 0 did not decide" in job.log()
