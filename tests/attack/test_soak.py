"""A server and an agent at work for long: alerts, event listeners, readers of the history; neither grows.

In full an hour. What is compared are medians of the second and the last quarter of the time, so a start that needs
its time and single peaks do not count.
"""

from __future__ import annotations

import itertools
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import redis

from tests.attack.effort import trials
from tests.conftest import RedisServer
from tests.driver.driver import Driver
from tests.support.agent_node import KEY
from tests.support.gpu_node import GpuNode
from tests.support.live import OPEN, Job, Server
from tests.support.messages import delivery, resolved
from tests.support.process_use import ProcessUse, assert_flat, process_use
from tests.support.programs import eventually
from trainmedic.wire import envelope

SECONDS = trials(15, 3600)
GPUS = 4
LISTENERS = 5
PATIENCE = 60.0

PLAYBOOKS = """
playbook: hot
on: {alert: Hot}
target: gpu
steps:
  - {id: cap, action: gpu.power_limit, with: {percent: 80}, timeout: 20s, undo: on_resolve}
  - {id: cooled, wait_for: resolved, timeout: 1h}
---
playbook: spike
on: {alert: Spike}
target: job
steps:
  - {id: slow, action: job.scale_lr, with: {factor: 0.5}, timeout: 20s, undo: on_resolve}
  - {id: better, wait_for: resolved, timeout: 1h}
---
playbook: seen
on: {alert: Seen}
target: job
mode: observe
steps:
  - {id: slow, action: job.scale_lr, with: {factor: 0.5}}
"""
READ = (
    ("/history?limit=100", "application/json"),
    ("/history?limit=1000&status=succeeded", "application/json"),
    ("/history?since=1m", "text/csv"),
    ("/history?since=1m", "application/x-ndjson"),
    ("/agents", "application/json"),
    ("/jobs", "application/json"),
    ("/playbooks", "application/json"),
    ("/metrics", "text/plain"),
    ("/ready", "application/json"),
    ("/history/no-such-run", "application/json"),
)


class Soak:
    """Everybody who wants something of the server, each in a thread, until told that it is over."""

    def __init__(self, server: Server, node: GpuNode) -> None:
        self.server, self.node = server, node
        self.over = threading.Event()
        self.repairs = 0
        self.reads = 0
        self.events = 0
        self.failures: list[str] = []
        self.uses: dict[str, list[ProcessUse]] = {"server": [], "agent": []}

    def start(self) -> list[threading.Thread]:
        work: list[Callable[[], None]] = [
            *(lambda gpu=gpu: self._repair("Hot", gpu) for gpu in map(str, range(GPUS))),
            *(lambda job=job: self._repair("Spike", job) for job in ("job-0", "job-1")),
            self._observe,
            self._read,
            *(self._listen for _ in range(LISTENERS)),
            self._come_and_go,
        ]
        threads = [threading.Thread(daemon=True, target=self._carefully, args=(each,)) for each in work]
        for thread in threads:
            thread.start()
        return threads

    def _carefully(self, work: Callable[[], None]) -> None:
        try:
            work()
        except Exception as error:
            self.failures.append(repr(error))
            self.over.set()

    def _post(self, body: dict[str, Any]) -> list[dict[str, Any]]:
        answer = self.server.ask("/webhook", body)
        assert answer.status == 200, answer
        runs: list[dict[str, Any]] = answer.body["runs"]
        return runs

    def _repair(self, name: str, target: str) -> None:
        """An alert fires, is repaired, resolves, and what was done is taken back; again and again."""
        while not self.over.is_set():
            fired = delivery(name, target)
            if name == "Hot":
                fired["alerts"][0]["labels"] = {"alertname": name, "node": self.node.name, "gpu": target}
            (started,) = self._post(fired)
            assert started["decision"] == "started", started
            self.over.wait(1)
            self._post(resolved(fired))
            eventually(lambda run_id=started["run_id"]: self._is_done(run_id), PATIENCE, "the run is over", 0.2)  # type: ignore[misc]
            self.repairs += 1

    def _is_done(self, run_id: str) -> bool:
        run = self.server.run(run_id)
        return run["status"] not in OPEN and not run["owes_undo"]

    def _observe(self) -> None:
        """Alerts that come in tens, each with a job of its own: what is known by name must not pile up."""
        for number in itertools.count():
            if self.over.wait(0.5):
                return
            jobs = [f"job-{number}-{each}" for each in range(10)]
            fired = delivery("Seen", *jobs)
            self._post(fired)
            self._post(resolved(fired))

    def _read(self) -> None:
        for path, kind in itertools.cycle(READ):
            if self.over.wait(0.1):
                return
            request = urllib.request.Request(self._url(path), headers={"Accept": kind})
            try:
                with urllib.request.urlopen(request, timeout=PATIENCE) as reply:
                    reply.read()
            except urllib.error.HTTPError as error:
                error.close()
                if error.code != 404:
                    raise
            self.reads += 1

    def _listen(self, lasting: float = float("inf")) -> None:
        """Read the events for so many seconds."""
        until = time.monotonic() + lasting
        with urllib.request.urlopen(self._url("/events"), timeout=PATIENCE) as reply:
            for line in reply:
                self.events += line.startswith(b"data:")
                if self.over.is_set() or time.monotonic() > until:
                    return

    def _come_and_go(self) -> None:
        """Listeners that leave in the middle, and requests that are broken off."""
        while not self.over.wait(0.2):
            self._listen(lasting=1)
            with suppress(OSError), urllib.request.urlopen(self._url("/history?limit=1000"), timeout=PATIENCE):
                pass  # nothing is read

    def _url(self, path: str) -> str:
        return f"http://127.0.0.1:{self.server.port}{path}"

    def sample(self) -> None:
        assert self.server.program is not None
        self.uses["server"].append(process_use(self.server.program.process.pid))
        self.uses["agent"].append(process_use(self.node.agent.process.pid))


def test_server_and_agent_do_not_grow(
    tmp_path: Path, redis_server: RedisServer, make_driver: Callable[..., Driver]
) -> None:
    """Memory, descriptors and threads of both stay constant, and messages are removed from Redis."""
    node = GpuNode(tmp_path / "node", redis_server.url, make_driver(GPUS), policy="allow: [gpu.power_limit]\n")
    key = {"TRAINMEDIC_SIGNING_KEY": KEY}
    with (
        Server(tmp_path / "server", PLAYBOOKS, "--redis", redis_server.url, environment=key) as server,
        node,
        Job("job-0", redis_server.url, KEY),
        Job("job-1", redis_server.url, KEY),
    ):
        soak = Soak(server, node)
        until = time.monotonic() + SECONDS
        threads = soak.start()
        while not soak.over.wait(max(0.2, SECONDS / 720)) and time.monotonic() < until:
            soak.sample()
        soak.over.set()
        for thread in threads:
            thread.join(PATIENCE)
        assert not any(thread.is_alive() for thread in threads)
    print(f"{SECONDS} s: {soak.repairs} repairs, {soak.reads} reads, {soak.events} events")
    assert soak.failures == []
    assert soak.repairs >= GPUS
    assert soak.events > 0
    for name, uses in soak.uses.items():
        assert_flat(uses, name)
    with redis.Redis.from_url(redis_server.url) as client:
        for stream in (envelope.REPLIES, envelope.node_commands(node.name), envelope.job_commands("job-0")):
            assert int(client.xlen(stream)) < 100, stream  # type: ignore[arg-type]
