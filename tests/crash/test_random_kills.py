"""The server is killed again and again, at random moments, while many runs go on: nothing is done twice or dropped."""

from __future__ import annotations

import os
import random
import threading
import time
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime
from pathlib import Path
from typing import Any

from tests.support.live import OPEN, Job, Server
from tests.support.messages import delivery, resolved
from tests.support.programs import eventually

KILLS = int(os.environ.get("KILLS", "5"))
JOBS = 5

PLAYBOOKS = """
playbook: retries
on: {alert: Spike}
target: job
steps:
  - {id: slow, action: job.scale_lr, with: {factor: 0.5}, retry: {attempts: 9, delay: 1s}, undo: on_resolve}
  - {id: keep, action: job.checkpoint, retry: {attempts: 9, delay: 1s}}
---
playbook: waits
on: {alert: Slow}
target: job
steps:
  - {id: slow, action: job.scale_lr, with: {factor: 0.25}, retry: {attempts: 9, delay: 1s}, undo: on_resolve}
  - {id: better, wait_for: resolved, timeout: 1s, on_timeout: continue}
  - id: more
    when: steps.better.status == "timed_out"
    action: job.accumulate
    with: {factor: 2}
    retry: {attempts: 9, delay: 1s}
    undo: on_resolve
---
playbook: asks
on: {alert: Odd}
target: job
steps:
  - {id: may-i, approve: {message: "May I?"}}
  - {id: slow, action: job.scale_lr, with: {factor: 0.125}, retry: {attempts: 9, delay: 1s}, undo: on_resolve}
"""


class Flaky(Job):
    """Every fifth command fails, without any effect."""

    _count = 0

    def _note(self, command: Any) -> dict[str, Any]:
        self._count += 1
        if self._count % 5 == 0:
            raise RuntimeError("not now")
        return super()._note(command)


class Killer(threading.Thread):
    """Kills the server and starts it again, a number of times."""

    def __init__(self, server: Server, kills: int, chance: random.Random) -> None:
        super().__init__()
        self._server, self._kills, self._chance = server, kills, chance

    def run(self) -> None:
        for _ in range(self._kills):
            time.sleep(self._chance.uniform(0.05, 1.5))
            self._server.kill()
            self._server.start(wait=False)
            if self._chance.random() < 0.8:  # else it is killed while it starts
                eventually(lambda: self._server.ask("/health").status == 200, 60, "started again", 0.02)


def insist(server: Server, path: str, body: dict[str, Any]) -> dict[str, Any]:
    """Post until it is answered, as Alertmanager does."""
    answer = eventually(lambda: (found := server.ask(path, body)).status == 200 and found, 60, f"{path} accepted", 0.05)
    whole: dict[str, Any] = answer.body
    return whole


def go_through(server: Server, job: str, over: threading.Event, chance: random.Random) -> list[str]:
    """One alert after the other for one job, until told that it is over; the runs' ids."""
    ids: list[str] = []
    while not over.is_set():
        fired = delivery(chance.choice(["Spike", "Slow", "Odd"]), job)
        (started,) = insist(server, "/webhook", fired)["runs"]
        ids.append(started["run_id"])
        if started["playbook"] == "asks" and chance.random() < 0.8:
            eventually(lambda: status(server, ids[-1]) == "awaiting_approval", 60, "approval asked for", 0.05)
            eventually(lambda: server.ask(f"/runs/{ids[-1]}/approve", {}).status in (200, 409), 60, "approved", 0.05)
        time.sleep(chance.uniform(0, 2.0))
        insist(server, "/webhook", resolved(fired))
        eventually(lambda: is_over(server, ids[-1]), 60, f"run {ids[-1]} is over", 0.1)
    return ids


def status(server: Server, run_id: str) -> str | None:
    """Where a run stands; None where the server does not answer."""
    found: str | None = (server.ask(f"/history/{run_id}").body or {}).get("status")
    return found


def is_over(server: Server, run_id: str) -> bool:
    run = server.ask(f"/history/{run_id}").body
    return bool(run) and "status" in run and run["status"] not in OPEN and not run["owes_undo"]


def expected_effects(run: dict[str, Any]) -> list[str]:
    """The command ids that a run's record says were applied."""
    ids: list[str] = []
    for step in run["steps"]:
        if step["action"] and step["status"] == "succeeded":
            ids.append(step["attempts"][-1]["command_id"])
            undo = step["undo"]
            if undo and undo["status"] == "done":
                ids.append(undo["attempts"][-1]["command_id"])
    return ids


