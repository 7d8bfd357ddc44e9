"""The server is killed at write boundaries of a repair on Slurm, by each way in: one drain, one requeue, one undo.

A run of the tests takes some boundaries by chance; ``BOUNDARIES=all`` in the environment takes every one.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from tests.crash.doomed import ALL, WANTED, DoomedServer, chosen, least
from tests.support import slurm_cluster
from tests.support.agent_node import KEY
from tests.support.messages import resolved
from tests.support.programs import eventually
from tests.support.slurm_alerts import alert, state_of
from tests.support.slurm_cluster import SlurmCluster
from tests.support.slurm_way import LOGIN, SlurmLogin

PLAYBOOK = """
playbook: leave-broken-node
on: {alert: GPUFellOffBus}
target: node
steps:
  - {id: drain, action: slurm.drain, undo: on_resolve}
  - {id: requeue, action: slurm.requeue, with: {job_id: "{{ labels.slurm_job_id }}", hold: true}}
"""
PARTS = int(WANTED) if WANTED not in ("", ALL) else 3


class Outcome(NamedTuple):
    run: dict[str, Any]
    """After the undo."""
    drained: str
    """The node, as scontrol shows it before the alert resolves."""
    returned: str
    job: str
    server: DoomedServer


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SlurmCluster]:
    with SlurmCluster(slurm_cluster.fetched("26.05"), tmp_path_factory.mktemp("slurm") / "cluster") as started:
        yield started


@pytest.fixture(params=["rest", "agent"])
def options(request: pytest.FixtureRequest, cluster: SlurmCluster, redis_url: str, tmp_path: Path) -> Iterator[Any]:
    """How the server reaches Slurm."""
    if request.param == "rest":
        yield "--slurm-url", cluster.rest_url, "--slurm-user", "root", "--slurm-token-file", str(cluster.token_file)
        return
    with SlurmLogin(tmp_path / "login", redis_url, cluster):
        yield "--slurm-agent", LOGIN


@pytest.fixture
def scenario(
    tmp_path: Path, redis_url: str, cluster: SlurmCluster, options: tuple[str, ...]
) -> Callable[[int], Outcome]:
    def live(fatal: int) -> Outcome:
        job = cluster.submit("while :; do sleep 0.2; done", "--requeue", "-w", "n2")
        eventually(lambda: cluster.run("squeue", "-h", "-j", job, "-o", "%T").strip() == "RUNNING", 120, "the job runs")
        place = tmp_path / f"killed-at-{fatal}-{time.monotonic_ns()}"
        with DoomedServer(place, redis_url, fatal, PLAYBOOK, *options, environment=_SIGNED) as server:
            outcome = _live_through(server, cluster, job)
        cluster.clear()
        return outcome

    return live


_SIGNED = {"TRAINMEDIC_SIGNING_KEY": KEY}


def _live_through(server: DoomedServer, cluster: SlurmCluster, job: str) -> Outcome:
    """Fire, wait for the end of the run, resolve, wait for the undo."""
    fired = alert("GPUFellOffBus", node="n2", slurm_job_id=job)

    def run(has_undone: bool) -> dict[str, Any] | None:
        items = server.runs()
        assert len(items) <= 1, items
        found = server.ask(f"/history/{items[0]['run_id']}").body if items else None
        is_over = found is not None and found["status"] not in ("running", "waiting")
        return found if is_over and (found["undone_at"] or not has_undone) else None

    eventually(lambda: server.ask("/webhook", fired).status == 200, 120, "firing accepted", 0.05)
    eventually(partial(run, False), 120, "the run is over", 0.05)
    drained, requeued = state_of(cluster, "n2"), cluster.run("scontrol", "show", "job", job)
    eventually(lambda: server.ask("/webhook", resolved(fired)).status == 200, 120, "resolved accepted", 0.05)
    whole = eventually(partial(run, True), 120, "the drain is taken back", 0.05)
    return Outcome(whole, drained, state_of(cluster, "n2"), requeued, server)


def test_a_kill_at_any_boundary_drains_and_requeues_once(scenario: Callable[[int], Outcome]) -> None:
    """No drain is left behind."""
    boundaries = scenario(0).server.log.read_text().splitlines()
    survived = []
    for fatal in itertools.chain((0,), chosen(len(boundaries), PARTS)):
        run, drained, returned, job, server = scenario(fatal)
        if fatal and server.deaths == 0:
            break
        name = server.log.read_text().splitlines()[fatal - 1] if fatal else "no kill"
        where = f"killed at {fatal}, {name}"
        assert run["status"] == "succeeded", (where, run["message"])
        assert "+DRAIN" in drained, where
        assert f"Reason=trainmedic:{run['run_id']} " in drained, where
        assert "Restarts=1 " in job, where
        assert "Priority=0 " in job, where  # it is held
        assert job.count("trainmedic:requeue") == 1, where
        assert "DRAIN" not in returned, where
        survived.append(fatal)
    print(f"killed at {len(survived) - 1} boundaries of {len(boundaries)}: {survived[1:]}")
    assert len(survived) - 1 >= least(len(boundaries), PARTS)
