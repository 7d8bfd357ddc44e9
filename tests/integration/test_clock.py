"""A server whose machine's clock is set while it runs; Redis and the node's agent have the right time."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import pytest

from tests.driver.driver import Driver
from tests.support.gpu_node import GpuNode
from tests.support.live import Server
from tests.support.messages import delivery, resolved
from tests.support.programs import eventually
from tests.support.set_clock import MachineClock

PLAYBOOK = """
playbook: cap
on: {alert: Hot}
target: {node: n1, gpu: "{{ labels.job_name }}"}
steps:
  - {id: cap, action: gpu.power_limit, with: {percent: 80}, timeout: 10s, undo: on_resolve}
"""


@pytest.mark.long
def test_a_pending_undo_is_done_although_the_clock_was_set_back(
    tmp_path: Path, redis_url: str, make_driver: Callable[..., Driver]
) -> None:
    """It was set back by two hours without its agent; the command is still in time for the agent's clock."""
    clock, driver = MachineClock(tmp_path), make_driver(1)
    node = GpuNode(tmp_path / "node", redis_url, driver)
    server = Server(tmp_path / "s", PLAYBOOK, "--redis", redis_url)
    with node, clock.serving(server):
        fired = delivery("Hot", "0")
        assert server.ask("/webhook", fired).status == 200
        assert server.closed_run()["status"] == "succeeded"
        assert driver.watts(0) == 560
        node.kill()
        assert server.ask("/webhook", resolved(fired)).status == 200
        # The clock is set while the next attempt waits for its moment.
        eventually(lambda: server.only_run()["steps"][0]["undo"]["retry_at"], 60, "the undo waits", 0.02)
        clock.set(timedelta(hours=-2))
        eventually(lambda: "set 7200 s back" in server.ask("/ready").body["clock"]["detail"], 60, "told")
        node.start()
        assert server.undone_run(60)["steps"][0]["undo"]["status"] == "done"
        assert driver.watts(0) == 700


def test_a_clock_set_forward_loses_nothing(tmp_path: Path, redis_url: str, make_driver: Callable[..., Driver]) -> None:
    """It jumps 100 days: the server continues in true time; a start with the wrong time deletes nothing, knows
    the alert again, and gives back what is owed."""
    clock, driver = MachineClock(tmp_path), make_driver(2)
    server = Server(tmp_path / "s", PLAYBOOK, "--redis", redis_url, "--retention", "1d")
    with GpuNode(tmp_path / "node", redis_url, driver), clock.serving(server):
        fired, later = delivery("Hot", "0"), delivery("Hot", "1")
        assert server.ask("/webhook", fired).status == 200
        run_id = server.closed_run()["run_id"]
        clock.set(timedelta(days=100))
        assert [run["decision"] for run in server.ask("/webhook", later).body["runs"]] == ["started"]
        eventually(lambda: driver.watts(1) == 560, 60, "the other GPU was capped")
        assert server.ask("/webhook", fired).body["duplicates"] == 1
        eventually(lambda: not server.ask("/ready").body["clock"]["ok"], 60, "told")
        server.stop()
        clock.start(server)
        assert {run["run_id"] for run in server.runs()} >= {run_id}
        assert server.ask("/webhook", fired).body["duplicates"] == 1
        assert len(server.runs()) == 2
        clock.set(timedelta(0))
        assert server.ask("/webhook", resolved(fired)).status == 200
        eventually(lambda: driver.watts(0) == 700, 60, "given back")
        assert driver.watts(1) == 560
