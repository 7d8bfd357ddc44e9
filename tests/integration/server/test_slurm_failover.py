"""Slurm's controller is killed in the middle of a repair. It restarts, or its standby takes over: each effect happens
once.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.support import slurm_cluster
from tests.support.agent_node import KEY
from tests.support.messages import resolved
from tests.support.programs import eventually
from tests.support.slurm_alerts import closed_run, fire, serving
from tests.support.slurm_cluster import WITH_STANDBY, SlurmCluster
from tests.support.slurm_way import LOGIN, SlurmLogin

PLAYBOOK = """
playbook: leave-broken-node
on: {alert: GPUFellOffBus}
target: node
steps:
  - {id: drain, action: slurm.drain, undo: on_resolve}
  - {id: look, approve: "Go on?"}
  - id: after
    action: ACTION
    with: {job_id: "{{ labels.slurm_job_id }}"}
    timeout: 4m
"""
DRAIN = """
playbook: drain-lost-node
on: {alert: GPULost}
target: node
guards: {cooldown: 30m}
steps:
  - {id: drain, action: slurm.drain, undo: on_resolve}
"""
NODES = {"rest": "n1", "agent": "n2"}
"""By the server's way to Slurm."""


class Servers:
    """One server for each way to the same Slurm."""

    def __init__(self, cluster: SlurmCluster, login: SlurmLogin) -> None:
        self.cluster = cluster
        self.login = login
        self.urls: dict[str, str] = {}

    def fire(self, alert: str, **jobs: str) -> dict[str, Any]:
        """`jobs`: Slurm's job by way. Return the deliveries by way."""
        return {way: fire(self.urls[way], alert, node=NODES[way], slurm_job_id=job) for way, job in jobs.items()}

    def closed(self, way: str, undone: bool = False, target: str = "") -> dict[str, Any]:
        ask = partial(closed_run, self.urls[way], target or f"node:{NODES[way]}", undone)
        return eventually(ask, 240, f"the run by {way} is {'undone' if undone else 'over'}")

    def shown(self, *what: str) -> str:
        """What scontrol shows, once a controller answers it."""
        return eventually(partial(self.cluster.shown, *what), 300, f"scontrol shows {what}")

    def node(self, name: str) -> str:
        return self.shown("node", name)

    def approve(self) -> None:
        for url in self.urls.values():
            (run,) = httpx.get(f"{url}/history").raise_for_status().json()["items"]
            httpx.post(
                f"{url}/runs/{run['run_id']}/approve", json={"note": "the controller is gone"}
            ).raise_for_status()

    def until_drained(self) -> None:
        for node in NODES.values():
            eventually(lambda node=node: "+DRAIN" in self.node(node), 60, "it is drained", 0.05)  # type: ignore[misc]

    def resolve(self, fired: dict[str, Any]) -> None:
        """End the alerts, and wait for the undos."""
        for way, delivery in fired.items():
            httpx.post(f"{self.urls[way]}/webhook", json=resolved(delivery)).raise_for_status()
        for way in fired:
            assert self.closed(way, undone=True)["owes_undo"] is False
            assert "DRAIN" not in self.node(NODES[way])


