"""A machine whose clock goes mad: server and agent run on it, work, and are killed, while it is set again and again."""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

from tests.attack.effort import IS_FULL, random_source, trials
from tests.driver.driver import Driver
from tests.support.gpu_node import GpuNode
from tests.support.live import Server
from tests.support.messages import delivery, resolved
from tests.support.programs import eventually
from tests.support.set_clock import MachineClock

GPUS = 4
PLAYBOOK = """
playbook: cap
on: {alert: Hot}
target: {node: n1, gpu: "{{ labels.job_name }}"}
steps:
  - {id: cap, action: gpu.power_limit, with: {percent: 80}, timeout: 10s, undo: on_resolve}
"""
JUMPS = [timedelta(minutes=2), timedelta(hours=2), timedelta(days=1), timedelta(days=100), timedelta(days=4000)]


def test_nothing_is_lost_or_repeated_whatever_the_clock_says(
    tmp_path: Path, redis_url: str, make_driver: Callable[..., Driver]
) -> None:
    """No history item is lost, no alert acts twice, no cap ends while it is needed, and each is reverted within
    a minute of the end of its alert. In full the server is killed as well, and starts with the wrong time."""
    random, clock, driver = random_source(), MachineClock(tmp_path), make_driver(GPUS)
    server = Server(tmp_path / "s", PLAYBOOK, "--redis", redis_url, "--retention", "1d")
    items: set[str] = set()
    with GpuNode(tmp_path / "node", redis_url, driver) as node:
        node.kill()
        node.start(**clock.environment)
        with clock.serving(server):
            for _ in range(trials(short=4, full=400)):
                gpu = random.randrange(GPUS)
                fired = delivery("Hot", str(gpu))
                for entry in fired["alerts"]:
                    entry["fingerprint"] += f"-{len(items)}"
                assert [run["decision"] for run in server.ask("/webhook", fired).body["runs"]] == ["started"]
                eventually(lambda gpu=gpu: driver.watts(gpu) == 560, 60, "capped")
                clock.set(random.choice([jump * sign for jump in JUMPS for sign in (-1, 1)] + [timedelta(0)]))
                if IS_FULL and random.random() < 0.3:
                    time.sleep(random.uniform(0, 90))
                assert server.ask("/webhook", fired).body["duplicates"] == 1
                if random.random() < 0.5:
                    # An agent that starts with the wrong time has it; what stands on its GPUs it leaves.
                    for ahead in (clock.ahead, timedelta(0)):
                        clock.set(ahead)
                        node.kill()
                        node.start(**clock.environment)
                assert driver.watts(gpu) == 560
                assert server.ask("/webhook", resolved(fired)).status == 200
                eventually(lambda gpu=gpu: driver.watts(gpu) == 700, 60, "given back")
                found = {run["run_id"] for run in server.runs()}
                assert found >= items
                assert len(found) == len(items) + 1
                items = found
                if IS_FULL and random.random() < 0.1:
                    clock.set(timedelta(0))
                    server.kill()
                    clock.start(server)
            eventually(lambda: not any(server.run(run_id)["owes_undo"] for run_id in items), 60, "nothing is owed")
