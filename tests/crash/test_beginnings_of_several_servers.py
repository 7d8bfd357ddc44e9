"""The leader of two servers on one PostgreSQL is killed while runs begin by themselves: each beginning starts once.

More kills: KILLS=20 scripts/test tests/crash/test_beginnings_of_several_servers.py -s
"""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Sequence
from contextlib import ExitStack
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from tests.crash.test_random_kills import insist
from tests.support.live import OPEN, Job
from tests.support.messages import delivery
from tests.support.postgres import PostgresServer
from tests.support.programs import eventually
from tests.support.server_group import Servers

KILLS = int(os.environ.get("KILLS", "2"))
MINUTE = timedelta(minutes=1)

SCHEDULE = """
playbook: minutely
on: {schedule: "* * * * *"}
target: {job: llm-1}
steps:
  - {action: job.scale_lr, with: {factor: 0.5}}
"""
CHAIN = """
playbook: first
on: {alert: Spike}
target: job
steps:
  - {action: job.scale_lr, with: {factor: 0.5}}
---
playbook: second
on: {run: {playbook: first, status: succeeded}}
target: job
steps:
  - {action: job.checkpoint}
---
playbook: third
on: {run: {playbook: second, status: succeeded}}
target: job
steps:
  - {action: job.accumulate, with: {factor: 2}}
"""
AGAIN = """
playbook: repeated
on: {alert: Odd}
target: job
guards: {again: {after: 2s, times: 2}}
steps:
  - {action: job.scale_lr, with: {factor: 0.25}}
"""


def sleep_until(moment: datetime) -> None:
    time.sleep(max((moment - datetime.now(UTC)).total_seconds(), 0))


def closed(servers: Servers, count: int) -> list[dict[str, Any]]:
    """All runs, oldest first, once that many have closed."""

    def runs() -> list[dict[str, Any]] | None:
        found = servers.runs()
        return found if len([run for run in found if run["status"] not in OPEN]) >= count else None

    found = eventually(runs, 120, f"{count} runs closed", 0.1)
    return [eventually(lambda run=run: servers.run(run["run_id"]), 60, "the run", 0.1) for run in reversed(found)]


def check_once(jobs: Sequence[Job], runs: Sequence[dict[str, Any]], servers: Servers) -> None:
    """Each run has acted once, and each kill was one."""
    assert [run["status"] for run in runs] == ["succeeded"] * len(runs), runs
    ids = sorted(command for job in jobs for command, _ in job.effects)
    assert ids == sorted(run["steps"][0]["attempts"][-1]["command_id"] for run in runs)
    assert len(set(ids)) == len(ids)
    assert set(servers.exits) == {-signal.SIGKILL}


def test_each_scheduled_time_starts_one_run(tmp_path: Path, redis_url: str, postgres: PostgresServer) -> None:
    """The leader may die before that time, while it starts the run, or after it."""
    with Job("llm-1", redis_url) as job, Servers(tmp_path, SCHEDULE, postgres.database(), redis_url) as servers:
        servers.wait_for_all()
        began = datetime.now(UTC)
        for _ in range(KILLS):
            leader, now = servers.wait(), datetime.now(UTC)
            due = now.replace(second=0, microsecond=0) + MINUTE
            if due - now < timedelta(seconds=1):
                due += MINUTE
            after = random.choice([random.uniform(-0.5, 0), random.uniform(0, 0.1), random.uniform(0.1, 0.5)])
            print(f"killed {after:+.3f} s after {due:%H:%M}")
            sleep_until(due + timedelta(seconds=after))
            leader.kill()
            sleep_until(due + timedelta(seconds=1))
        servers.wait()
        first = began.replace(second=0, microsecond=0) + MINUTE
        count = (datetime.now(UTC) - first) // MINUTE + 1
        runs = closed(servers, count)
        times = [datetime.fromisoformat(run["alerts"][0]["starts_at"]) for run in runs]
        assert times == [first + number * MINUTE for number in range(len(runs))]
        assert {run["decision"] for run in runs} == {"started"}
        check_once([job], runs, servers)


@pytest.mark.parametrize(("playbooks", "alert"), [(CHAIN, "Spike"), (AGAIN, "Odd")], ids=["chain", "again"])
def test_each_end_of_a_run_starts_the_next(
    tmp_path: Path, redis_url: str, postgres: PostgresServer, playbooks: str, alert: str
) -> None:
    """The order is that of the chain, without extra runs."""
    with ExitStack() as stack:
        jobs = [stack.enter_context(Job(f"llm-{number}", redis_url)) for number in range(3)]
        servers = stack.enter_context(Servers(tmp_path, playbooks, postgres.database(), redis_url))
        servers.wait_for_all()
        fired = delivery(alert, *(job.name for job in jobs))
        assert len(insist(servers, "/webhook", fired)["runs"]) == 3
        for kill in range(KILLS):
            seen = random.randint(3 + 6 * kill // KILLS, 3 + 6 * (kill + 1) // KILLS)
            eventually(lambda seen=seen: len(servers.runs()) >= seen, 120, f"{seen} runs", 0.01)
            time.sleep(random.uniform(0, 0.2))
            print(f"killed after {seen} runs; {servers.lose('kill'):.1f} s until another works")
        closed(servers, 9)
        time.sleep(5)  # no further run begins
        runs = closed(servers, 9)
        assert len(runs) == 9
        check_once(jobs, runs, servers)
        for job in jobs:
            own = [run for run in runs if run["target"] == f"job:{job.name}"]
            if playbooks is CHAIN:
                assert [run["playbook"] for run in own] == ["first", "second", "third"]
                assert job.done == ["job.scale_lr 0.5", "job.checkpoint", "job.accumulate 2"]
            else:
                assert [run["repeats"] for run in own] == [None, *(run["run_id"] for run in own[:-1])]
                assert job.done == ["job.scale_lr 0.25"] * 3
