"""The server is killed while it drains a node again whose drain slurmctld has lost: the next one finishes that."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.conftest import RedisServer
from tests.support import slurm_cluster
from tests.support.agent_node import KEY
from tests.support.programs import Program, eventually, start_server
from tests.support.slurm_alerts import closed_run, fire, state_of, until_drain_has_ended
from tests.support.slurm_cluster import SlurmCluster
from tests.support.slurm_way import LOGIN, SlurmLogin

DRAIN = """
playbook: drain-lost-node
on: {alert: GPULost}
target: node
steps:
  - {id: drain, action: slurm.drain, undo: on_resolve}
"""


@pytest.fixture(scope="module", params=["24.11", "26.05"])
def cluster(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[SlurmCluster]:
    root = slurm_cluster.fetched(request.param)
    with SlurmCluster(root, tmp_path_factory.mktemp("slurm") / "cluster") as started:
        yield started


@pytest.fixture
def login(cluster: SlurmCluster, redis_server: RedisServer, tmp_path: Path) -> Iterator[SlurmLogin]:
    with SlurmLogin(tmp_path / "login", redis_server.url, cluster, allow=("slurm.drain",)) as started:
        yield started


def server(directory: Path, login: SlurmLogin) -> tuple[Program, str]:
    (directory / "playbooks").mkdir(exist_ok=True)
    (directory / "playbooks" / "drain.yaml").write_text(DRAIN)
    options = ("--mode", "enforce", "--slurm-agent", LOGIN, "--redis", login.url)
    environment = {"TRAINMEDIC_SIGNING_KEY": KEY}
    return start_server(directory / "server", *options, environment=environment, playbooks=directory / "playbooks")


def kinds(url: str) -> list[str]:
    run: dict[str, Any] | None = closed_run(url, "node:n1")
    return [event["kind"] for event in run["events"]] if run is not None else []


def is_updating(login: SlurmLogin) -> bool:
    """Whether an update of scontrol's has begun and not ended."""
    commands = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            commands.append((process / "cmdline").read_text())
        except OSError:
            continue
    return any(str(login.directory / "commands") in each and "\0update\0" in each for each in commands)


@pytest.mark.parametrize("moment", ["before", "after"])
def test_a_server_killed_while_it_drains_again_is_followed_by_one_that_finishes(
    cluster: SlurmCluster, login: SlurmLogin, tmp_path: Path, moment: str
) -> None:
    """Before the act it is made, after it it is found."""
    program, url = server(tmp_path, login)
    blocks = login.blocked if moment == "before" else login.held
    with program:
        with cluster.unsaved("node_state"):
            fired = fire(url, "GPULost", node="n1")
            eventually(partial(kinds, url), 120, "the node is drained")
            httpx.post(f"{url}/pause", json={}).raise_for_status()
            cluster.kill_controller()
        eventually(lambda: not httpx.get(f"{url}/ready").json()["slurm"]["ok"], 120, "Slurm is silent")
        cluster.start_controller()
        eventually(lambda: "State=IDLE " in (cluster.shown("node", "n1") or ""), 120, "the node is idle again")
        eventually(lambda: "lease_lost" in kinds(url), 120, "the loss is recorded")
        blocks.touch()
        httpx.post(f"{url}/resume", json={}).raise_for_status()
        eventually(lambda: "set_again_started" in kinds(url), 120, "it begins to drain again")
        if moment == "after":
            eventually(lambda: "DRAIN" in state_of(cluster, "n1"), 120, "the node is drained again")
        else:
            eventually(partial(is_updating, login), 60, "the agent has the command")
        program.process.kill()
    if moment == "before":
        eventually(lambda: not is_updating(login), 120, "the agent has ended its command")
        assert "DRAIN" not in state_of(cluster, "n1")
    blocks.unlink()
    program, url = server(tmp_path, login)
    with program:
        httpx.post(f"{url}/webhook", json=fired).raise_for_status()  # otherwise it waits for its end
        eventually(lambda: "set_again_done" in kinds(url), 180, "it is finished")
        assert kinds(url).count("set_again_started") == 1
        assert "+DRAIN" in state_of(cluster, "n1")
        until_drain_has_ended(url, cluster, "n1", fired)
