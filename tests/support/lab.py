"""A lab as an on-call engineer finds it at night: 20 jobs, 12 agents, 204 alerts, by a real Redis and a real server.

The jobs are the real SDK, all served by one thread; the agents announce themselves by the real wire protocol and take
no commands. What was before the night is in ``lab_past``.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import threading
import urllib.request
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Self

import trainmedic
from tests.support import lab_past
from tests.support.programs import Program, eventually, start_server
from trainmedic.wire.command_memory import CommandMemory
from trainmedic.wire.connection import OutageLog, RedisConnection
from trainmedic.wire.writer import PresenceKey, ReplyWriter

JOBS, AGENTS = 20, 12
LOWER = """
playbook: lower-rate
summary: Halves the learning rate until the alert resolves.
on: {alert: LabLR}
target: job
steps:
  - id: slow_down
    action: job.scale_lr
    with: {factor: 0.5}
    undo: on_resolve
  - wait_for: resolved
    timeout: 20m
"""
SECOND = LOWER.replace("lower-rate", "second-look").replace("factor: 0.5", "factor: 0.9")
ASK = """
playbook: ask-first
summary: Asks before it halves the learning rate.
on: {alert: LabAsk}
target: job
steps:
  - approve: "Halve the rate of {{ target.job }}?"
    timeout: 30m
  - id: slow_down
    action: job.scale_lr
    with: {factor: "{{ labels.factor }}"}
    undo: on_resolve
  - wait_for: resolved
    timeout: 20m
"""
COOL = """
playbook: cool
summary: Waits until a GPU has cooled.
on: {alert: GPUTemperatureHigh, matchers: ['severity="critical"']}
target: gpu
guards: {max_concurrent: 4}
steps:
  - wait_for: resolved
    timeout: 15m
"""
FAIL = """
playbook: broken
summary: Asks a service that is not there.
on: {alert: LabFail}
target: node
steps:
  - id: call
    action: http.request
    with: {url: "http://127.0.0.1:1/", method: GET}
"""


@dataclass
class Lab:
    """The lab, while the context lasts."""

    directory: Path
    redis_url: str
    program: Program = field(init=False)
    url: str = field(init=False)

    def __enter__(self) -> Self:
        books = self.directory / "playbooks"
        books.mkdir()
        for number, text in enumerate((LOWER, SECOND, ASK, COOL, FAIL)):
            (books / f"{number}.yaml").write_text(text)
        now = datetime.now(UTC)
        (self.directory / "state").mkdir()
        asyncio.run(lab_past.remember(f"sqlite:///{self.directory}/state/trainmedic.db", now))
        self._thermometer = lab_past.thermometer(self.directory, now)
        prometheus_url = self._thermometer.__enter__()
        self.program, self.url = start_server(
            *(self.directory, "--mode", "enforce", "--prometheus-url", prometheus_url),
            environment={"TRAINMEDIC_REDIS_URL": self.redis_url},
            playbooks=books,
        )
        self._over = threading.Event()
        self._medics = [trainmedic.connect(job=f"llm-{number}", redis_url=self.redis_url) for number in range(JOBS)]
        for medic in self._medics:
            medic.on("job.scale_lr")(_scaled)
        self._training = threading.Thread(target=self._train, daemon=True)
        self._training.start()
        self._agents: list[ReplyWriter] = []
        try:
            self._agents += [_agent(self.redis_url, f"node-{number}") for number in range(AGENTS)]
            eventually(self._all_are_there, 60, "jobs and agents")
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._training.join()
        for medic in self._medics:
            medic.close()
        for agent in self._agents:
            agent.stop(5)
        self.program.end()
        self._thermometer.__exit__(None, None, None)

    def ask(self, path: str, accept: str = "application/json", body: Mapping[str, Any] | None = None) -> str:
        """What the server answers."""
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self.url + path, data, {"Accept": accept, "Content-Type": "application/json"})
        with urllib.request.urlopen(request, timeout=60) as reply:
            text: str = reply.read().decode()
            return text

    def get(self, path: str) -> Any:
        return json.loads(self.ask(path))

    def fire(self, alerts: Sequence[Mapping[str, str]]) -> None:
        """Have Alertmanager report alerts with these labels."""
        now = datetime.now(UTC).isoformat()
        entries = [{"status": "firing", "labels": dict(labels), "startsAt": now} for labels in alerts]
        self.ask("/webhook", body={"version": "4", "alerts": entries})

    def _all_are_there(self) -> bool:
        return (len(self.get("/jobs")["items"]), len(self.get("/agents")["items"])) == (JOBS, AGENTS)

    def _train(self) -> None:
        for step in itertools.count():
            for medic in self._medics:
                medic.commands(step)
            if self._over.wait(0.1):
                return


def _scaled(command: Any) -> dict[str, Any]:
    return {"before": 0.001, "after": 0.001 * command.params["factor"]}


def _agent(url: str, node: str) -> ReplyWriter:
    described = {"node": node, "instance": node, "gpus": [{"index": gpu} for gpu in range(8)], "version": "lab"}
    writer = ReplyWriter(
        RedisConnection(lambda: url, OutageLog("a lab")),
        CommandMemory(f"node:{node}", node),
        f"trainmedic:commands:node:{node}",
        PresenceKey(f"trainmedic:agent:{node}", node, lambda: described, lambda rival: None, every=5),
        None,
    )
    writer.start()
    return writer


def night() -> list[dict[str, str]]:
    """The labels of the 204 alerts of a bad night."""
    gpus = [(f"node-{number // 8}", str(number % 8)) for number in range(8 * AGENTS)]
    alerts = [{"alertname": "LabLR", "job_name": f"llm-{number}"} for number in range(8)]
    alerts += [{"alertname": "LabAsk", "job_name": f"llm-{number}", "factor": "0.5"} for number in range(8, 13)]
    alerts += [
        {"alertname": "GPUTemperatureHigh", "severity": "critical", "node": node, "gpu": gpu} for node, gpu in gpus
    ]
    alerts += [{"alertname": "GPUTemperatureHigh", "node": node, "gpu": gpu} for node, gpu in gpus[:40]]
    alerts += [{"alertname": "LabFail", "node": f"node-{number}"} for number in (6, 7, 8)]
    alerts += [{"alertname": "NobodyKnows", "rack": str(number)} for number in range(52)]
    return alerts
