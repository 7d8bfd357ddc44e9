"""The server is killed at write boundaries of a run on a node and its jobs: each job gets each act and each undo once.

The jobs are real clients of the SDK on a real Redis; each notes every effect. A run of the tests takes some
boundaries by chance; ``BOUNDARIES=all`` in the environment takes every one.
"""

from __future__ import annotations

import itertools
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from tests.crash.doomed import ALL, WANTED, DoomedServer, chosen, least
from tests.support.live import OPEN, Job
from tests.support.messages import delivery
from tests.support.programs import eventually

PLAYBOOK = """
playbook: both
on: {alert: NVLinkError}
target: {node: "{{ labels.node }}", jobs: on_node}
steps:
  - {id: slow, target: jobs, action: job.scale_lr, with: {factor: 0.5}, undo: on_failure}
  - {id: sure, approve: "Go on with {{ target.jobs | join(', ') }}?", timeout: 10m}
  - {id: more, target: jobs, action: job.accumulate, with: {factor: 2}}
"""
NAMES = ("llm-1", "llm-2")
PARTS = int(WANTED) if WANTED not in ("", ALL) else 4


def live_through(server: DoomedServer, answer: str) -> dict[str, Any]:
    """Fire once both jobs are known, answer the question, and return the run once it is over."""

    def whole() -> dict[str, Any] | None:
        items = server.runs()
        assert len(items) <= 1, items
        found: dict[str, Any] | None = server.ask(f"/history/{items[0]['run_id']}").body if items else None
        return found

    def are_known() -> bool:
        jobs = server.ask("/jobs").body or {"items": []}
        return {job["name"] for job in jobs["items"]} >= set(NAMES)

    def is_asked() -> bool:
        found = whole()
        return found is not None and found["status"] == "awaiting_approval"

    def is_answered() -> bool:
        found = whole()
        return found is not None and server.ask(f"/runs/{found['run_id']}/{answer}", {}).status in (200, 409)

    def is_over() -> bool:
        found = whole()
        return found is not None and found["status"] not in OPEN and not found["owes_undo"]

    fired = delivery("NVLinkError", "llm-1")
    fired["alerts"][0]["labels"]["node"] = "n1"
    eventually(are_known, 120, "jobs known", 0.02)
    eventually(lambda: server.ask("/webhook", fired).status == 200, 120, "firing accepted", 0.02)
    eventually(is_asked, 120, "question asked", 0.02)
    eventually(is_answered, 120, "question answered", 0.02)
    eventually(is_over, 120, "run over", 0.02)
    return eventually(whole, 60, "the run", 0.02)


@pytest.mark.parametrize(
    ("answer", "status", "second"),
    [("approve", "succeeded", "job.accumulate 2"), ("reject", "rejected", "job.scale_lr 2")],
)
def test_a_kill_repeats_and_loses_nothing_on_any_job(
    tmp_path: Path, redis_url: str, monkeypatch: pytest.MonkeyPatch, answer: str, status: str, second: str
) -> None:
    """At every boundary: the act, then the next one or the undo, once on each job."""
    monkeypatch.setenv("TRAINMEDIC_NODE", "n1")

    def live(fatal: int) -> tuple[dict[str, Any], DoomedServer, list[Job]]:
        place = tmp_path / f"killed-at-{fatal}-{time.monotonic_ns()}"
        with ExitStack() as stack:
            jobs = [stack.enter_context(Job(name, redis_url)) for name in NAMES]
            server = stack.enter_context(DoomedServer(place, redis_url, fatal, PLAYBOOK))
            return live_through(server, answer), server, jobs

    _, server, _ = live(0)
    boundaries = server.log.read_text().splitlines()
    survived = []
    for fatal in itertools.chain((0,), chosen(len(boundaries), PARTS)):
        run, server, jobs = live(fatal)
        if fatal and server.deaths == 0:
            break
        where = f"killed at {fatal}, {server.log.read_text().splitlines()[fatal - 1] if fatal else 'no kill'}"
        assert [job.done for job in jobs] == [["job.scale_lr 0.5", second]] * 2, where
        assert (run["status"], run["also"]) == (status, ["job:llm-1", "job:llm-2"]), where
        assert len({command for job in jobs for command, _ in job.effects}) == 4, where
        survived.append(fatal)
    print(f"killed at {len(survived) - 1} boundaries of {len(boundaries)}: {survived[1:]}")
    assert len(survived) - 1 >= least(len(boundaries), PARTS)
