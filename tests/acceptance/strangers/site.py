"""All that a stranger's alert meets: Alertmanager, the server with its shipped playbooks, agents, jobs, a cluster.

Real are Alertmanager, Redis, the server, every agent and every job, each a process of its own. Stand-ins are the GPU
driver, the Kubernetes API and what lives behind it (`effects.Effects.living`). `Site.send` sends one alert, waits until
the server has done what it does at once, ends the alert, and tells what came.

The playbooks are the shipped ones. They lack their ``guards``, because several cases are about one target, and tries
follow each other at once; what they match, their targets and their steps are as shipped. Not here: which outcome is
right.
"""

from __future__ import annotations

import contextlib
import json
import re
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import httpx
import redis

from tests.acceptance.strangers.effects import Effects, Moment, log_of
from tests.acceptance.strangers.fleet import JOBS, NODES, canonical
from tests.conftest import RedisServer
from tests.driver.driver import Card, Driver
from tests.integration.test_messages import Sink, serving
from tests.kubernetes.api_server import ApiServer
from tests.support.agent_node import KEY
from tests.support.gpu_node import GpuNode
from tests.support.programs import (
    PYTHON_PATH,
    ROOT,
    Program,
    alertmanagers,
    eventually,
    start_alertmanager,
    start_server,
)
from trainmedic.wire import envelope
from trainmedic_core.fingerprint import fingerprint

TAKES_ALERT_MAP = True
"""True if the server gets the shipped alert maps and one of the site's own."""
OWN_MAP = """
accept: ['cluster!="other-site"']
"""

UNMATCHED = ("not_matched", "match_failed", "no_proof")
"""Reactions of playbooks that the alert does not concern, or to which it proves too little."""
OPEN = ("running", "waiting", "awaiting_approval")
SOON = 15.0
"""Seconds within which a run has begun to wait for the end of its alert, or has ended."""
_POLICY = """
allow: [gpu.power_limit, disk.clean]
cleaning:
  rules:
    temporary-files: {{roots: [{disk}/scratch], globs: ["**"], min_age: 7d, age_by: modified}}
    old-logs: {{roots: [{disk}/logs], globs: ["*.log"], min_age: 7d, age_by: modified}}
    superseded-checkpoints:
      roots: [{disk}/checkpoints]
      globs: ["*"]
      kind: checkpoints
      keep_newest: 2
      min_age: 1h
      age_by: modified
"""
_ROUTES = """
route:
  receiver: trainmedic
  group_by: ['...']
  group_wait: 10ms
  group_interval: 200ms
  repeat_interval: 4h
  routes:
    - {{matchers: ['reached_by = "slash"'], receiver: slash}}
    - {{matchers: ['rule_group = "together"'], receiver: trainmedic, group_by: [rule_group], group_interval: 400ms}}
receivers:
  - name: trainmedic
    webhook_configs: [{{url: "{url}/webhook", send_resolved: true}}]
  - name: slash
    webhook_configs: [{{url: "{url}/webhook/", send_resolved: true}}]
"""


