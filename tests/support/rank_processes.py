"""A job of several processes, usually under torchrun, and the server's part towards it: a real bus over a real Redis.

Not here: the programs that are run, and what is expected of them.
"""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from redis.asyncio import Redis

from tests.support.messages import KEY
from tests.support.programs import PYTHON_PATH, inherited
from trainmedic.wire import envelope
from trainmedic_server.adapters.redis_bus import RedisBus


class RankProcesses:
    """The processes of the job, in `directory`."""

    def __init__(self, directory: Path, redis_url: str) -> None:
        self.directory = directory
        self.processes: list[subprocess.Popen[bytes]] = []
        self._environment = {
            **inherited(),
            "PYTHONPATH": PYTHON_PATH,
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

    def torchrun(self, ranks: int, *options: str, **environment: str) -> subprocess.Popen[bytes]:
        """The program with its arguments, after options of torchrun."""
        run = ("-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}")
        return self.start(*run, *options, **environment)

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
                    process.wait(60)
                except subprocess.TimeoutExpired:
                    process.kill()
                    process.wait()


async def ask(bus: RedisBus, sent: envelope.Command) -> dict[int | None, envelope.Reply]:
    replies = await bus.request(sent)
    bus.acknowledge(sent.id)
    return {reply.rank: reply for reply in replies if reply.is_final}


async def until_present(url: str, job: RankProcesses, ranks: int, pids: int = 1, seconds: float = 90.0) -> None:
    """Until the job shows itself with all its ranks, in its `pids`-th life."""
    async with asyncio.timeout(seconds), Redis.from_url(url) as client:
        while True:
            raw = await client.get(envelope.job_presence("llm-1"))
            said = json.loads(raw) if raw else {}
            lives = job.pids(0)
            if len(lives) >= pids and said.get("pid") == lives[-1] and len(said.get("placement", ())) == ranks:
                return
            assert job.processes[-1].poll() is None, job.log()
            await asyncio.sleep(0.05)
