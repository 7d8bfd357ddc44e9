"""Several servers on one PostgreSQL, and everything that can part them from it: nothing is done twice or dropped."""

from __future__ import annotations

import os
import random
import signal
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from tests.crash.test_random_kills import PLAYBOOKS, Flaky, check_effects, go_through
from tests.support.postgres import PostgresServer
from tests.support.server_group import Servers

KINDS = ("kill", "cut", "hang", "restart", "redis")
TROUBLES = int(os.environ.get("TROUBLES", len(KINDS)))
JOBS = 5


def trouble(kind: str, servers: Servers, postgres: PostgresServer, redis: Any = None) -> None:
    """Let it happen; `redis` is needed for the kind of that name alone."""
    match kind:
        case "kill":
            servers.kill()
        case "cut":
            servers.wait()
            postgres.cut()
        case "hang":
            servers.hang()
        case "restart":
            servers.wait()
            postgres.stop()
            postgres.start()
        case "redis":
            redis.kill()
            redis.start()


def test_whatever_happens_to_the_one_that_works_every_effect_is_once(
    tmp_path: Path, redis_server: Any, postgres: PostgresServer
) -> None:
    """Killed, cut off, hung for longer than the takeover and continued, PostgreSQL or Redis restarted: others go on."""
    seed = int(os.environ.get("SEED", random.randrange(10_000)))
    chance = random.Random(seed)
    rounds = -(-TROUBLES // len(KINDS))
    troubles = [kind for _ in range(rounds) for kind in chance.sample(KINDS, len(KINDS))][:TROUBLES]
    print(f"seed {seed}: {troubles}")
    over = threading.Event()
    jobs = [Flaky(f"job-{number}", redis_server.url) for number in range(JOBS)]
    with (
        Servers(tmp_path, PLAYBOOKS, postgres.database(), redis_server.url) as servers,
        ThreadPoolExecutor(JOBS) as threads,
    ):
        for job in jobs:
            job.__enter__()
        try:
            going = [
                threads.submit(go_through, servers, job.name, over, random.Random(seed + n))
                for n, job in enumerate(jobs)
            ]
            for kind in troubles:
                time.sleep(chance.uniform(0.3, 1.5))
                trouble(kind, servers, postgres, redis_server)
            servers.wait()
            over.set()
            ids = [run_id for future in going for run_id in future.result()]
            works = servers.wait()
            runs = [works.run(run_id) for run_id in ids]
            assert len(works.runs()) == len(runs), "each alert led to one run"
        finally:
            over.set()
            for job in jobs:
                job.__exit__()

    print(f"{len(runs)} runs:", Counter((run["playbook"], run["status"]) for run in runs), "exits:", servers.exits)
    assert set(servers.exits) <= {-signal.SIGKILL}, "who was cut off or hung went on in the same process"
    check_effects(jobs, runs)
