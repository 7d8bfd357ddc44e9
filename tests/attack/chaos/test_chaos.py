"""Chaos: whatever breaks, and for however long, every promise holds when all is well again.

In full, two hundred faults, half of them with the runs in SQLite and half in PostgreSQL.
"""

from __future__ import annotations

import random
import threading
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.attack.chaos.cluster import GPUS, Cluster, Secrets
from tests.attack.chaos.faults import Fault, faults
from tests.attack.chaos.load import Load
from tests.attack.chaos.promises import Promises, is_owed_for_good
from tests.attack.effort import random_source, trials
from tests.conftest import RedisServer
from tests.driver.driver import Driver
from tests.support.live import OPEN
from tests.support.postgres import PostgresServer
from tests.support.programs import eventually

FAULTS = trials(4, 100)
SETTLING = trials(90, 420)
"""Seconds within which all must be well after the last fault: an undo that failed may wait five minutes until it is
tried again."""


class Chaos:
    """Does one fault after the other, and sometimes two at once."""

    def __init__(self, cluster: Cluster, chance: random.Random) -> None:
        self.cluster, self.chance = cluster, chance
        self.parts = faults(with_postgresql=cluster.postgres is not None)
        self.done: Counter[str] = Counter()
        self.failures: list[str] = []

    def run(self, count: int) -> None:
        while self.done.total() < count:
            time.sleep(self.chance.uniform(0.2, 2))
            at_once = self.chance.choice((1, 1, 1, 2))
            threads = []
            for part in self.chance.sample(sorted(self.parts), min(at_once, count - self.done.total())):
                name = self.chance.choice(sorted(self.parts[part]))
                self.done[name] += 1
                arguments = (name, self.parts[part][name], random.Random(self.chance.random()))
                threads.append(threading.Thread(daemon=True, target=self._carefully, args=arguments))
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            if self.failures:
                return

    def _carefully(self, name: str, fault: Fault, chance: random.Random) -> None:
        began = time.strftime("%H:%M:%S")
        try:
            fault(self.cluster, chance)
        except Exception as error:
            self.failures.append(f"{name}: {error!r}")
        print(f"{began} to {time.strftime('%H:%M:%S')}: {name}", flush=True)


def settled(cluster: Cluster) -> bool:
    """Whether everybody is there, every run is closed, and nothing is owed."""
    if not cluster.is_healthy():
        return False
    open_runs = [cluster.server.ask(f"/history?limit=1&status={status}") for status in OPEN]
    if any(answer.status != 200 or answer.body["items"] for answer in open_runs):
        return False
    owed = cluster.server.ask("/history?limit=1000&owes_undo=true")
    return owed.status == 200 and all(map(is_owed_for_good, owed.body["items"]))


@pytest.mark.parametrize("store", ["sqlite", "postgresql"])
def test_every_promise_holds_under_chaos(
    tmp_path: Path,
    own_redis: type[RedisServer],
    make_driver: Callable[..., Driver],
    request: pytest.FixtureRequest,
    store: str,
) -> None:
    """Server, agent, jobs, Redis, PostgreSQL, disk and driver fail in turn, while alerts fire and resolve."""
    chance = random_source()
    secret = Secrets()
    redis_directory = tmp_path / "redis"
    redis_directory.mkdir()
    redis_server = own_redis(redis_directory, password=secret.redis_password)
    postgres: PostgresServer | None = request.getfixturevalue("postgres") if store == "postgresql" else None
    with Cluster(tmp_path, redis_server, make_driver(GPUS), secret, postgres) as cluster:
        load, chaos = Load(cluster, random.Random(chance.random())), Chaos(cluster, chance)
        load.start()
        try:
            chaos.run(FAULTS)
        finally:
            load.stop()
        assert (chaos.failures, load.failures) == ([], [])
        try:
            eventually(lambda: settled(cluster), SETTLING, "all is well again", 0.5)
        except AssertionError as error:
            print(error)  # the promises say what is not
        promises = Promises(cluster, load.accepted)
        breaches = promises.breaches()
    exits = Counter(cluster.exits)
    print(f"{chaos.done.total()} faults: {dict(chaos.done)}")
    print(f"{len(load.accepted)} alerts accepted, {len(promises.runs)} runs: {dict(promises.counts)}; exits: {exits}")
    assert breaches == [], "\n".join(breaches)