def check_effects(jobs: Sequence[Flaky], runs: Sequence[dict[str, Any]]) -> None:
    """Each effect that a run tells of was had once, and no other; every undo was done."""
    done = [command_id for job in jobs for command_id, _ in job.effects]
    assert max(Counter(done).values()) == 1, "no command was applied twice"
    assert sorted(done) == sorted(command_id for run in runs for command_id in expected_effects(run))
    for run in runs:
        assert run["status"] in ("succeeded", "cancelled", "not_started"), run
        check_waits(run)
        for step in run["steps"]:
            if step["undo"] and step["status"] == "succeeded" and step["id"] != "keep":
                assert step["undo"]["status"] == "done", run


def check_waits(run: dict[str, Any]) -> None:
    """A wait ended by its time has lasted as long as the playbook says, and not much longer than a takeover takes."""
    at = {
        event["kind"]: datetime.fromisoformat(event["at"])
        for event in run["events"]
        if event["kind"] in ("wait_started", "wait_ended")
    }
    if any((step["id"], step["status"]) == ("better", "timed_out") for step in run["steps"]):
        assert 1 <= (at["wait_ended"] - at["wait_started"]).total_seconds() < 120


def test_random_kills_do_not_change_the_outcome(tmp_path: Path, redis_url: str) -> None:
    """Retries, waits, approvals and undos of several jobs: every effect once and recorded, no run stuck."""
    seed = random.randrange(10_000)
    print(f"seed {seed}, {KILLS} kills")
    over = threading.Event()
    jobs = [Flaky(f"job-{number}", redis_url) for number in range(JOBS)]
    with Server(tmp_path, PLAYBOOKS, "--redis", redis_url) as server, ThreadPoolExecutor(JOBS) as threads:
        for job in jobs:
            job.__enter__()
        try:
            going = [
                threads.submit(go_through, server, job.name, over, random.Random(seed + n))
                for n, job in enumerate(jobs)
            ]
            killer = Killer(server, KILLS, random.Random(seed))
            killer.start()
            killer.join()
            over.set()
            runs = [server.run(run_id) for future in going for run_id in future.result()]
        finally:
            over.set()
            for job in jobs:
                job.__exit__()
        assert len(server.runs()) == len(runs), "each alert led to one run"

    print(f"{len(runs)} runs:", Counter((run["playbook"], run["status"]) for run in runs))
    check_effects(jobs, runs)


def test_a_pause_outlives_a_kill(tmp_path: Path, redis_url: str) -> None:
    """Nothing new starts after a restart either, but undos are carried out."""
    with Server(tmp_path, PLAYBOOKS, "--redis", redis_url) as server, Job("llm", redis_url) as job:
        fired = delivery("Spike", "llm")
        insist(server, "/webhook", fired)
        server.closed_run()
        assert server.ask("/pause", {}).status == 200
        server.kill()
        server.start()
        assert server.ask("/ready").body["paused"] is True
        (decided,) = insist(server, "/webhook", delivery("Slow", "llm"))["runs"]
        assert decided["decision"] == "paused"
        insist(server, "/webhook", resolved(fired))
        server.kill()
        server.start()
        eventually(lambda: job.done == ["job.scale_lr 0.5", "job.checkpoint", "job.scale_lr 2"], 60, "undone")
        assert server.ask("/ready").body["paused"] is True


def test_an_open_breaker_outlives_a_kill(tmp_path: Path, redis_url: str) -> None:
    """The count of actions comes from the store, and only a user closes the breaker."""
    playbook = "playbook: hold\non: {alert: Hot}\ntarget: node\nsteps:\n  - {wait_for: resolved, timeout: 1h}\n"
    limits = ("--breaker-min-nodes", "2", "--breaker-share", "0.1")

    def decision(server: Server, node: str) -> str:
        fired = delivery("Hot", "")
        fired["alerts"][0] |= {"labels": {"alertname": "Hot", "node": node}, "fingerprint": node}
        (decided,) = insist(server, "/webhook", fired)["runs"]
        return str(decided["decision"])

    def restart(server: Server) -> None:
        server.kill()
        server.start()

    with Server(tmp_path, playbook, "--redis", redis_url, *limits) as server:
        assert decision(server, "n1") == "started"
        restart(server)
        assert decision(server, "n2") == "started"
        restart(server)
        assert decision(server, "n3") == "breaker_open"
        restart(server)
        assert server.ask("/ready").body["breaker_open"] is True
        assert decision(server, "n4") == "breaker_open"
