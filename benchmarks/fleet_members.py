"""Agents and jobs of a simulated fleet, in one process: ``python -m benchmarks.fleet_members URL``.

Each member has its own connection. By the wire protocol it makes its consumer group, writes its signed presence as
often and as large as a real one, waits for commands a second at a time, checks their signatures, answers ``accepted``
and ``applied``, signed, and removes the command. It has no executor, no journal and no machine of its own. Prints
``ready`` once all are connected.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import time
from collections import deque
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from typing import Any
from urllib.parse import urlsplit

import uvloop

from trainmedic.envelope import verify
from trainmedic.wire import envelope
from trainmedic.wire.envelope import CONSUMER_GROUP
from trainmedic.wire.signing import Signer

KEY = "the key of a benchmark"
GPUS = 8
_SIGNER = Signer.of(KEY.encode())
_BLOCK_MS = 1000
_OUTPUT = {"cpu": {"percent": 12.5}, "load": [1.0, 1.0, 1.0]}


def gpu(node: int, index: int) -> str:
    return f"GPU-{node:08x}-0000-4000-8000-{index:012x}"


def packed(*parts: str | bytes | int) -> bytes:
    """Encode a command for Redis."""
    texts = [part if isinstance(part, bytes) else str(part).encode() for part in parts]
    return b"*%d\r\n" % len(texts) + b"".join(b"$%d\r\n%b\r\n" % (len(text), text) for text in texts)


def answer_in(data: bytes, at: int) -> tuple[Any, int] | None:
    """Return Redis's answer at `at`, and the next one's place; None if it is incomplete."""
    end = data.find(b"\r\n", at)
    if end < 0:
        return None
    kind, text, after = data[at : at + 1], data[at + 1 : end], end + 2
    if kind == b"$":
        size = int(text)
        if size < 0:
            return None, after
        return (data[after : after + size], after + size + 2) if len(data) >= after + size + 2 else None
    if kind != b"*":
        return text if kind in b"+:" else RuntimeError(text.decode()), after
    values = []
    for _ in range(max(int(text), 0)):
        found = answer_in(data, after)
        if found is None:
            return None
        value, after = found
        values.append(value)
    return values, after


class Member(asyncio.Protocol):
    """An agent or a job. ``describe`` returns its presence's content."""

    def __init__(self, kind: str, name: str, every: float, describe: Callable[[], dict[str, Any]]) -> None:
        is_agent = kind == "node"
        self._kind, self._name, self._every, self._describe = kind, name, every, describe
        self._stream = envelope.node_commands(name) if is_agent else envelope.job_commands(name)
        self._key = envelope.agent_presence(name) if is_agent else envelope.job_presence(name)
        consumer = "agent" if is_agent else "rank-0"
        reading = ("XREADGROUP", "GROUP", CONSUMER_GROUP, consumer, "COUNT", 20, "BLOCK", _BLOCK_MS, "STREAMS")
        self._reading = packed(*reading, self._stream, ">")
        self._due = 0.0
        self._received = b""
        self._asked: deque[Callable[[Any], None]] = deque()
        self._transport: Any = None
        self.is_there = asyncio.Event()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport
        self._ask(packed("XGROUP", "CREATE", self._stream, CONSUMER_GROUP, "0", "MKSTREAM"), lambda _: None)
        self._go_on()
        self._due = time.monotonic() + random.random() * self._every
        self.is_there.set()

    def data_received(self, data: bytes) -> None:
        self._received += data
        at = 0
        while (found := answer_in(self._received, at)) is not None:
            value, at = found
            self._asked.popleft()(value)
        self._received = self._received[at:]

    def connection_lost(self, exc: Exception | None) -> None:
        raise SystemExit(f"Redis has closed the connection of {self._name}")

    def _ask(self, raw: bytes, then: Callable[[Any], None]) -> None:
        self._asked.append(then)
        self._transport.write(raw)

    def _go_on(self) -> None:
        """Write the presence if due, and wait for commands."""
        if time.monotonic() >= self._due:
            self._due = time.monotonic() + self._every
            at = envelope.write_time(datetime.now(UTC))
            value = _SIGNER.seal(json.dumps({**self._describe(), "at": at}).encode(), self._key)
            self._ask(packed("SET", self._key, value, "EX", int(3 * self._every)), _must_be_taken)
        self._ask(self._reading, self._take)

    def _take(self, answer: Any) -> None:
        for entry, fields in answer[0][1] if answer else ():
            self._carry_out(entry, dict(zip(fields[::2], fields[1::2], strict=True)))
        self._go_on()

    def _carry_out(self, entry: bytes, fields: Mapping[bytes, bytes]) -> None:
        command = self._command_of(fields)
        self._reply(command, envelope.ACCEPTED, {})
        self._reply(command, envelope.APPLIED, _OUTPUT)
        self._take_off(entry)

    def _command_of(self, fields: Mapping[bytes, bytes]) -> envelope.Command:
        raw = envelope.body_of(fields, b"command")
        verify(raw, fields.get(b"signature"), KEY.encode())
        return envelope.Command.decode(raw)

    def _reply(self, command: envelope.Command, status: str, output: Mapping[str, Any]) -> None:
        rank = None if self._kind == "node" else 0
        said = {self._kind: self._name}
        reply = envelope.Reply(command.id, self._name, status, rank, output, datetime.now(UTC), **said)
        signed = {b"reply": reply.encode(), **_SIGNER.fields(reply.encode())}
        flat = [part for field in signed.items() for part in field]
        self._ask(packed("XADD", envelope.REPLIES, "MAXLEN", "~", 100_000, "*", *flat), _must_be_taken)

    def _take_off(self, entry: bytes) -> None:
        self._ask(packed("XACK", self._stream, CONSUMER_GROUP, entry), _must_be_taken)
        self._ask(packed("XDEL", self._stream, entry), _must_be_taken)


