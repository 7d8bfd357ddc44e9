"""The signing key is exchanged while a cap is active and alerts come and go, by the procedure and against it."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.attack.effort import random_source, trials
from tests.driver.driver import Driver
from tests.support.agent_node import KEY
from tests.support.gpu_node import GpuNode
from tests.support.live import Server
from tests.support.messages import delivery, resolved
from tests.support.programs import eventually

PLAYBOOK = """
playbook: cap
on: {alert: Hot}
target: {node: n1, gpu: "{{ labels.job_name }}"}
steps:
  - {id: cap, action: gpu.power_limit, with: {percent: 80}, timeout: 5s, undo: on_resolve}
"""
NEW = "the key that takes its place"
SIGNING, PREVIOUS = "TRAINMEDIC_SIGNING_KEY", "TRAINMEDIC_PREVIOUS_SIGNING_KEY"
STEPS = ("server takes both", "agent takes both", "server forgets", "agent forgets", "alert resolves", "another fires")


def test_each_cap_is_reverted_whatever_the_order_of_a_key_exchange(
    redis_url: str, tmp_path: Path, make_driver: Callable[..., Driver]
) -> None:
    """In the right order nothing fails. In a wrong one commands are refused until both sides know one key; then every
    cap whose alert has resolved is reverted, and no GPU has a limit that no run explains.
    """
    chance = random_source()
    orders = list(itertools.permutations(STEPS))
    right = STEPS[:2] + STEPS[4:] + STEPS[2:4]
    for number, order in enumerate([right, *chance.sample(orders, trials(short=1, full=60))]):
        print(order)
        _exchange(tmp_path / str(number), redis_url, make_driver(2), order, is_right=number == 0)


def _exchange(directory: Path, redis_url: str, driver: Driver, order: tuple[str, ...], is_right: bool) -> None:
    directory.mkdir()
    first, second = delivery("Hot", "0"), delivery("Hot", "1")
    for entry in (*first["alerts"], *second["alerts"]):
        entry["fingerprint"] += directory.name
    server = Server(directory / "server", PLAYBOOK, "--redis", redis_url)
    with GpuNode(directory / "node", redis_url, driver) as node:
        try:
            server.start(**{SIGNING: KEY})
            server.ask("/webhook", first)
            eventually(lambda: driver.watts(0) == 560, 60, "capped")
            for step in order:
                match step:
                    case "server takes both":
                        _restart(server, {SIGNING: NEW, PREVIOUS: KEY})
                    case "server forgets":
                        _restart(server, {SIGNING: NEW})
                    case "agent takes both":
                        _restart(node, {SIGNING: NEW, PREVIOUS: KEY})
                    case "agent forgets":
                        _restart(node, {SIGNING: NEW})
                    case "alert resolves":
                        assert server.ask("/webhook", resolved(first)).status == 200
                    case "another fires":
                        assert server.ask("/webhook", second).status == 200
            # Whatever the order was, both know the new key now.
            eventually(lambda: driver.watts(0) == 700, 120, "reverted")
            other = eventually(lambda: _over(server, gpu="1"), 60, "the other run has acted")
            is_capped = [step["status"] for step in other["steps"]] == ["succeeded"]
            assert driver.watts(1) == (560 if is_capped else 700)
            assert is_capped or not is_right
            server.ask("/webhook", resolved(second))
            eventually(lambda: not any(run["owes_undo"] for run in server.runs()), 120, "nothing is owed")
            assert (driver.watts(0), driver.watts(1)) == (700, 700)
        finally:
            server.__exit__()


def _over(server: Server, gpu: str) -> dict[str, Any] | None:
    """Return the run on the GPU once it acts no more."""
    runs = (server.run(run["run_id"]) for run in server.runs() if run["gpu"] == gpu)
    return next((run for run in runs if run["status"] != "running"), None)


def _restart(program: Server | GpuNode, keys: dict[str, str]) -> None:
    program.kill()
    program.start(**keys)
