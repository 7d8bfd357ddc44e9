"""A real server drains a node while the Kubernetes API is in trouble for as long as an upgrade of it lasts; and
what operators and modes do to a drain.

TRAINMEDIC_TEST_OUTAGE_SECONDS is how long each trouble lasts: seconds every day, minutes for a proof.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.kubernetes.api_server import ApiServer, Fault
from tests.kubernetes.living_node import LivingNode, evicted, is_cordoned
from tests.support.live import Server
from tests.support.messages import delivery, resolved
from tests.support.programs import eventually

SECONDS = float(os.environ.get("TRAINMEDIC_TEST_OUTAGE_SECONDS", "1"))
PLAYBOOK = """
playbook: drain-node
on: {alert: NodeSick}
target: {node: '{{ labels.job_name }}'}
steps:
  - {id: drain, action: k8s.drain, timeout: 30m, undo: on_resolve}
"""
FOR_EVER = 1_000_000_000
WRITES = {"create", "patch", "delete", "update"}


@contextmanager
def trouble(stand_in: ApiServer, kind: str) -> Iterator[None]:
    """The API server is away, slower than any client waits, overloaded, or failing."""
    if kind == "away":
        with stand_in.outage():
            yield
        return
    if kind == "slow":
        stand_in.latency = min(20.0, SECONDS / 2)
    else:
        stand_in.faults.insert(0, Fault(int(kind), times=FOR_EVER, retry_after=1 if kind == "429" else None))
    yield
    stand_in.latency = 0
    stand_in.faults[:] = [one for one in stand_in.faults if one.name]


def evictions(stand_in: ApiServer) -> int:
    return sum(one.resource == "pods/eviction" for one in stand_in.requests)


def story(run: dict[str, Any]) -> list[str]:
    """What the history tells of the run: kinds, and what the drain said while it waited."""
    return [event["kind"] + str(event.get("data") or "") for event in run["events"]]


def test_a_drain_survives_all_failures_of_the_api(stand_in: ApiServer, kubeconfig: Path, tmp_path: Path) -> None:
    """Down, slow, overloaded and failing in turn, the server killed in two of these phases: every pod ends,
    once; one step succeeds, and the history says what was waited for."""
    with (
        LivingNode(kubeconfig, 30, after=0.2) as node,
        Server(tmp_path / "s", PLAYBOOK, "--kubernetes", str(kubeconfig)) as server,
    ):
        held = Fault(500, times=FOR_EVER, resource="pods/eviction", name="worker-7", message="held by the test")
        stand_in.faults.append(held)
        fired = delivery("NodeSick", node.name)
        assert server.ask("/webhook", fired).status == 200
        eventually(lambda: len(node.ended) >= 2, 60, "some pods ended", 0.05)
        for kind in ("away", "slow", "429", "500"):
            with trouble(stand_in, kind):
                time.sleep(SECONDS / 2)
                if kind in ("slow", "500"):
                    server.kill()
                    server.start()
                time.sleep(SECONDS / 2)
        eventually(lambda: len(node.ended) == 29, 60, "all but the held one ended", 0.05)
        stand_in.faults.remove(held)
        run = server.closed_run(60)
        assert run["status"] == "succeeded", run
        (step,) = run["steps"]
        assert step["output"]["left"] == []
        assert step["output"]["before"] == {"cordoned": False}
        assert sorted(node.ended) == sorted(node.pods)
        assert evicted(stand_in) == set(node.pods)
        told = story(run)
        print("\n".join(told))
        assert sum("step_succeeded" in one for one in told) == 1
        assert any("attempt_waits" in one for one in told), told
        assert is_cordoned(stand_in, node.ref)
        assert server.ask("/webhook", resolved(fired)).status == 200
        assert server.undone_run()["steps"][0]["undo"]["status"] == "done"
        assert not is_cordoned(stand_in, node.ref)


def test_a_drain_that_is_cancelled_stops_evicting(stand_in: ApiServer, kubeconfig: Path, tmp_path: Path) -> None:
    """Pods not yet evicted stay; the run is cancelled at once, and the cordon is reverted."""
    stand_in.faults.append(Fault(500, times=FOR_EVER, resource="pods/eviction", name="worker-1"))
    with (
        LivingNode(kubeconfig, 3) as node,
        Server(tmp_path / "s", PLAYBOOK, "--kubernetes", str(kubeconfig)) as server,
    ):
        assert server.ask("/webhook", fired := delivery("NodeSick", node.name)).status == 200
        eventually(lambda: len(node.ended) == 2, 60, "the others ended", 0.05)
        (run,) = server.runs()
        assert server.ask(f"/runs/{run['run_id']}/cancel", {}).status in (200, 202)
        assert server.closed_run()["status"] == "cancelled"
        asked = evictions(stand_in)
        stand_in.faults.clear()
        assert server.ask("/webhook", resolved(fired)).status == 200
        assert server.undone_run()["steps"][0]["undo"]["status"] == "done"
        assert not is_cordoned(stand_in, node.ref)
        assert evictions(stand_in) == asked
        assert sorted(node.ended) == ["worker-0", "worker-2"]


def test_an_observing_server_writes_nothing(stand_in: ApiServer, kubeconfig: Path, tmp_path: Path) -> None:
    """There is no cordon, eviction or Event; the history shows what would have been done."""
    with (
        LivingNode(kubeconfig, 2) as node,
        Server(tmp_path / "s", PLAYBOOK, "--kubernetes", str(kubeconfig), "--mode", "observe") as server,
    ):
        before = [one for one in stand_in.requests if one.verb in WRITES]
        assert server.ask("/webhook", delivery("NodeSick", node.name)).status == 200
        run = server.closed_run()
        assert run["status"] == "observed"
        assert [step["action"] for step in run["steps"]] == ["k8s.drain"]
        assert [one for one in stand_in.requests if one.verb in WRITES] == before
        assert node.ended == []