@pytest.fixture(scope="module", params=["24.11", "26.05"])
def cluster(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[SlurmCluster]:
    root = slurm_cluster.fetched(request.param)
    with SlurmCluster(root, tmp_path_factory.mktemp("slurm") / "cluster", WITH_STANDBY) as started:
        started.start_standby()
        yield started


@pytest.fixture
def servers(cluster: SlurmCluster, redis_url: str, tmp_path: Path) -> Iterator[Servers]:
    with ExitStack() as stack:
        servers = Servers(cluster, stack.enter_context(SlurmLogin(tmp_path / "login", redis_url, cluster)))
        rest = ("--slurm-url", cluster.rest_url, "--slurm-user", "root", "--slurm-token-file", str(cluster.token_file))
        for way, options in (("rest", rest), ("agent", ("--redis", redis_url, "--slurm-agent", LOGIN))):
            (tmp_path / way).mkdir()
            playbooks = {"leave.yaml": PLAYBOOK.replace("ACTION", after(cluster, way)), "drain.yaml": DRAIN}
            environment = {"TRAINMEDIC_SIGNING_KEY": KEY}
            serves = serving(tmp_path / way, playbooks, *options, environment=environment)
            servers.urls[way] = stack.enter_context(serves)
        yield servers


def after(cluster: SlurmCluster, way: str) -> str:
    """The step after the takeover. Over REST, 24.11 cannot requeue."""
    return "slurm.hold\n    undo: on_resolve" if cluster.is_old and way == "rest" else "slurm.requeue"


def test_after_a_takeover_a_lost_drain_is_only_recorded(servers: Servers) -> None:
    """Slurm does not show whether an operator has ended it."""
    cluster = servers.cluster
    with cluster.unsaved("node_state"):
        fired = servers.fire("GPULost", rest="0", agent="0")
        for way in NODES:
            assert servers.closed(way)["status"] == "succeeded"
        cluster.kill_controller()
    for way, node in NODES.items():
        run = eventually(lambda way=way: _with(servers.closed(way), "lease_lost"), 120, "the loss is recorded")  # type: ignore[misc]
        assert "set_again_started" not in kinds_of(run)
        assert "DRAIN" not in servers.node(node)
    cluster.start_controller()
    cluster.await_controllers()
    time.sleep(20)  # for another look
    assert not [way for way in NODES if "set_again_started" in kinds_of(servers.closed(way))]
    servers.resolve(fired)


def test_a_repair_continues_with_the_standby(servers: Servers) -> None:
    """The drain comes before, the requeue or hold after; the undo finds the returned first controller."""
    cluster, jobs = servers.cluster, {}
    for way, node in NODES.items():
        jobs[way] = cluster.submit("while :; do sleep 0.2; done", "--requeue", "-w", node)
    for job in jobs.values():
        ask = ("squeue", "-h", "-j", job, "-o", "%T")
        eventually(lambda ask=ask: cluster.run(*ask).strip() == "RUNNING", 120, "the job runs")  # type: ignore[misc]
        cluster.await_saved_job(job)  # otherwise the standby would start it again
    fired = servers.fire("GPUFellOffBus", **jobs)
    servers.until_drained()
    for node in NODES.values():
        marker = servers.node(node).partition("Reason=")[2].split()[0]
        cluster.await_saved("node_state", marker)
    cluster.kill_controller()
    servers.approve()
    for way, node in NODES.items():
        run = servers.closed(way)
        assert run["status"] == "succeeded", run["message"]
        assert f"Reason=trainmedic:{run['run_id']} " in servers.node(node)
        shown = servers.shown("job", jobs[way])
        action = run["steps"][-1]["action"]
        assert ("Restarts=1 " in shown) == (action == "slurm.requeue"), shown
        assert shown.count(f"trainmedic:{action.partition('.')[2]}") == 1, shown
        assert "lease_lost" not in kinds_of(run)
    cluster.start_controller()
    servers.resolve(fired)
    assert not [job for job in jobs.values() if "JobHeld" in servers.shown("job", job)]
    cluster.await_controllers()
    cluster.clear()


def test_a_drain_ended_manually_while_slurm_is_unreachable_is_not_overridden(servers: Servers) -> None:
    """The end is recorded once Slurm answers again."""
    cluster = servers.cluster
    servers.shown("node", NODES["rest"])
    time.sleep(6)  # since a takeover by an earlier test, which could have lost the drain
    fired = servers.fire("GPULost", rest="0", agent="0")
    ways = (cluster.programs["slurmrestd"].process, servers.login.agent.process)
    for way in NODES:
        assert servers.closed(way)["status"] == "succeeded"
    for process in ways:
        process.send_signal(signal.SIGSTOP)
    try:
        for node in NODES.values():
            cluster.run("scontrol", "update", f"nodename={node}", "state=resume")
        for url in servers.urls.values():
            eventually(lambda url=url: not httpx.get(f"{url}/ready").json()["slurm"]["ok"], 60, "Slurm is silent")  # type: ignore[misc]
    finally:
        for process in ways:
            process.send_signal(signal.SIGCONT)
    for way, node in NODES.items():
        run = eventually(lambda way=way: _with(servers.closed(way), "lease_lost"), 120, "the end is recorded")  # type: ignore[misc]
        assert "set_again_started" not in kinds_of(run)
        assert "DRAIN" not in servers.node(node)
    time.sleep(20)  # for another look
    assert not [way for way in NODES if "set_again_started" in kinds_of(servers.closed(way))]
    servers.resolve(fired)


def _with(run: dict[str, Any], kind: str, count: int = 1) -> dict[str, Any] | None:
    return run if kinds_of(run).count(kind) == count else None


def kinds_of(run: dict[str, Any]) -> list[str]:
    return [event["kind"] for event in run["events"]]