@dataclass(frozen=True)
class Reaction:
    """What the server made of one alert."""

    decision: str
    playbook: str = ""
    target: str = ""
    reason: str = ""
    changes: tuple[str, ...] = ()
    """Changes as `effects` writes them."""
    told: tuple[str, ...] = ()
    """Titles and texts of the messages to people."""
    left_over: tuple[str, ...] = ()
    """What was not reverted once the alert had ended."""
    run: Mapping[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        parts = (self.decision, self.target, "; ".join(self.changes))
        left = f"NOT GIVEN BACK: {'; '.join(self.left_over)}" if self.left_over else ""
        return " ".join(part for part in (*parts, left) if part)


class CleanedNode(GpuNode):
    """A node with GPUs and a disk that its agent may clean."""

    def __init__(self, directory: Path, url: str, driver: Driver, name: str) -> None:
        self.disk = directory / "disk"
        for folder in ("scratch", "logs", "checkpoints"):
            (self.disk / folder).mkdir(parents=True)
        super().__init__(directory, url, driver, _POLICY.format(disk=self.disk), name)


@dataclass
class Site:
    """The running site."""

    server: str
    alertmanager: str
    effects: Effects
    sink: Sink
    _client: httpx.Client

    def post(self, labels: Mapping[str, str], annotations: Mapping[str, str], began: datetime, ends: datetime) -> None:
        """Post one alert to Alertmanager as Prometheus does."""
        alert = {
            "labels": dict(labels),
            "annotations": dict(annotations),
            "startsAt": began.isoformat(),
            "endsAt": ends.isoformat(),
            "generatorURL": "http://prometheus.example.net:9090/graph?g0.expr=up",
        }
        self._client.post(f"{self.alertmanager}/api/v2/alerts", json=[alert]).raise_for_status()

    def send(self, labels: Mapping[str, str], annotations: Mapping[str, str]) -> Reaction:
        """Fire one alert, record its effects, and end it."""
        before, told_before = self.effects.now(), len(self.sink.taken)
        began = datetime.now(UTC)
        self.post(labels, annotations, began, began + timedelta(hours=1))
        try:
            reaction = self._reaction(self.heard(labels, began), before)
            told = tuple(f"{title}\n{text}" for title, text in self.sink.taken[told_before:])
        finally:
            self.post(labels, annotations, began, datetime.now(UTC))
        try:
            left_over = self._end(labels, began, reaction) + self.effects.still_changed(before)
        finally:
            self.effects.restore()
        return replace(reaction, told=told, left_over=left_over)

    def heard(self, labels: Mapping[str, str], began: datetime, status: str = "firing") -> dict[str, Any]:
        """The server's record of the alert, once it has one with that status."""
        mark = fingerprint(dict(labels))

        def ask() -> dict[str, Any] | None:
            items = self.get("/alerts?limit=20")["items"]
            mine = [item for item in items if item["fingerprint"] == mark and _is_at(item["starts_at"], began)]
            return next((item for item in mine if item["status"] == status), None)

        return eventually(ask, SOON, f"{labels['alertname']} {status} at the server", every=0.03)

    def get(self, path: str) -> dict[str, Any]:
        """Return the server's answer."""
        answer: dict[str, Any] = self._client.get(f"{self.server}{path}").raise_for_status().json()
        return answer

    def _reaction(self, heard: Mapping[str, Any], before: Moment) -> Reaction:
        made = [each for each in heard["reactions"] if each["decision"] not in UNMATCHED]
        if not made:
            return Reaction("not_matched", reason=heard["reason"], changes=self.effects.since(before))
        runs = [self._settled(each["run_id"]) for each in made if each["run_id"] and each["decision"] == "started"]
        targets = sorted(canonical(run["target"]) for run in runs)
        return Reaction(
            decision=" + ".join(sorted(each["decision"] for each in made)),
            playbook=" + ".join(sorted(each["playbook"] for each in made)),
            target=" + ".join(targets),
            reason="; ".join(each["reason"] for each in made if each["reason"]),
            changes=self.effects.since(before),
            run=runs[0] if runs else {},
        )

    def _settled(self, run_id: str) -> dict[str, Any]:
        """Return the run once it has nothing to do before its alert ends. If that takes too long, return it as it is
        then."""
        until = time.monotonic() + SOON
        while True:
            run = self.get(f"/history/{run_id}")
            if _is_settled(run) or time.monotonic() > until:
                return run
            time.sleep(0.03)

    def _end(self, labels: Mapping[str, str], began: datetime, reaction: Reaction) -> tuple[str, ...]:
        """End the alert, and wait until its run has ended too, with no pending undo. Return what did not end."""
        if not reaction.run:
            return ()
        run_id = reaction.run["run_id"]

        def is_over() -> bool:
            run = self.get(f"/history/{run_id}")
            return run["status"] not in OPEN and not run["owes_undo"]

        self.heard(labels, began, "resolved")
        try:
            eventually(is_over, SOON if _is_settled(reaction.run) else 1.0, f"the end of run {run_id}", every=0.03)
        except AssertionError:
            self._client.post(f"{self.server}/runs/{run_id}/cancel", json={"note": "the case is over"})
            with contextlib.suppress(AssertionError):  # Wait for an attempt that is in progress.
                eventually(is_over, SOON, f"the end of the cancelled run {run_id}", every=0.03)
            return (f"the run did not end with its alert: {reaction.run['message']}",)
        return ()


def _is_settled(run: Mapping[str, Any]) -> bool:
    """Return whether a run has nothing to do before its alert ends."""
    return (run["status"] == "waiting" and run["waiting_on"] == "resolved") or run["status"] not in OPEN


def _is_at(text: str, moment: datetime) -> bool:
    """Return whether a time is that moment, as far as Alertmanager keeps it."""
    return abs(datetime.fromisoformat(text) - moment) < timedelta(milliseconds=2)


@contextlib.contextmanager
def running(directory: Path) -> Iterator[Site]:
    """The whole site. Starting takes some seconds, most of it for the agents."""
    with contextlib.ExitStack() as stack:
        bus = RedisServer(_made(directory / "redis"))
        bus.start()
        stack.callback(bus.kill)
        cluster = stack.enter_context(ApiServer().running())
        nodes = [_node(directory, bus.url, name) for name, node in NODES.items() if node.gpus]
        for node in nodes:
            stack.push(node)
            node.start(wait=False)
        # All at once: each takes a second to say goodbye.
        stack.callback(lambda: [node.agent.process.terminate() for node in nodes])
        _start_jobs(stack, directory, bus.url)
        effects = Effects(
            cluster,
            {node.name: node.driver for node in nodes},
            {node.name: node.disk for node in nodes},
            {job.name: log_of(directory, job) for job in JOBS},
        )
        effects.build()
        stack.enter_context(effects.living())
        _wait_for_presences(bus.url, [node.name for node in nodes])
        sink = stack.enter_context(contextlib.contextmanager(serving)())
        url = _serve(stack, directory, bus.url, cluster, sink)
        config = directory / "alertmanager.yml"
        config.write_text(_ROUTES.format(url=url))
        found = alertmanagers()
        binary = found.get("current") or found["installed"]
        alerts, alertmanager = start_alertmanager(binary, config, directory / "alertmanager")
        stack.enter_context(alerts)
        yield Site(url, alertmanager, effects, sink, stack.enter_context(httpx.Client()))


def _node(directory: Path, url: str, name: str) -> CleanedNode:
    node = NODES[name]
    cards = tuple(Card(uuid, f"0000:{bus:02x}:00.0") for uuid, bus in zip(node.gpus, node.buses, strict=False))
    place = _made(directory / "nodes" / name)
    return CleanedNode(place, url, Driver(place / "driver", cards), name)


def _start_jobs(stack: contextlib.ExitStack, directory: Path, url: str) -> None:
    for job in JOBS:
        environment = {
            "PYTHONPATH": PYTHON_PATH,
            "TRAINMEDIC_REDIS_URL": url,
            "TRAINMEDIC_SIGNING_KEY": KEY,
            "TRAINMEDIC_JOB": job.name,
            "TRAINMEDIC_NODE": job.node,
            "GPU": job.gpu,
        }
        log = _made(log_of(directory, job).parent) / "log"
        program = [sys.executable, Path(__file__).with_name("training_job.py")]
        stack.enter_context(Program(program, log, environment))


def _wait_for_presences(url: str, agents: Sequence[str]) -> None:
    """Return once every agent and every placed job has a presence, so that a server that starts then knows them at
    once."""

    def all_are_there() -> bool:
        jobs = [envelope.job_presence(job.name) for job in JOBS]
        with redis.Redis.from_url(url) as client:
            found: Any = client.mget([*map(envelope.agent_presence, agents), *jobs])
        present = [json.loads(raw) for raw in found if raw]
        placed = [one for one in present if one.get("placement")]
        return len(present) == len(agents) + len(jobs) and len(placed) == len(jobs)

    eventually(all_are_there, 60, "the presences of all agents and jobs", every=0.1)


def _serve(stack: contextlib.ExitStack, directory: Path, url: str, cluster: ApiServer, sink: Sink) -> str:
    kubeconfig = directory / "kubeconfig.json"
    kubeconfig.write_text(json.dumps(cluster.kubeconfig()))
    options = ["--mode", "enforce", "--redis", url, "--kubernetes", str(kubeconfig), "--breaker-min-nodes", "1000"]
    if TAKES_ALERT_MAP:
        own_map = directory / "alert-map.yaml"
        own_map.write_text(OWN_MAP)
        options += ["--alert-map", str(own_map), "--alert-map", "shipped"]
    environment = {
        "TRAINMEDIC_SIGNING_KEY": KEY,
        "TRAINMEDIC_NOTIFY_URLS": f"people=json://127.0.0.1:{sink.port}/",
    }
    playbooks = unguarded_playbooks(directory / "playbooks")
    server, server_url = start_server(directory / "server", *options, environment=environment, playbooks=playbooks)
    stack.enter_context(server)
    nodes, jobs = {name for name, node in NODES.items() if node.gpus}, {job.name for job in JOBS}

    def knows_all() -> bool:
        agents = httpx.get(f"{server_url}/agents").raise_for_status().json()["items"]
        known = httpx.get(f"{server_url}/jobs?cluster=true").raise_for_status().json()["items"]
        placed = {one["name"] for one in known if one.get("connected", True) and one.get("nodes")}
        of_cluster = {one["name"] for one in known if one.get("pods")}
        return {one["name"] for one in agents} >= nodes and placed >= jobs and of_cluster >= jobs

    eventually(knows_all, 60, "the server knows all agents, jobs and pods", every=0.1)
    return server_url


def unguarded_playbooks(directory: Path) -> Path:
    """The shipped playbooks without their guards, and with no pauses between tries."""
    directory.mkdir()
    for path in (ROOT / "playbooks").glob("*.yaml"):
        if not path.name.endswith("_test.yaml"):
            text = re.sub(r"(?m)^guards:\n(?:[ #].*\n|\n)*", "", path.read_text())
            (directory / path.name).write_text(re.sub(r"\bdelay: \w+", "delay: 50ms", text))
    return directory


def _made(directory: Path) -> Path:
    directory.mkdir(parents=True, exist_ok=True)
    return directory
