"""Redis behind Sentinels: its master is lost while commands are under way, and each has its effect once."""

from __future__ import annotations

import random
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tests.crash.test_random_kills import PLAYBOOKS, Flaky, check_effects, go_through
from tests.support.live import Server
from tests.support.long_tests import some_of
from tests.support.sentinels import Sentinels

JOBS = 3


@pytest.mark.parametrize("kinds", some_of([("killed",), ("asked", "hung", "killed", "asked", "killed")]))
def test_every_effect_happens_once_whatever_happens_to_the_master(
    tmp_path: Path, own_redis: Any, kinds: tuple[str, ...]
) -> None:
    """The server and the jobs find the new master by themselves, and none waits forever for the old one."""
    seed = random.randrange(10_000)
    print(f"seed {seed}: {kinds}")
    chance, over = random.Random(seed), threading.Event()
    with (
        Sentinels(tmp_path, own_redis) as sentinels,
        Server(tmp_path / "server", PLAYBOOKS, "--redis", sentinels.url) as server,
        ThreadPoolExecutor(JOBS) as threads,
    ):
        jobs = [Flaky(f"job-{number}", sentinels.url) for number in range(JOBS)]
        for job in jobs:
            job.__enter__()
        try:
            going = [
                threads.submit(go_through, server, job.name, over, random.Random(seed + n))
                for n, job in enumerate(jobs)
            ]
            for kind in kinds:
                time.sleep(chance.uniform(0.3, 1.5))
                sentinels.fail_over(kind)
            over.set()
            runs = [server.run(run_id) for future in going for run_id in future.result()]
        finally:
            over.set()
            for job in jobs:
                job.__exit__()
    print(f"{len(runs)} runs:", Counter((run["playbook"], run["status"]) for run in runs))
    check_effects(jobs, runs)
