"""A power feed over the GPUs of simulated agents, with a real server that is killed in each batch and during the undos.

    python -m benchmarks.group_agents [--nodes 50] [--serial 25%]

Server and Redis are real processes, with signing; the agents are simulated (``fleet_members``), all in one process, and
remember commands as real ones do. Printed are seconds, deaths and the memory of the servers. It ends with 1 if a GPU
was not capped once and given back once.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import urlsplit

import uvloop

from benchmarks.alert_storm import redis_server
from benchmarks.fleet import usage
from benchmarks.fleet_members import GPUS, KEY, Member, agent
from tests.support.live import OPEN, Server
from tests.support.messages import delivery, resolved
from tests.support.programs import PYTHON_PATH, Program, eventually
from trainmedic.wire import envelope

PLAYBOOK = """
playbook: cap-all
on: {{alert: Power}}
target: {{gpus: all}}
rollout: {{serial: {serial}, check: [{{wait: 50ms}}]}}
steps:
  - {{id: cap, action: gpu.power_limit, with: {{percent: 75}}, undo: on_resolve}}
"""
TAKES = 0.3
"""Seconds of a command, so that a server dies with commands in flight."""


class RememberingAgent(Member):
    """An agent that prints each execution, and answers a command that it knows without another one."""

    def __init__(self, kind: str, name: str, every: float, describe: Callable[[], dict[str, Any]]) -> None:
        super().__init__(kind, name, every, describe)
        self._known: set[str] = set()

    def _carry_out(self, entry: bytes, fields: Mapping[bytes, bytes]) -> None:
        command = self._command_of(fields)
        self._reply(command, envelope.ACCEPTED, {})
        if command.id not in self._known and command.action == "gpu.power_limit":
            print(json.dumps([command.target.get("gpu"), command.undo_of is not None]), flush=True)
        self._known.add(command.id)
        asyncio.get_running_loop().call_later(TAKES, self._finish, command, entry)

    def _finish(self, command: envelope.Command, entry: bytes) -> None:
        self._reply(command, envelope.APPLIED, {"watts": 525.0})
        self._take_off(entry)


async def serve(url: str, nodes: int) -> None:
    address, loop = urlsplit(url), asyncio.get_running_loop()
    for number in range(nodes):
        member = agent(number, RememberingAgent)
        await loop.create_connection(lambda member=member: member, address.hostname, address.port)  # type: ignore[misc]
        await member.is_there.wait()
    print("ready", flush=True)
    await asyncio.Event().wait()


class Outcome(NamedTuple):
    message: str
    seconds: float
    deaths: int
    peak_mb: float
    acts: Counter[tuple[str, bool]]
    """Executions by GPU, and whether each was an undo."""

    def is_exact(self, gpus: int) -> bool:
        return len(self.acts) == 2 * gpus and set(self.acts.values()) == {1}


class MortalServer:
    """A server that is killed once in each batch, and once during the undos."""

    def __init__(self, server: Server) -> None:
        self.server = server
        self.deaths = 0
        self.peak_mb = 0.0

    def measure(self) -> None:
        assert self.server.program is not None
        self.peak_mb = max(self.peak_mb, usage(self.server.program.process.pid).peak_mb)

    def die(self) -> None:
        self.measure()
        self.server.kill()
        self.deaths += 1
        self.server.start()

    def group(self) -> dict[str, Any]:
        items = self.server.runs()
        return items[0] if items else {"status": "running", "group": None, "message": "", "owes_undo": True}

    def live_through(self, within: float) -> str:
        """Fire, die in each batch, resolve, die during the undos; return the parent's message."""
        fired, seen = delivery("Power", "a"), 0

        def is_closed() -> bool:
            nonlocal seen
            run = self.group()
            counts = run["group"] or {}
            if counts.get("open") and (counts["batch"] or 0) > seen:
                seen = counts["batch"]
                self.die()
            return run["status"] not in OPEN

        eventually(lambda: self.server.ask("/webhook", fired).status == 200, 60, "firing accepted", 0.02)
        eventually(is_closed, within, "group closed", 0.05)
        owing = self.group()["group"]["owing"]
        eventually(lambda: self.server.ask("/webhook", resolved(fired)).status == 200, 60, "resolved accepted", 0.02)
        eventually(lambda: self.group()["group"]["owing"] < owing, 60, "the first undo", 0.01)
        self.die()
        eventually(lambda: not self.group()["owes_undo"], within, "undos carried out", 0.05)
        self.measure()
        return str(self.group()["message"])


def measured(directory: Path, nodes: int, serial: str, within: float = 300) -> Outcome:
    began = time.monotonic()
    with redis_server(directory, "--maxclients", str(nodes + 64)) as url:
        argv = [sys.executable, "-m", "benchmarks.group_agents", "--serve", url, "--nodes", str(nodes)]
        with Program(argv, directory / "agents.log", {"PYTHONPATH": PYTHON_PATH}) as agents:
            eventually(lambda: "ready" in agents.log.read_text(), 60, "the agents")
            options = ("--redis", url, "--breaker-min-nodes", "1000000")
            playbook = PLAYBOOK.format(serial=serial)
            key = {"TRAINMEDIC_SIGNING_KEY": KEY}
            with Server(directory / "server", playbook, *options, environment=key) as server:
                mortal = MortalServer(server)
                eventually(lambda: server.ask("/ready").status == 200, 60, "the server")
                message = mortal.live_through(within)
            lines = [line for line in agents.log.read_text().splitlines() if line.startswith("[")]
    acts = Counter((gpu, is_undo) for gpu, is_undo in map(json.loads, lines))
    return Outcome(message, time.monotonic() - began, mortal.deaths, mortal.peak_mb, acts)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--nodes", type=int, default=50)
    parser.add_argument("--serial", default="25%", help="size of the batches")
    parser.add_argument("--serve", metavar="URL", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve:
        uvloop.run(serve(options.serve, options.nodes))
    with tempfile.TemporaryDirectory() as name:
        seen = measured(Path(name), options.nodes, options.serial)
    gpus = GPUS * options.nodes
    print(f"{gpus} GPUs on {options.nodes} nodes, serial {options.serial}: {seen.message}")
    print(f"{seen.seconds:.1f} s with {seen.deaths} kills of the server; its memory: {seen.peak_mb:.0f} MB at most")
    print(f"each GPU was capped once and given back once: {'yes' if seen.is_exact(gpus) else 'NO'}")
    return 0 if seen.is_exact(gpus) else 1


if __name__ == "__main__":
    sys.exit(main())
