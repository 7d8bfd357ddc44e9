"""Several servers on one PostgreSQL, in storms of alerts, and everything that can happen to the one that works.

A real Alertmanager delivers to them through the wire that plays the Service, and tries again what fails. Each seed is
a storm. Of any seed, and of many one after the other, so:

    SEED=300 SEEDS=50 TROUBLES=3 scripts/test tests/crash/test_several_servers.py -s

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
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import httpx

from tests.crash.test_random_kills import PLAYBOOKS, Flaky, check_effects
from tests.support.postgres import PostgresServer
from tests.support.programs import alertmanagers, eventually, free_port, start_alertmanager
from tests.support.server_group import KINDS, Servers, trouble
from tests.support.wires import acknowledged

SEED = int(os.environ.get("SEED", random.randrange(10_000)))
SEEDS = int(os.environ.get("SEEDS", "3"))
TROUBLES = int(os.environ.get("TROUBLES", "1"))
"""In each storm."""
JOBS = 10
OPTIONS = ("--takeover-after", "8s", "--assume-resolved-after", "6s")
GROUPS = {"alone": ["..."], "by name": ["alertname"], "by job": ["job_name"]}
"""How an Alertmanager puts alerts together that say so by their label `grouped`."""


@contextmanager
def alertmanager(directory: Path, url: str, receiver: str) -> Iterator[None]:
    """An Alertmanager that tells at once, tells again soon, and tries again what was not accepted."""
    soon = {"receiver": "trainmedic", "group_wait": "0s", "group_interval": "1s", "repeat_interval": "6s"}
    routes = [{"matchers": [f'grouped="{name}"'], "group_by": labels} for name, labels in GROUPS.items()]
    webhook = {"url": f"{receiver}/webhook", "send_resolved": True}
    receivers = [{"name": "trainmedic", "webhook_configs": [webhook]}]
    config = directory / "alertmanager.yml"
    config.write_text(json.dumps({"route": soon | {"routes": routes}, "receivers": receivers}))
    program, _ = start_alertmanager(next(iter(alertmanagers().values())), config, directory / "alertmanager", url)
    with program:
        yield


class Storm(threading.Thread):
    """Posts alerts to an Alertmanager, 30 a second, each of which ends after a while; all have when `end` returns."""

    def __init__(self, url: str, seed: int, jobs: Sequence[str]) -> None:
        super().__init__(daemon=True)
        self._url, self._seed, self._jobs = url, seed, jobs
        self._chance = random.Random(seed)
        self._over = threading.Event()
        self.posted = 0

    def run(self) -> None:
        fires: list[tuple[float, dict[str, Any]]] = []
        while not self._over.wait(0.1):
            now = time.monotonic()
            gone = [alert for until, alert in fires if until <= now]
            new = [(now + self._chance.choice([0.3, 1, 3, 8]), self._alert()) for _ in range(3)]
            fires = [each for each in fires if each[0] > now] + new
            self._tell([alert for _, alert in new], gone)
        self._tell([], [alert for _, alert in fires])

    def end(self) -> None:
        self._over.set()
        self.join()

    def _alert(self) -> dict[str, Any]:
        self.posted += 1
        labels = {
            "alertname": self._chance.choice(["Spike", "Slow", "Odd"]),
            "job_name": self._chance.choice(self._jobs),
            "grouped": self._chance.choice(list(GROUPS)),
            "storm": str(self._seed),
            "number": str(self.posted),
        }
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
            if question["run_id"] not in seen and chance.random() < 0.7:
                servers.ask(f"/runs/{question['run_id']}/approve", {})
            seen.add(question["run_id"])


def undelivered(url: str) -> int:
    """Notifications that the Alertmanager is sending, or will send again."""
    metrics = httpx.get(f"{url}/metrics", timeout=30).raise_for_status().text
    counts: Counter[str] = Counter()
    for name, value in re.findall(r'^alertmanager_(\w+)\{.*integration="webhook".*\} (\d+)$', metrics, re.MULTILINE):
        counts[name] += int(value)
    answered = counts["notification_requests_total"] - counts["notification_requests_failed_total"]
    return counts["notifications_total"] - counts["notifications_failed_total"] - answered


def settle(servers: Servers, url: str) -> None:
    """Return when nothing is under way any more: no delivery, no run, no undo."""

    def is_quiet() -> bool:
        answers = [servers.ask(f"/history?limit=1&{which}=true") for which in ("open", "owes_undo")]
        return all(answer.status == 200 and not answer.body["items"] for answer in answers) and not undelivered(url)

    def stays_quiet() -> bool:
        for _ in range(4):  # for longer than the Alertmanager's group_interval
            if not is_quiet():
                return False
            time.sleep(0.4)
        return True

    eventually(stays_quiet, 120, "all is delivered, done and undone", 0.2)


def every(servers: Servers, path: str) -> list[dict[str, Any]]:
    """The items of all pages."""
    items: list[dict[str, Any]] = []
    cursor: str | None = ""
    while cursor is not None:
        page = servers.wait().ask(f"{path}&limit=500{cursor and f'&cursor={cursor}'}").body
        items, cursor = items + page["items"], page["next"]
    return items


def check_decisions(
    told: Iterable[Mapping[str, Any]], heard: Sequence[Mapping[str, Any]], runs: Sequence[Mapping[str, Any]]
) -> None:
    """Each alert that was acknowledged is kept with one decision, and known to have resolved; each run came of one
    alert, and no alert is tied to two."""
    kept = {identity(alert): alert for alert in heard}
    for alert in told:
        assert identity(alert) in kept, f"acknowledged and not kept: {alert}"
    tied = Counter(identity(alert) for run in runs for alert in run["alerts"])
    begun: list[str] = []
    for key, alert in kept.items():
        assert alert["resolved_at"], alert
        (reaction,) = alert["reactions"]
        # Of one that has ended before it could be delivered, only the end may have been.
        assert tied.pop(key, 0) == (reaction["decision"] != "resolved"), alert
        if reaction["decision"] in ("started", "stale"):  # stale: its beginning arrived after its end
            begun.append(reaction["run_id"])
    assert not tied, "runs of alerts that nobody has heard"
    assert sorted(begun) == sorted(run["run_id"] for run in runs)


def identity(alert: Mapping[str, Any]) -> tuple[str, datetime]:
    return alert["fingerprint"], datetime.fromisoformat(alert.get("starts_at") or alert["startsAt"])


def go_through(seed: int, servers: Servers, alerts_at: str, postgres: PostgresServer, redis: Any) -> None:
    """One storm with its troubles, and all that must hold after it."""
    chance, over = random.Random(seed), threading.Event()
    kinds = [KINDS[seed % len(KINDS)], *chance.choices(KINDS, k=TROUBLES - 1)]
    print(f"\nstorm {seed}: ", end="")
    with ExitStack() as stack:
        jobs = [stack.enter_context(Flaky(f"job-{seed}-{n}", redis.url)) for n in range(JOBS)]
        storm = Storm(alerts_at, seed, [job.name for job in jobs])
        storm.start()
        stack.callback(storm.end)
        approver = threading.Thread(daemon=True, target=approve_some, args=(servers, over, random.Random(seed)))
        approver.start()
        stack.callback(approver.join)
        stack.callback(over.set)
        for kind in kinds:
            time.sleep(chance.uniform(0.3, 1.5))
            print(f"{kind}, {trouble(kind, servers, postgres, redis):.1f} s until a server works; ", end="")
        storm.end()
        settle(servers, alerts_at)
    deliveries = acknowledged(servers.service, "/webhook")
    told = [alert for each in deliveries for alert in each["alerts"] if alert["labels"]["storm"] == str(seed)]
    heard = every(servers, f"/alerts?label=storm={seed}")
    items = every(servers, "/history?" + "&".join(f"job={job.name}" for job in jobs))
    runs = [servers.wait().run(item["run_id"]) for item in items]
    print(f"{storm.posted} alerts, {len(heard)} heard, in {len(runs)} runs:", *sorted(outcomes(runs).items()), end="")
    check_decisions(told, heard, runs)
    check_effects(jobs, runs)


def outcomes(runs: Iterable[Mapping[str, Any]]) -> Counter[str]:
    return Counter(f"{run['playbook']} {run['status']}" for run in runs)


def test_every_effect_happens_once_whatever_happens_to_the_leader(
    tmp_path: Path, redis_server: Any, postgres: PostgresServer
) -> None:
    """Every acknowledged alert has one decision, every command one effect, and no undo stays pending."""
    alerts_at = f"http://127.0.0.1:{free_port()}"
    options = (*OPTIONS, "--alertmanager", alerts_at)
    with (
        Servers(tmp_path, PLAYBOOKS, postgres.database(), redis_server.url, *options) as servers,
        alertmanager(tmp_path, alerts_at, f"http://127.0.0.1:{servers.port}"),
    ):
        for seed in range(SEED, SEED + SEEDS):
            go_through(seed, servers, alerts_at, postgres, redis_server)
    assert set(servers.exits) <= {-signal.SIGKILL}, "who was cut off or hung went on in the same process"
