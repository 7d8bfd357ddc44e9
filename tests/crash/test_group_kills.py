"""The server is killed at write boundaries of a group's rollout: each member is acted on once and undone once.

The members are real clients of the SDK on a real Redis; each notes every effect. A run of the tests takes some
boundaries by chance; ``BOUNDARIES=all`` in the environment takes every one.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from tests.crash.doomed import ALL, WANTED, DoomedServer, chosen, least
from tests.support.live import Job
from tests.support.messages import delivery, resolved
from tests.support.programs import eventually

PLAYBOOK = """
playbook: in-batches
on: {alert: Power}
target: {jobs: {name: ["llm-1", "llm-2", "llm-3", "llm-4"]}}
rollout: {serial: [1, 2], check: [{wait: 20ms}]}
steps:
  - {id: slow, action: job.scale_lr, with: {factor: 0.5}, undo: on_resolve}
"""
NAMES = ("llm-1", "llm-2", "llm-3", "llm-4")
PARTS = int(WANTED) if WANTED not in ("", ALL) else 8

Scene = tuple[dict[str, Any], list[dict[str, Any]], DoomedServer, list[Job]]


def live_through(server: DoomedServer) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Fire, wait until the group has closed, resolve, wait until nothing is owed; the parent and its members."""

    def parent() -> dict[str, Any] | None:
        items = server.runs()
        assert len(items) <= 1, items  # without members
        whole: dict[str, Any] | None = server.ask(f"/history/{items[0]['run_id']}").body if items else None
        return whole

    def members() -> list[dict[str, Any]] | None:
        """None if the server died meanwhile."""
        found = parent()
        listed = server.ask(f"/history?parent={found['run_id']}").body if found is not None else None
        if listed is None:
            return None
        whole = [server.ask(f"/history/{item['run_id']}").body for item in listed["items"]]
        return whole if all(whole) else None

    def is_closed() -> bool:
        found = parent()
        return found is not None and found["status"] not in ("running", "waiting")

    def is_given_back() -> bool:
        undos = [member["steps"][0]["undo"] for member in members() or ()]
        return bool(undos) and all(undo is not None and undo["status"] in ("done", "failed") for undo in undos)

    fired = delivery("Power", "llm-1")
    eventually(lambda: server.ask("/webhook", fired).status == 200, 120, "firing accepted", 0.02)
    eventually(is_closed, 60, "group closed", 0.02)
    eventually(lambda: server.ask("/webhook", resolved(fired)).status == 200, 120, "resolved accepted", 0.02)
    eventually(is_given_back, 60, "undos carried out", 0.02)
    whole = eventually(parent, 60, "the parent", 0.02)
    return whole, eventually(members, 60, "the members", 0.02)


@pytest.fixture
def scenario(tmp_path: Path, redis_url: str) -> Callable[[int], Scene]:
    def live(fatal: int) -> Scene:
        place = tmp_path / f"killed-at-{fatal}-{time.monotonic_ns()}"
        with ExitStack() as stack:
            jobs = [stack.enter_context(Job(name, redis_url)) for name in NAMES]
            server = stack.enter_context(DoomedServer(place, redis_url, fatal, PLAYBOOK))
            whole, members = live_through(server)
        return whole, members, server, jobs

    return live


def test_a_kill_in_any_batch_repeats_and_loses_no_member(scenario: Callable[[int], Scene]) -> None:
    """At every boundary: four members in batches of 1, 2 and 1, each with one act and one undo."""
    _, _, server, _ = scenario(0)
    boundaries = server.log.read_text().splitlines()
    survived = []
    for fatal in itertools.chain((0,), chosen(len(boundaries), PARTS)):
        whole, members, server, jobs = scenario(fatal)
        if fatal and server.deaths == 0:
            break
        name = server.log.read_text().splitlines()[fatal - 1] if fatal else "no kill"
        where = f"killed at {fatal}, {name}"
        assert [job.done for job in jobs] == [["job.scale_lr 0.5", "job.scale_lr 2"]] * 4, where
        assert (whole["status"], whole["message"]) == ("succeeded", "4 members: 4 succeeded"), where
        assert sorted(member["batch"] for member in members) == [1, 2, 2, 3], where
        survived.append(fatal)
    print(f"killed at {len(survived) - 1} boundaries of {len(boundaries)}: {survived[1:]}")
    assert len(survived) - 1 >= least(len(boundaries), PARTS)
