"""A Redis client that can do everything and has not the key, against a server, an agent and a job at work.

It records what it sees and puts it back, as it was or changed, under any name, again and again. Every alert is repaired
and every repair is undone all the same, each once; nothing else happens on the node or in the job; and whoever asks
the server is answered.
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Self

import pytest
import redis

from tests.attack.effort import random_source, trials
from tests.attack.mutations import mutated
from tests.driver.driver import Driver
from tests.support.agent_node import KEY
from tests.support.gpu_node import GpuNode
from tests.support.live import OPEN, Job, Server
from tests.support.messages import delivery, resolved
from tests.support.programs import eventually
from trainmedic.wire import envelope

PLAYBOOKS = """
playbook: slow-down
on: {alert: LossSpike}
target: job
steps: [{id: cut, action: job.scale_lr, with: {factor: 0.5}, timeout: 20s, undo: on_resolve}]
---
playbook: cool-gpu
on: {alert: TooHot}
target: gpu
steps: [{id: cap, action: gpu.power_limit, with: {percent: 80}, timeout: 20s, undo: on_resolve}]
"""
ROUNDS = trials(2, 100)
SURVIVING = ("trainmedic:memory:",)
"""What it leaves alone: the job's own notes of what it has carried out. `docs/explanation/security.md` says what
somebody can do who changes these."""


class HostileClient(threading.Thread):
    """Records and injects until it is stopped."""

    def __init__(self, url: str, source: random.Random) -> None:
        super().__init__(name="hostile client")
        self._client = redis.Redis.from_url(url)
        self._source = source
        self._over = threading.Event()
        self._entries: list[tuple[bytes, dict[Any, Any]]] = []
        self._values: list[tuple[bytes, bytes]] = []
        self.injected = 0
        self.error: BaseException | None = None

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self.join()
        self._client.close()
        assert self.error is None

    def run(self) -> None:
        try:
            while not self._over.is_set():
                self._record()
                for _ in range(self._source.randrange(4)):
                    self._inject()
                time.sleep(0.002)
        except BaseException as error:
            self.error = error
            raise

    def _record(self) -> None:
        for key in self._client.scan_iter(match="trainmedic:*", count=100):
            kind = self._client.type(key)
            if kind == b"stream":
                self._entries += [(key, fields) for _, fields in self._client.xrevrange(key, count=20)]
            elif kind == b"string" and not key.startswith(tuple(name.encode() for name in SURVIVING)):
                value: Any = self._client.get(key)
                self._values += [(key, value)] if value else []
        # What is recent is of the most use, and some of what is old.
        self._entries, self._values = self._thinned(self._entries), self._thinned(self._values)

    def _thinned(self, recorded: list[Any]) -> list[Any]:
        return recorded if len(recorded) < 2000 else self._source.sample(recorded[:1000], 200) + recorded[-600:]

    def _inject(self) -> None:
        source = self._source
        self.injected += 1
        streams = [envelope.REPLIES, envelope.job_commands("llm-1"), envelope.node_commands("n1")]
        keys = [envelope.job_presence("llm-1"), envelope.agent_presence("n1"), envelope.job_presence("llm-2")]
        if self._values and source.random() < 0.3:
            _, value = source.choice(self._values)
            self._client.set(source.choice(keys), mutated(value, source) or b"x", ex=5)
        elif self._entries:
            stream, fields = source.choice(self._entries)
            changed = {
                name: mutated(value, source) if source.random() < 0.4 else value for name, value in fields.items()
            }
            if source.random() < 0.3:
                other = dict(source.choice(self._entries)[1])
                changed |= {name: value for name, value in other.items() if b"signature" in name}
            if source.random() < 0.1:
                changed = {name: value for name, value in changed.items() if b"signature" not in name} or changed
            self._client.xadd(source.choice([*streams, stream]), changed, maxlen=5000)


@pytest.fixture
def server(tmp_path: Path, redis_url: str) -> Iterator[Server]:
    signed = {"TRAINMEDIC_SIGNING_KEY": KEY}
    with Server(tmp_path / "server", PLAYBOOKS.strip(), "--redis", redis_url, environment=signed) as serving:
        yield serving


def gpu_delivery() -> dict[str, Any]:
    fired = delivery("TooHot", "any")
    fired["alerts"][0]["labels"] = {"alertname": "TooHot", "node": "n1", "gpu": "0"}
    return fired


def owed(server: Server) -> list[str]:
    """The runs that are open, or whose undo is not done."""
    runs = [server.run(run["run_id"]) for run in server.runs()]
    return [
        run["run_id"]
        for run in runs
        if run["status"] in OPEN or any(step["undo"] and step["undo"]["status"] != "done" for step in run["steps"])
    ]


def test_an_attacker_without_the_key_changes_nothing(
    tmp_path: Path, redis_url: str, make_driver: Callable[..., Driver], server: Server
) -> None:
    """Each alert has one run, each run applies its effects once, and each effect is undone once."""
    driver = make_driver(1)
    with GpuNode(tmp_path / "node", redis_url, driver), Job("llm-1", redis_url, KEY) as job:
        with HostileClient(redis_url, random_source()) as attacker:
            for _ in range(ROUNDS):
                fired = [delivery("LossSpike", "llm-1"), gpu_delivery()]
                for each in fired:
                    assert server.ask("/webhook", each).status == 200
                eventually(lambda: driver.watts(0) == 560, 60, "the cap", 0.05)
                for each in fired:
                    eventually(lambda: not [run for run in server.runs() if run["status"] in OPEN], 60, "closed", 0.1)
                    assert server.ask("/webhook", resolved(each)).status == 200
                eventually(lambda: driver.watts(0) == 700, 60, "the power is back", 0.05)
                assert {server.ask(path).status for path in ("/jobs", "/agents", "/health", "/history")} == {200}
        eventually(lambda: not owed(server), 120, "nothing is owed", 0.2)
        runs = [server.run(run["run_id"]) for run in server.runs()]
        assert len(runs) == 2 * ROUNDS
        assert {run["status"] for run in runs} == {"succeeded"}
        ordered = {
            attempt["command_id"]
            for run in runs
            for step in run["steps"]
            for attempt in (*step["attempts"], *step["undo"]["attempts"])
        }
        ids = [command_id for command_id, _ in job.effects]
        assert len(ids) == len(set(ids))
        assert set(ids) <= ordered
        assert len(ids) == 2 * ROUNDS
    print(f"{attacker.injected} injections over {ROUNDS} rounds")
