"""The server is killed at every write boundary of a run, restarted, and the outcome is the same each time.

The run has three steps and an undo. The job is a real client of the SDK on a real Redis; it notes
every effect. Alertmanager's part is played by posting each delivery until it is answered with 200,
which is what Alertmanager does.

A run of the tests takes 16 boundaries by chance; ``BOUNDARIES=all`` in the environment takes every one.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.crash.doomed import ALL, WANTED, DoomedServer, chosen, least
from tests.support.live import Job
from tests.support.messages import delivery, resolved
from tests.support.programs import eventually

PLAYBOOK = """
playbook: three-steps
on: {alert: Spike}
target: job
steps:
  - {id: slow, action: job.scale_lr, with: {factor: 0.5}, undo: on_resolve}
  - {id: keep, action: job.checkpoint}
  - {id: gather, action: job.accumulate, with: {factor: 2}}
"""

PARTS = int(WANTED) if WANTED not in ("", ALL) else 16

REPEATS = ("step_resumed", "undo_resumed", "alert_repeated")
EFFECTS = ["job.scale_lr 0.5", "job.checkpoint", "job.accumulate 2", "job.scale_lr 2"]


def live_through(server: DoomedServer, job: Job) -> dict[str, Any]:
    """Fire, wait for the run to close, resolve, wait for the undo; the run as the history shows it."""

    def run() -> dict[str, Any] | None:
        items = server.runs()
        assert len(items) <= 1, items
        whole: dict[str, Any] | None = server.ask(f"/history/{items[0]['run_id']}").body if items else None
        return whole

    def closed() -> bool:
        found = run()
        return found is not None and found["status"] not in ("running", "waiting")

    def undone() -> dict[str, Any] | None:
        found = run()
        undo = found["steps"][0]["undo"] if found else None
        return found if undo and undo["status"] in ("done", "failed") else None

    fired = delivery("Spike", job.name)
    eventually(lambda: server.ask("/webhook", fired).status == 200, 120, "firing accepted", 0.02)
    eventually(closed, 60, "run closed", 0.02)
    eventually(lambda: server.ask("/webhook", resolved(fired)).status == 200, 120, "resolved accepted", 0.02)
    return eventually(undone, 60, "undo carried out", 0.02)


def outcome(run: dict[str, Any]) -> dict[str, Any]:
    """What must be the same with and without a kill: everything but times (training steps too), ids and repeats."""
    kinds = [event["kind"] for event in run["events"] if event["kind"] not in REPEATS]
    outputs = [{name: value for name, value in step["output"].items() if name != "step"} for step in run["steps"]]
    return {
        "status": run["status"],
        "decision": run["decision"],
        "success": run["success"],
        "steps": [(step["id"], step["status"], step["params"]) for step in run["steps"]],
        "outputs": outputs,
        "attempts": [len(step["attempts"]) for step in run["steps"]],
        "undo": run["steps"][0]["undo"]["status"],
        "events": kinds,
    }


@pytest.fixture
def scenario(tmp_path: Path, redis_url: str) -> Callable[[int], tuple[dict[str, Any], DoomedServer, Job]]:
    def live(fatal: int) -> tuple[dict[str, Any], DoomedServer, Job]:
        with (
            Job(f"llm-{fatal}-{time.monotonic_ns()}", redis_url) as job,
            DoomedServer(tmp_path / f"killed-at-{fatal}", redis_url, fatal, PLAYBOOK) as server,
        ):
            run = live_through(server, job)
        return run, server, job

    return live


def test_a_kill_at_any_write_boundary_does_not_change_the_outcome(
    scenario: Callable[[int], tuple[dict[str, Any], DoomedServer, Job]],
) -> None:
    """Each effect once, each undo once, nothing lost: before and after each commit and each send."""
    whole, server, job = scenario(0)
    expected = outcome(whole)
    assert job.done == EFFECTS
    assert expected["status"] == "succeeded"
    boundaries = server.log.read_text().splitlines()
    assert {"before commit", "after commit"} <= set(boundaries)
    assert any("XADD" in name for name in boundaries)

    survived = []
    for fatal in chosen(len(boundaries), PARTS):
        whole, server, job = scenario(fatal)
        if server.deaths == 0:
            break
        name = server.log.read_text().splitlines()[fatal - 1]
        assert job.done == EFFECTS, f"killed at {fatal}, {name}"
        assert outcome(whole) == expected, f"killed at {fatal}, {name}"
        survived.append(fatal)
    print(f"killed at {len(survived)} boundaries of {len(boundaries)}, the same outcome each time: {survived}")
    assert len(survived) >= least(len(boundaries), PARTS)
