"""Machines whose clocks differ for good: the agent's or the job's is wrong from its start, the server's is right."""

from __future__ import annotations

import re
from collections.abc import Callable
from datetime import datetime, timedelta
from pathlib import Path

import pytest

from tests.driver.driver import Driver
from tests.support.agent_node import KEY
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


@pytest.mark.parametrize("ahead", [timedelta(seconds=each) for each in (-86_400, -40, 40, 3_600)])
def test_an_agent_with_a_wrong_clock_acts_or_reports_both_times(
    ahead: timedelta, tmp_path: Path, redis_url: str, make_driver: Callable[..., Driver]
) -> None:
    """A clock that is behind delays nothing. One ahead by more than a command's lifetime makes it refuse, and
    the run shows both times. A cap is reverted when the alert ends.
    """
    driver, fired, clock = make_driver(1), delivery("Hot", "0"), MachineClock(tmp_path / "clock")
    clock.set(ahead)
    signed = {"TRAINMEDIC_SIGNING_KEY": KEY}
    with GpuNode(tmp_path / "node", redis_url, driver) as node:
        node.kill()
        node.start(**clock.environment)
        with Server(tmp_path / "server", PLAYBOOK, "--redis", redis_url, environment=signed) as server:
            assert [run["decision"] for run in server.ask("/webhook", fired).body["runs"]] == ["started"]
            run = server.closed_run()
            if ahead < timedelta(0):
                assert (run["status"], driver.watts(0)) == ("succeeded", 560)
                server.ask("/webhook", resolved(fired))
                eventually(lambda: driver.watts(0) == 700, 60, "reverted")
            else:
                assert (run["status"], driver.watts(0), run["owes_undo"]) == ("failed", 700, False)
                shown = re.search(
                    r"by this machine's clock it arrived at (.+Z), after its expiry at (.+Z)", run["message"]
                )
                assert shown is not None, run["message"]
                arrived, expired = map(datetime.fromisoformat, shown.groups())
                assert ahead - timedelta(seconds=15) < arrived - expired < ahead
            (agent,) = server.ask("/agents").body["items"]
            assert agent["believed"] == (abs(ahead) < timedelta(minutes=1))
            assert agent["believed"] or "clock" in agent["doubts"][0]
