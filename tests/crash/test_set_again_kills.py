"""The server is killed at every write boundary of setting a lapsed cap again: it is set again once, whatever happens.

The agent is a stand-in that keeps the wire protocol; its leases run out when the test says so. One server lives
on over all trials, and dies once in each. ``BOUNDARIES`` in the environment says into how many equal parts the
boundaries are divided, one of each of which is taken by chance; ``all`` takes every one.
"""

from __future__ import annotations

import itertools
import os
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tests.integration.test_leases import KEY, Agent
from tests.support.live import Server
from tests.support.messages import delivery, resolved
from tests.support.programs import eventually

WANTED = os.environ.get("BOUNDARIES", "2")

PLAYBOOK = """
playbook: cool
on: {alert: Hot}
target: gpu
steps:
  - {id: cap, action: gpu.power_limit, with: {percent: 80}, undo: on_resolve}
"""


class Standing(Agent):
    """An agent on which nothing lapses by time, so that a slow machine lets nothing run out."""

    def _do(self, command: Any) -> dict[str, Any]:
        output = super()._do(command)
        self._holds = {one: (gpu, end and float("inf")) for one, (gpu, end) in self._holds.items()}
        return output


class Trial:
    """An alert on a GPU of its own: a cap that lapses, is set again, and is undone."""

    def __init__(self, server: Server, agent: Standing, order: Path, number: int) -> None:
        self.server, self.agent, self.order, self.number = server, agent, order, number

    def run(self, fatal: int, environment: dict[str, str]) -> tuple[list[str], int]:
        """The story of the lease, and how often the server died."""
        fired = delivery("Hot", str(self.number))
        fired["alerts"][0]["labels"] = {"alertname": "Hot", "node": "n1", "gpu": str(self.number)}
        (run,) = self.server.ask("/webhook", fired).body["runs"]
        eventually(lambda: self.server.run(run["run_id"])["status"] == "succeeded", 60, "capped", 0.02)
        self.agent.again.clear()
        self.order.with_suffix(".log").unlink(missing_ok=True)
        self.order.with_suffix(".new").write_text(str(fatal))
        self.order.with_suffix(".new").rename(self.order)
        self.agent.lapse()
        deaths = 0

        def ended() -> bool:
            nonlocal deaths
            assert self.server.program is not None
            if self.server.program.process.poll() is not None:
                assert self.server.program.process.returncode == -9, self.server.program.tail()
                deaths += 1
                self.server.start(**environment)
            answer = self.server.ask(f"/history/{run['run_id']}")
            return answer.status == 200 and any(e["kind"] == "set_again_done" for e in answer.body["events"])

        eventually(ended, 60, "set again", 0.05)
        self.order.unlink(missing_ok=True)
        assert str(self.number) in self.agent.caps
        self.server.ask("/webhook", resolved(fired))
        eventually(lambda: not self.server.run(run["run_id"])["owes_undo"], 60, "undone", 0.02)
        assert str(self.number) not in self.agent.caps
        events = self.server.run(run["run_id"])["events"]
        return [event["kind"] for event in events if event["kind"].startswith(("lease_", "set_again_"))], deaths


def chosen(known: int) -> Iterator[int]:
    """The numbers of the boundaries to die at."""
    if WANTED == "all":
        yield from itertools.count(1)
        return
    parts = int(WANTED)
    for part in range(parts):
        yield random.randint(part * known // parts + 1, max((part + 1) * known // parts, 1))


def test_a_kill_at_any_write_boundary_reapplies_a_lapsed_cap_once(tmp_path: Path, redis_url: str) -> None:
    """There is one loss, one intent, one effect, one outcome, and one undo."""
    key = tmp_path / "key"
    key.write_bytes(KEY)
    order = tmp_path / "order"
    environment = {"TRAINMEDIC_SIGNING_KEY_FILE": str(key)}
    program = (Path(__file__).with_name("doomed_leases.py"), order)
    server = Server(tmp_path / "server", PLAYBOOK, "--redis", redis_url, program=program)
    numbers = itertools.count()
    survived = []
    with Standing("n1", redis_url, cpu=0) as agent:
        try:
            server.start(**environment)
            expected = ["lease_lost", "set_again_started", "set_again_done"]
            assert Trial(server, agent, order, next(numbers)).run(0, environment) == (expected, 0)
            boundaries = order.with_suffix(".log").read_text().splitlines()
            for fatal in chosen(len(boundaries)):
                story, deaths = Trial(server, agent, order, next(numbers)).run(fatal, environment)
                if not deaths:
                    break
                name = order.with_suffix(".log").read_text().splitlines()[fatal - 1]
                assert [kind for kind in story if kind != "set_again_held"] == expected, f"killed at {fatal}, {name}"
                assert len(agent.again) == 1, f"killed at {fatal}, {name}"
                survived.append(fatal)
        finally:
            assert server.program is not None
            server.program.end()
    print(f"killed at {len(survived)} boundaries of {len(boundaries)}, set again once each time: {survived}")
    assert survived
