"""From an alert to a drained Slurm node and back, through an agent: a real server, agent and Slurm."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.conftest import RedisServer
from tests.support import slurm_cluster
from tests.support.agent_node import KEY
from tests.support.programs import eventually
from tests.support.slurm_alerts import (
    DRAIN,
    drain_while_an_alert_fires,
    fire,
    serving,
    state_of,
    until_closed,
    until_drain_has_ended,
)
from tests.support.slurm_cluster import SlurmCluster
from tests.support.slurm_way import LOGIN, SlurmLogin


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
    options = ("--slurm-agent", LOGIN, "--redis", login.url)
    with serving(tmp_path, {"drain.yaml": DRAIN}, *options, environment={"TRAINMEDIC_SIGNING_KEY": KEY}) as url:
        yield url


def test_a_node_is_drained_while_its_alert_fires(server: str, cluster: SlurmCluster, login: SlurmLogin) -> None:
    """The agent's policy names only the drain, which includes ending it."""
    drain_while_an_alert_fires(server, cluster, "n2")
    assert login.changes("scontrol update nodename=n2 state=") == 2


def test_an_agent_killed_after_the_action_drains_once(server: str, cluster: SlurmCluster, login: SlurmLogin) -> None:
    """Its answer is lost. Its successor does not repeat the command, and the server finds the drain."""
    login.held.touch()
    fired = fire(server, "GPUFellOffBus", node="n1")
    eventually(lambda: "DRAIN" in state_of(cluster, "n1"), 120, "Slurm has the drain")
    login.kill()
    login.held.unlink()
    login.start()
    run = until_closed(server, "node:n1")
    assert run["status"] == "succeeded", run
    assert login.changes("scontrol update nodename=n1 state=DRAIN") == 1
    assert f"Reason=trainmedic:{run['run_id']} " in state_of(cluster, "n1")
    until_drain_has_ended(server, cluster, "n1", fired)
