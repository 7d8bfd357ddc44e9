"""Seconds from the first webhook to the last of 1,000 closed runs, with a command to each of 1,000 agents.

Server and Redis are real processes. The agents are simulated in one process: each has its own connection, announces
itself, follows its node's stream as a consumer group, checks the signature, and answers ``accepted`` and then
``applied``. Unlike real ones, they have no executors and no journal, and share two cores with server and Redis.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import tempfile
import time
from collections.abc import Mapping
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import redis.asyncio
import uvloop

from benchmarks.alert_storm import redis_server
from benchmarks.sender import Connection, Exchange, alert, get, send_all, webhook
from tests.support.programs import PYTHON_PATH, Program, eventually, start_server
from trainmedic.envelope import verify
from trainmedic.wire import envelope
from trainmedic.wire.envelope import CONSUMER_GROUP
from trainmedic.wire.signing import Signer

KEY = "the key of a benchmark"
SIGNER = Signer.of(KEY.encode())
PLAYBOOK = """\
playbook: ask-every-node
on: {alert: Question}
target: node
steps:
  - action: node.facts
    timeout: 2m
"""


# --- the agents' process ------------------------------------------------------------------------------------


async def serve(url: str, count: int) -> None:
    """Run `count` agents, and print when all are connected."""
    ready = asyncio.Semaphore(0)
    agents = [asyncio.create_task(agent(url, f"node-{number}", ready)) for number in range(count)]
    for _ in agents:
        await ready.acquire()
    print("ready", flush=True)
    await asyncio.gather(*agents)


async def agent(url: str, node: str, ready: asyncio.Semaphore) -> None:
    client: Any = redis.asyncio.Redis.from_url(url, protocol=2, single_connection_client=True)
    stream = envelope.node_commands(node)
    await client.xgroup_create(stream, CONSUMER_GROUP, id="0", mkstream=True)
    now = envelope.write_time(datetime.now(UTC))
    presence = json.dumps({"node": node, "actions": ["node.facts"], "instance": node, "at": now})
    key = envelope.agent_presence(node)
    await client.set(key, SIGNER.seal(presence.encode(), key), ex=300)
    ready.release()
    while True:
        answer = await client.xreadgroup(CONSUMER_GROUP, "agent", {stream: ">"}, count=100, block=1000)
        for entry, fields in answer[0][1] if answer else ():
            await reply(client, node, stream, entry, fields)


async def reply(client: Any, node: str, stream: str, entry: bytes, fields: Mapping[bytes, bytes]) -> None:
    raw = envelope.body_of(fields, b"command")
    verify(raw, fields.get(b"signature"), KEY.encode())
    command = envelope.Command.decode(raw)
    pipe = client.pipeline(transaction=False)
    outputs: Mapping[str, Mapping[str, Any]] = {envelope.ACCEPTED: {}, envelope.APPLIED: {"cpu": {"percent": 12.5}}}
    for status, output in outputs.items():
        one = envelope.Reply(command.id, node, status, None, output, datetime.now(UTC))
        raw_reply = one.encode()
        signed = {"reply": raw_reply, **SIGNER.fields(raw_reply)}
        pipe.xadd(envelope.REPLIES, signed, maxlen=100_000, approximate=True)
    pipe.xack(stream, CONSUMER_GROUP, entry)
    pipe.xdel(stream, entry)
    await pipe.execute()


# --- the measurement ------------------------------------------------------------------------------------


def deliveries(nodes: int, each: int) -> list[bytes]:
    """Return an alert for each node, `each` of them in a webhook."""
    groups = [range(first, min(first + each, nodes)) for first in range(0, nodes, each)]
    return [
        webhook([alert({"alertname": "Question", "severity": "warning", "node": f"node-{n}"}) for n in group])
        for group in groups
    ]


async def measure(url: str, requests: list[bytes], nodes: int, within: float) -> tuple[float, float]:
    """Return the seconds from the first webhook to the last closed run, by the history, and until that was seen."""
    began = datetime.now(UTC)
    sent = time.monotonic()
    exchanges: list[Exchange] = await send_all(url, requests, concurrency=4)
    if any(exchange.status != 200 for exchange in exchanges):
        raise SystemExit("not every webhook was accepted")
    connection = await Connection.open(url)
    try:
        while (await connection.send(get("/history?status=running&limit=1"))).json()["items"]:
            if time.monotonic() - sent > within:
                raise SystemExit(f"some runs were still open after {within:g} s")
            await asyncio.sleep(0.05)
        seen = time.monotonic() - sent
        items = (await connection.send(get(f"/history?limit={nodes}"))).json()["items"]
    finally:
        connection.close()
    done = {item["target"]["node"] if isinstance(item["target"], dict) else item["target"] for item in items}
    if len(done) != nodes or any(item["status"] != "succeeded" for item in items):
        raise SystemExit(f"{len(done)} of {nodes} nodes have a run, and not every one has succeeded")
    ends = [datetime.fromisoformat(one["timestamp"]) + timedelta(milliseconds=one["duration_ms"]) for one in items]
    return (max(ends) - began).total_seconds(), seen


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--agents", type=int, default=1000)
    parser.add_argument("--alerts-each", type=int, default=100, help="alerts in one webhook")
    parser.add_argument("--within", type=float, default=120, help="give up after this many seconds")
    parser.add_argument("--serve", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve:
        uvloop.run(serve(options.serve, options.agents))
        return
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        (directory / "playbooks").mkdir()
        (directory / "playbooks" / "question.yaml").write_text(PLAYBOOK)
        python_path = {"PYTHONPATH": PYTHON_PATH}
        with redis_server(directory) as redis_url:
            settings = ("--mode", "enforce", "--redis", redis_url, "--breaker-min-nodes", str(options.agents + 1))
            environment = {"TRAINMEDIC_SIGNING_KEY": KEY}
            server, url = start_server(directory, *settings, environment=environment, playbooks=directory / "playbooks")
            argv = [*(sys.executable, "-m", "benchmarks.agents_thousand"), "--serve", redis_url]
            argv += ["--agents", str(options.agents)]
            with server, Program(argv, directory / "agents.log", python_path) as agents:
                eventually(lambda: agents.log.read_text().startswith("ready"), 60, "the agents")
                requests = deliveries(options.agents, options.alerts_each)
                seconds, seen = uvloop.run(measure(url, requests, options.agents, options.within))
    print(
        f"{options.agents} agents: {seconds:.2f} s from the first webhook to the last run closed, and {seen:.2f} s"
        f" until the history showed all ({options.agents / seconds:.0f} commands/s, each with two replies;"
        " agents simulated, server and Redis real)"
    )


if __name__ == "__main__":
    main()