def _must_be_taken(answer: Any) -> None:
    if isinstance(answer, Exception):
        raise SystemExit(f"Redis refuses: {answer}")


def agent(number: int, make: type[Member] = Member) -> Member:
    name = f"node-{number}"
    instance = envelope.new_id()
    cards = [
        {
            "index": each,
            "uuid": gpu(number, each),
            "name": "NVIDIA H100 80GB HBM3",
            "pci_bus_id": f"0000:{each:02X}:00.0",
        }
        | {"power_limit_watts": 700, "default_limit_watts": 700, "min_limit_watts": 200, "max_limit_watts": 700}
        for each in range(GPUS)
    ]
    said = {"node": name, "host": name, "pid": 1, "version": "0.1.0", "instance": instance, "policy": "none"}
    said |= {"actions": ["node.facts", "gpu.power_limit"], "gpus": cards, "driver": "570.1"}  # type: ignore[dict-item]
    return make("node", name, 10.0, lambda: said)


def job(number: int, ranks: int) -> Member:
    """Return a job on the GPUs after those of the previous job."""
    name = f"job-{number}"
    places = []
    for rank in range(ranks):
        node, index = divmod(number * ranks + rank, GPUS)
        places.append({"rank": rank, "node": f"node-{node}", "gpu": gpu(node, index)})
    said = {"job": name, "rank": 0, "says_end": True, "host": "h", "pid": 1, "instance": envelope.new_id()}
    said |= {"ranks": [0], "world_size": ranks, "placement": places, "capabilities": ["job.checkpoint"]}
    began = time.monotonic()
    return Member("job", name, 5.0, lambda: {**said, "step": int(time.monotonic() - began)})


async def serve(url: str, agents: int, jobs: int, ranks: int) -> None:
    address = urlsplit(url)
    members = [agent(number) for number in range(agents)] + [job(number, ranks) for number in range(jobs)]
    loop = asyncio.get_running_loop()
    for member in members:
        await loop.create_connection(lambda member=member: member, address.hostname, address.port)  # type: ignore[misc]
        await member.is_there.wait()
    print("ready", flush=True)
    await asyncio.Event().wait()


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("url")
    parser.add_argument("--agents", type=int, default=100)
    parser.add_argument("--jobs", type=int, default=20)
    parser.add_argument("--ranks", type=int, default=40)
    options = parser.parse_args()
    uvloop.run(serve(options.url, options.agents, options.jobs, options.ranks))


if __name__ == "__main__":
    main()
