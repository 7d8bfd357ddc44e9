"""Several servers on one PostgreSQL, in a storm of alerts, and everything that can happen to the one that works.

A real Alertmanager delivers to them through the wire that plays the Service, and tries again what fails. Each seed is
a storm of its own. Of any seed, and of many after each other, so:

    SEED=300 SEEDS=50 scripts/test tests/crash/test_several_servers.py -s

Not here: a Redis with Sentinels (``test_sentinels``).
"""

from __future__ import annotations

import json
import os
import random
import re
import signal
import threading
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.crash.test_random_kills import PLAYBOOKS, Flaky, check_effects
from tests.support.postgres import PostgresServer
from tests.support.programs import alertmanagers, eventually, free_port, start_alertmanager
from tests.support.server_group import Servers
from tests.support.wires import acknowledged

SEED = int(os.environ.get("SEED", random.randrange(10_000)))
SEEDS = int(os.environ.get("SEEDS", "3"))
LOST = ("kill", "cut", "hang", "silence", "no database")
KINDS = (*LOST, "session", "restart", "redis")
AT_A_TIME = 3
"""Kinds in one storm; storms that follow each other have all of them."""
JOBS = 10
OPTIONS = ("--takeover-after", "5s", "--assume-resolved-after", "8s")
ROUTE = {"receiver": "trainmedic", "group_wait": "0s", "group_interval": "1s", "repeat_interval": "6s"}


def trouble(kind: str, servers: Servers, postgres: PostgresServer, redis: Any = None) -> float:
    """Let it happen, and return the seconds until a server works that was not harmed. `redis` is needed for the kind
    of that name alone."""
    if kind in LOST:
        return servers.lose(kind)
    servers.wait()
    began = time.monotonic()
    match kind:
        case "session":
            postgres.cut()
        case "restart":
            postgres.stop()
            postgres.start()
            began = time.monotonic()
        case "redis":
            redis.kill()
            redis.start()
    servers.wait()
    return time.monotonic() - began


class Storm(threading.Thread):
    """Posts alerts to an Alertmanager, 20 a second, each of which ends after a while; all have when `end` returns."""

    def __init__(self, url: str, jobs: Sequence[str], chance: random.Random) -> None:
        super().__init__(daemon=True)
        self._url, self._jobs, self._chance = url, jobs, chance
        self._over = threading.Event()
        self.posted = 0

    def run(self) -> None:
        fires: list[tuple[float, dict[str, Any]]] = []
        while not self._over.wait(0.1):
            now = time.monotonic()
            gone = [alert for until, alert in fires if until <= now]
            new = [(now + self._chance.choice([0.3, 2, 5, 12]), self._alert()) for _ in range(2)]
            fires = [each for each in fires if each[0] > now] + new
            self._tell([alert for _, alert in new], gone)
        self._tell([], [alert for _, alert in fires])

    def end(self) -> None:
        self._over.set()
        self.join()

    def _alert(self) -> dict[str, Any]:
        self.posted += 1
        name, job = self._chance.choice(["Spike", "Slow", "Odd"]), self._chance.choice(self._jobs)
        labels = {"alertname": name, "job_name": job, "number": str(self.posted)}
        return {"labels": labels, "startsAt": datetime.now(UTC).isoformat()}

    def _tell(self, fires: Sequence[Mapping[str, Any]], gone: Sequence[Mapping[str, Any]]) -> None:
        now = datetime.now(UTC).isoformat()
        alerts = [*fires, *({**alert, "endsAt": now} for alert in gone)]
        httpx.post(f"{self._url}/api/v2/alerts", json=alerts, timeout=30).raise_for_status()


def approve_some(servers: Servers, over: threading.Event, chance: random.Random) -> None:
    """Answer most of the questions, until it is over; the others end with their alerts."""
    seen: set[str] = set()
    while not over.wait(0.5):
        for question in (servers.ask("/approvals").body or {"items": []})["items"]:
            if question["run_id"] not in seen:
                seen.add(question["run_id"])
                if chance.random() < 0.7:
                    servers.ask(f"/runs/{question['run_id']}/approve", {})


def undelivered(url: str) -> int:
    """Notifications that the Alertmanager is sending, or will send once more."""
    counts: Counter[str] = Counter()
    for name, value in re.findall(r'^alertmanager_(\w+)\{.*integration="webhook".*\} (\d+)$', metrics(url), re.MULTILINE):
        counts[name] += int(value)
    answered = counts["notification_requests_total"] - counts["notification_requests_failed_total"]
    return counts["notifications_total"] - counts["notifications_failed_total"] - answered


def metrics(url: str) -> str:
    return httpx.get(f"{url}/metrics", timeout=30).raise_for_status().text


