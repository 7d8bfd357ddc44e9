"""The server is killed at every write boundary of a run, restarted, and the outcome is the same each time.

The run has three steps and an undo. The job is a real client of the SDK on a real Redis; it notes
every effect. Alertmanager's part is played by posting each delivery until it is answered with 200,
which is what Alertmanager does.

Each boundary costs seconds, so that a run of the tests takes one by chance out of each of 16 equal
parts; ``BOUNDARIES=all`` in the environment takes every one.
"""

from __future__ import annotations

import itertools
import json
import os
import random
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

import trainmedic
from tests.support.programs import PYTHON_PATH, Program, eventually, free_port

PLAYBOOK = """
playbook: three-steps
on: {alert: Spike}
target: job
steps:
  - {id: slow, action: job.scale_lr, with: {factor: 0.5}, undo: on_resolve}
  - {id: keep, action: job.checkpoint}
  - {id: gather, action: job.accumulate, with: {factor: 2}}
"""

WANTED = os.environ.get("BOUNDARIES", "16")

REPEATS = ("step_resumed", "undo_resumed", "alert_repeated")
EFFECTS = ["job.scale_lr 0.5", "job.checkpoint", "job.accumulate 2", "job.scale_lr 2.0"]


@dataclass
class Job:
    """A training job that is always there, and what was done to it."""

    name: str
    redis_url: str
    effects: list[str] = field(default_factory=list)
    _over: threading.Event = field(default_factory=threading.Event)

    def __enter__(self) -> Job:
        self._medic = trainmedic.connect(job=self.name, redis_url=self.redis_url)
        for action in ("job.scale_lr", "job.checkpoint", "job.accumulate"):
            self._medic.on(action)(self._note)
        self._thread = threading.Thread(target=self._train)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()
        self._medic.close()

    def _note(self, command: Any) -> dict[str, Any]:
        factor = command.params.get("factor")
        self.effects.append(f"{command.action} {factor}" if factor is not None else command.action)
        return {}

    def _train(self) -> None:
        for step in itertools.count():
            self._medic.commands(step)
            if self._over.wait(0.002):
                return


class Server:
    """A server that may die at a boundary, and is started again whenever it has."""

    def __init__(self, directory: Path, redis_url: str, fatal: int) -> None:
        directory.mkdir()
        playbooks = directory / "playbooks"
        playbooks.mkdir()
        (playbooks / "three-steps.yaml").write_text(PLAYBOOK)
        self._directory = directory
        self._redis_url = redis_url
        self._fatal = fatal
        self._port = free_port()
        self.log = directory / "boundaries.log"
        self.deaths = 0
        self._program = self._start(fatal)

    def _start(self, fatal: int) -> Program:
        return Program(
            [
                *(sys.executable, Path(__file__).with_name("doomed_server.py"), str(fatal), self.log),
                *("serve", "--port", str(self._port), "--mode", "enforce", "--redis", self._redis_url),
                *("--state-dir", self._directory / "state", "--playbooks", self._directory / "playbooks"),
            ],
            self._directory / f"server-{self.deaths}.log",
            {"PYTHONPATH": PYTHON_PATH},
        )

    def ask(self, path: str, body: dict[str, Any] | None = None) -> Any:
        """The answer to a request, or None where there was none; starts the server again if it has died."""
        if self._program.process.poll() is not None:
            assert self._program.process.returncode == -9, self._program.tail()
            self.deaths += 1
            self._program = self._start(0)
        request = urllib.request.Request(
            f"http://127.0.0.1:{self._port}{path}",
            data=json.dumps(body).encode() if body is not None else None,
            headers={"Content-Type": "application/json"},
        )
        try:
            with urllib.request.urlopen(request, timeout=10) as reply:
                return json.load(reply)
        except (urllib.error.URLError, OSError, ValueError):
            return None

    def end(self) -> None:
        self._program.end()


def delivery(job: str, status: str, starts_at: str) -> dict[str, Any]:
    labels = {"alertname": "Spike", "job_name": job}
    ends_at = datetime.now(UTC).isoformat() if status == "resolved" else "0001-01-01T00:00:00Z"
    alert = {
        "status": status,
        "labels": labels,
        "annotations": {},
        "startsAt": starts_at,
        "endsAt": ends_at,
        "generatorURL": "",
        "fingerprint": f"{job}-1",
    }
    return {
        "version": "4",
        "groupKey": "{}",
        "status": status,
        "receiver": "trainmedic",
        "groupLabels": {},
        "commonLabels": labels,
        "commonAnnotations": {},
        "externalURL": "",
        "alerts": [alert],
    }


