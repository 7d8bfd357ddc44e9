"""Local ranks of a probe without a launcher."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from typing import Sequence


def run(ranks: int, arguments: Sequence[str]) -> int:
    """Run the ranks, none of which outlives the call; return the first nonzero exit code."""
    port = _free_port()
    processes: list[subprocess.Popen[bytes]] = []
    try:
        processes.extend(_start(rank, ranks, port, arguments) for rank in range(ranks))
        codes = [process.wait() for process in processes]
    finally:
        for process in processes:
            if process.poll() is None:
                process.kill()
                process.wait()
    return next((code for code in codes if code), 0)


def _start(rank: int, ranks: int, port: int, arguments: Sequence[str]) -> subprocess.Popen[bytes]:
    environment = {
        **os.environ,
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(ranks),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        # As torchrun does: one thread per CPU in each rank would overload the machine.
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1"),
    }
    return subprocess.Popen([sys.executable, "-m", "trainmedic.probe", *arguments], env=environment)  # noqa: S603


def _free_port() -> int:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        port: int = taken.getsockname()[1]
        return port