def settle(servers: Servers, url: str) -> None:
    """Return when nothing is under way any more: no delivery, no run, no undo."""

    def is_quiet() -> bool:
        answers = [servers.ask(f"/history?limit=1&{which}=true") for which in ("open", "owes_undo")]
        return all(answer.status == 200 and not answer.body["items"] for answer in answers) and not undelivered(url)

    def stays_quiet() -> bool:
        for _ in range(5):  # for longer than the Alertmanager's group_interval
            if not is_quiet():
                return False
            time.sleep(0.4)
        return True

    eventually(stays_quiet, 120, "all is delivered, done and undone", 0.2)


def every(servers: Servers, path: str) -> list[dict[str, Any]]:
    """The items of all pages."""
    items: list[dict[str, Any]] = []
    cursor = ""
    while True:
        page = servers.wait().ask(f"{path}?limit=500{cursor}").body
        items += page["items"]
        if page["next"] is None:
            return items
        cursor = f"&cursor={page['next']}"


def check_decisions(told: Iterable[Mapping[str, Any]], heard: Sequence[Mapping[str, Any]], runs: Sequence[Any]) -> None:
    """Each alert of a delivery that was acknowledged has one decision, and is tied to one run, and is known to have
    resolved; nothing else has a run."""
    of_alert = Counter(identity(alert) for run in runs for alert in run["alerts"])
    decided = {identity(alert): alert for alert in heard}
    for alert in (alert for delivery in told for alert in delivery["alerts"]):
        kept = decided.get(identity(alert))
        assert kept is not None, f"acknowledged and not kept: {alert}"
        assert alert["status"] == "firing" or kept["resolved_at"], f"acknowledged, and not known to have resolved: {kept}"
    for key, kept in decided.items():
        (reaction,) = kept["reactions"]
        assert of_alert.pop(key, 0) == (0 if reaction["decision"] == "resolved" else 1), kept
        assert kept["resolved_at"], kept
    assert not of_alert, "runs of alerts that nobody has heard"
    started = Counter(reaction["run_id"] for kept in heard for reaction in kept["reactions"] if reaction["decision"] == "started")
    assert started == Counter(run["run_id"] for run in runs), "each run was started by one alert"


def identity(alert: Mapping[str, Any]) -> tuple[str, datetime]:
    starts_at = alert.get("starts_at") or alert["startsAt"]
    return alert["fingerprint"], datetime.fromisoformat(starts_at)


@pytest.mark.parametrize("number", range(SEEDS))
def test_whatever_happens_to_the_one_that_works_every_effect_is_once(
    tmp_path: Path, redis_server: Any, postgres: PostgresServer, number: int
) -> None:
    """Every alert that was acknowledged has one decision, every command one effect, and all that is owed is undone."""
    seed = SEED + number
    chance = random.Random(seed)
    kinds = [KINDS[(seed * AT_A_TIME + n) % len(KINDS)] for n in range(AT_A_TIME)]
    chance.shuffle(kinds)
    route = ROUTE | {"group_by": chance.choice([["..."], ["alertname"], ["job_name"]])}
    print(f"\nseed {seed}: {kinds}, alerts by {route['group_by']}")
    over = threading.Event()
    with ExitStack() as stack:
        jobs = [stack.enter_context(Flaky(f"job-{n}", redis_server.url)) for n in range(JOBS)]
        address = f"http://127.0.0.1:{free_port()}"
        options = (*OPTIONS, "--alertmanager", address)
        servers = stack.enter_context(Servers(tmp_path, PLAYBOOKS, postgres.database(), redis_server.url, *options))
        receiver = {"url": f"http://127.0.0.1:{servers.port}/webhook", "send_resolved": True}
        config = {"route": route, "receivers": [{"name": "trainmedic", "webhook_configs": [receiver]}]}
        (tmp_path / "alertmanager.yml").write_text(json.dumps(config))
        binary = next(iter(alertmanagers().values()))
        alerting, _ = start_alertmanager(binary, tmp_path / "alertmanager.yml", tmp_path / "alertmanager", address)
        stack.enter_context(alerting)
        storm = Storm(address, [job.name for job in jobs], chance)
        approver = threading.Thread(daemon=True, target=approve_some, args=(servers, over, random.Random(seed)))
        for thread in (storm, approver):
            thread.start()
        try:
            for kind in kinds:
                time.sleep(chance.uniform(0.3, 1.5))
                print(f"{kind}: a server works again after {trouble(kind, servers, postgres, redis_server):.1f} s")
        finally:
            storm.end()
        try:
            settle(servers, address)
        finally:
            over.set()
            approver.join()
        told = list(acknowledged(servers.service, "/webhook"))
        heard, runs = every(servers, "/alerts"), every(servers, "/history")
        runs = [servers.wait().run(run["run_id"]) for run in runs]
    print(
        f"{storm.posted} alerts, {len(heard)} heard in {len(told)} deliveries; {len(runs)} runs:",
        Counter((run["playbook"], run["status"]) for run in runs),
        f"{sum(len(job.effects) for job in jobs)} effects; exits: {servers.exits}",
    )
    check_decisions(told, heard, runs)
    check_effects(jobs, runs)
    assert set(servers.exits) <= {-signal.SIGKILL}, "who was cut off or hung went on in the same process"
