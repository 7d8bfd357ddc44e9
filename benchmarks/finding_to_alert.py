"""Milliseconds from a finding in Redis to its alert in the history; and until 512 ranks of a line are counted.

Server and Redis are processes of their own, with signing. The next finding is sent when the history has the last one's
alert. There is no Alertmanager, whose group_wait would be added.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import tempfile
import time
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import redis
import uvloop

from benchmarks.sender import Connection, get
from tests.support.findings import of_kernel, told
from tests.support.programs import Program, eventually, free_port, start_server
from trainmedic.wire import findings
from trainmedic.wire.signing import Signer, identity_key, node_identity
from trainmedic_logs.domain import finding_codec
from trainmedic_logs.domain.finding import Finding

KEY = "k" * 32
RANKS = 512
PLAYBOOK = """\
playbook: tell
on: {alert: StorageAway}
mode: observe
target: node
steps: [{id: tell, action: notify, with: {message: "look at {{ target.node }}"}}]
---
log_rule: nfs-away
source: kernel
contains: ["nfs: server"]
match: ['nfs: server (?P<server>\\S+) not responding']
role: root
cause: storage
target: node
alert: {name: StorageAway, severity: critical, component: storage}
"""


class Teller:
    """Sender of findings, signed by their node."""

    def __init__(self, url: str) -> None:
        self._client = redis.Redis.from_url(url)

    def tell(self, *found: Finding) -> None:
        pipeline = self._client.pipeline(transaction=False)
        for number, finding in enumerate(found, 1):
            raw = finding_codec.encode(told(finding, number, lines=["a line of some length"] * 101))
            node = node_identity(finding.origin.node)
            fields: Any = {findings.FIELD: raw, **Signer.of(identity_key(KEY.encode(), node)).fields(raw)}
            pipeline.xadd(findings.FINDINGS, fields)
        pipeline.execute()


async def until(url: str, path: str, is_there: Callable[[Any], bool], within: float = 20.0) -> None:
    """Wait until the answer under the path is as expected."""
    connection = await Connection.open(url)
    deadline = time.monotonic() + within
    while time.monotonic() < deadline:
        if is_there((await connection.send(get(path))).json()):
            connection.close()
            return
        await asyncio.sleep(0.001)
    raise SystemExit(f"{path} is not as it should be after {within:g} s")


async def measure(url: str, teller: Teller, rounds: int) -> tuple[list[float], float]:
    """Return the seconds to the alert of each finding, and those until all ranks are counted."""
    taken = []
    for number in range(rounds):
        node = f"node-{number}"
        began = time.monotonic()
        teller.tell(of_kernel("nfs-away", node, datetime.now(UTC)))
        await until(url, f"/history?node={node}", lambda page: bool(page["items"]))
        taken.append(time.monotonic() - began)
    at = datetime.now(UTC)
    began = time.monotonic()
    teller.tell(
        *(of_kernel("nfs-away", "storm", at, id=f"rank-{rank}", ranks=frozenset({rank})) for rank in range(RANKS))
    )
    await until(url, "/findings?node=storm", lambda page: [item["count"] for item in page["items"]] == [RANKS])
    return taken, time.monotonic() - began


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=100)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        directory, port = Path(name), free_port()
        (directory / "playbooks").mkdir()
        for number, text in enumerate(PLAYBOOK.split("\n---\n")):
            (directory / "playbooks" / f"{number}.yaml").write_text(text)
        argv = ["redis-server", "--port", str(port), "--dir", name, "--save", "", "--appendonly", "yes"]
        with Program(argv, directory / "redis.log"):
            client = redis.Redis(port=port)
            eventually(lambda: _answers(client), 10, "Redis")
            redis_url = f"redis://127.0.0.1:{port}/0"
            server, url = start_server(
                directory / "server",
                *("--redis", redis_url),
                environment={"TRAINMEDIC_SIGNING_KEY": KEY},
                playbooks=directory / "playbooks",
            )
            with server:
                taken, storm = uvloop.run(measure(url, Teller(redis_url), options.rounds))
    slow = statistics.quantiles(taken, n=20, method="inclusive")[18] if len(taken) > 1 else taken[0]
    print(
        f"finding to alert: {statistics.median(taken) * 1000:.1f} ms, p95 {slow * 1000:.1f} ms (median of {len(taken)})"
        f"; {RANKS} ranks with the lines around counted in {storm:.2f} s"
    )


def _answers(client: redis.Redis) -> bool:
    try:
        return bool(client.ping())
    except redis.RedisError:
        return False


if __name__ == "__main__":
    main()
