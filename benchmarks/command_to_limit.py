"""Milliseconds from a command in Redis to the power limit in the driver, by a real agent over a real Redis.

Each command is signed, received, written to the journal and to the ledger of caps, and synced to the disk, before the
driver call. The driver is a stand-in (``tests/driver``) that answers at once. One command at a time, each with another
limit.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import redis

from benchmarks.alert_storm import redis_server
from tests.driver.driver import Driver, cards
from tests.support.agent_node import KEY
from tests.support.gpu_node import GpuNode
from trainmedic.wire import envelope


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=200)
    parser.add_argument("--gpus", type=int, default=8)
    parser.add_argument("--directory", type=Path, help="where the agent's state is; a disk, not a memory filesystem")
    options = parser.parse_args()
    sent_at: list[float] = []
    replied: list[float] = []
    with (
        tempfile.TemporaryDirectory(dir=options.directory) as name,
        redis_server(Path(name)) as url,
    ):
        driver = Driver(Path(name) / "gpus", cards(options.gpus))
        with GpuNode(Path(name) / "node", url, driver) as node, redis.Redis.from_url(url) as client:
            client.ping()
            for number in range(options.rounds):
                gpu = number % options.gpus
                command = node.cap(str(gpu), watts=690 - number // options.gpus % 2 - gpu)
                raw = command.encode()
                fields: dict[Any, Any] = {"command": raw, "signature": envelope.sign(raw, KEY.encode())}
                sent_at.append(time.time())
                client.xadd(envelope.node_commands(node.name), fields)
                reply = node.final(command)
                replied.append(reply.at.timestamp() - sent_at[-1])
                if reply.status != "applied":
                    raise SystemExit(f"command {number} was {reply.status}: {reply.output.get('reason')}")
                undo = node.final(node.send(node.cap(str(gpu), undo_of=command.id)))
                if undo.status != "applied":
                    raise SystemExit(f"the undo of command {number} was {undo.status}: {undo.output.get('reason')}")
                time.sleep(0.005)
        caps = [call for call in driver.sets() if call.watts < 700]
    taken = [call.at - at for call, at in zip(caps, sent_at, strict=True)]
    print(
        f"command to limit: {statistics.median(taken) * 1000:.1f} ms, p95 {_slow(taken) * 1000:.1f} ms;"
        f" to its outcome {statistics.median(replied) * 1000:.1f} ms (median of {options.rounds}, {options.gpus} GPUs)"
    )


def _slow(taken: list[float]) -> float:
    return statistics.quantiles(taken, n=20, method="inclusive")[18] if len(taken) > 1 else taken[0]


if __name__ == "__main__":
    main()