def live_through(server: Server, job: Job) -> dict[str, Any]:
    """Fire, wait for the run to close, resolve, wait for the undo; the run as the history shows it."""

    def run() -> dict[str, Any] | None:
        page = server.ask("/history")
        if not page or not page["items"]:
            return None
        assert len(page["items"]) == 1, page
        whole: dict[str, Any] | None = server.ask(f"/history/{page['items'][0]['run_id']}")
        return whole

    def closed() -> bool:
        found = run()
        return found is not None and found["status"] not in ("running", "waiting")

    def undone() -> dict[str, Any] | None:
        found = run()
        undo = found["steps"][0]["undo"] if found else None
        return found if undo and undo["status"] in ("done", "failed") else None

    starts_at = datetime.now(UTC).isoformat()
    eventually(lambda: server.ask("/webhook", delivery(job.name, "firing", starts_at)), 30, "firing accepted", 0.02)
    eventually(closed, 60, "run closed", 0.02)
    eventually(lambda: server.ask("/webhook", delivery(job.name, "resolved", starts_at)), 30, "resolved accepted", 0.02)
    return eventually(undone, 60, "undo carried out", 0.02)


def outcome(run: dict[str, Any]) -> dict[str, Any]:
    """What must be the same with and without a kill: everything but times (training steps too), ids and repeats."""
    kinds = [event["kind"] for event in run["events"] if event["kind"] not in REPEATS]
    outputs = [{name: value for name, value in step["output"].items() if name != "step"} for step in run["steps"]]
    return {
        "status": run["status"],
        "decision": run["decision"],
        "success": run["success"],
        "steps": [(step["id"], step["status"], step["params"]) for step in run["steps"]],
        "outputs": outputs,
        "attempts": [len(step["attempts"]) for step in run["steps"]],
        "undo": run["steps"][0]["undo"]["status"],
        "events": kinds,
    }


def chosen(known: int) -> Iterator[int]:
    """The numbers of the boundaries to die at: all there are, or one out of each of so many equal parts of `known`."""
    if WANTED == "all":
        yield from itertools.count(1)
        return
    parts = int(WANTED)
    for part in range(parts):
        yield random.randint(part * known // parts + 1, max((part + 1) * known // parts, 1))


@pytest.fixture
def scenario(tmp_path: Path, redis_url: str) -> Callable[[int], tuple[dict[str, Any], Server, Job]]:
    def live(fatal: int) -> tuple[dict[str, Any], Server, Job]:
        with Job(f"llm-{fatal}-{time.monotonic_ns()}", redis_url) as job:
            server = Server(tmp_path / f"killed-at-{fatal}", redis_url, fatal)
            try:
                run = live_through(server, job)
            finally:
                server.end()
        return run, server, job

    return live


def test_a_kill_at_any_write_boundary_changes_nothing_of_the_outcome(
    scenario: Callable[[int], tuple[dict[str, Any], Server, Job]],
) -> None:
    """Each effect once, each undo once, nothing lost: before and after each commit and each send."""
    whole, server, job = scenario(0)
    expected = outcome(whole)
    assert job.effects == EFFECTS
    assert expected["status"] == "succeeded"
    boundaries = server.log.read_text().splitlines()
    assert {"before commit", "after commit"} <= set(boundaries)
    assert any("XADD" in name for name in boundaries)

    survived = []
    for fatal in chosen(len(boundaries)):
        whole, server, job = scenario(fatal)
        if server.deaths == 0:
            break
        name = server.log.read_text().splitlines()[fatal - 1]
        assert job.effects == EFFECTS, f"killed at {fatal}, {name}"
        assert outcome(whole) == expected, f"killed at {fatal}, {name}"
        survived.append(fatal)
    print(f"killed at {len(survived)} boundaries of {len(boundaries)}, the same outcome each time: {survived}")
    assert len(survived) >= (len(boundaries) if WANTED == "all" else int(WANTED)) - 2
