"""From an alert to a drained Slurm node and back, through an agent: a real server, agent and Slurm."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path

import httpx
import pytest

from tests.conftest import RedisServer
from tests.integration.server.test_slurm import fire, run_of, state_of
from tests.support import slurm_cluster
from tests.support.agent_node import KEY
from tests.support.messages import resolved
from tests.support.programs import eventually, start_server
from tests.support.slurm_cluster import SlurmCluster
from tests.support.slurm_way import LOGIN, SlurmLogin

PLAYBOOK = """
playbook: drain-broken-node
on: {alert: GPUFellOffBus}
target: node
steps:
  - id: drain
    action: slurm.drain
    undo: on_resolve
"""


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SlurmCluster]:
    with SlurmCluster(slurm_cluster.fetched("24.11"), tmp_path_factory.mktemp("slurm") / "cluster") as started:
        yield started


@pytest.fixture
def login(cluster: SlurmCluster, redis_server: RedisServer, tmp_path: Path) -> Iterator[SlurmLogin]:
    with SlurmLogin(tmp_path / "login", redis_server.url, cluster, allow=("slurm.drain",)) as started:
        yield started


@pytest.fixture
def server(login: SlurmLogin, tmp_path: Path) -> Iterator[str]:
    playbooks = tmp_path / "playbooks"
    playbooks.mkdir()
    (playbooks / "drain.yaml").write_text(PLAYBOOK)
    options = ("--mode", "enforce", "--slurm-agent", LOGIN, "--redis", login.url)
    program, url = start_server(
        tmp_path / "server", *options, environment={"TRAINMEDIC_SIGNING_KEY": KEY}, playbooks=playbooks
    )
    with program:
        yield url


def test_a_node_is_drained_while_its_alert_fires(server: str, cluster: SlurmCluster, login: SlurmLogin) -> None:
    """The agent's policy names the drain alone, which brings its end with it."""
    fired = fire(server, "GPUFellOffBus", node="n2")
    run = eventually(partial(run_of, server, "node:n2"), 120, "the run is over")
    assert run["status"] == "succeeded", run
    shown = state_of(cluster, "n2")
    assert "State=IDLE+DRAIN" in shown
    assert f"Reason=trainmedic:{run['run_id']} " in shown
    httpx.post(f"{server}/webhook", json=resolved(fired)).raise_for_status()
    eventually(partial(run_of, server, "node:n2", undone=True), 120, "the drain is taken back")
    assert "DRAIN" not in state_of(cluster, "n2")
    assert login.changes("scontrol update nodename=n2 state=") == 2


def test_an_agent_that_is_killed_after_the_act_drains_once(
    server: str, cluster: SlurmCluster, login: SlurmLogin
) -> None:
    """Its answer is lost. The next one does not run the command again, and the server finds the drain."""
    login.held.touch()
    fired = fire(server, "GPUFellOffBus", node="n1")
    eventually(lambda: "DRAIN" in state_of(cluster, "n1"), 120, "Slurm has the drain")
    login.kill()
    login.held.unlink()
    login.start()
    run = eventually(partial(run_of, server, "node:n1"), 120, "the run is over")
    assert run["status"] == "succeeded", run
    assert login.changes("scontrol update nodename=n1 state=DRAIN") == 1
    assert f"Reason=trainmedic:{run['run_id']} " in state_of(cluster, "n1")
    httpx.post(f"{server}/webhook", json=resolved(fired)).raise_for_status()
    eventually(partial(run_of, server, "node:n1", undone=True), 120, "the drain is taken back")
    assert "DRAIN" not in state_of(cluster, "n1")
