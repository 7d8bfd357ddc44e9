"""From an alert to a drained Slurm node and back: a real server, a real Slurm 26.05."""

from __future__ import annotations

import time
from collections.abc import Iterator
from functools import partial
from typing import Any

import httpx
import pytest

from tests.support import slurm_cluster
from tests.support.messages import delivery, resolved
from tests.support.programs import eventually, start_server
from tests.support.slurm_cluster import SlurmCluster

PLAYBOOKS = {
    "drain.yaml": """
playbook: drain-broken-node
on: {alert: GPUFellOffBus}
target: node
steps:
  - id: drain
    action: slurm.drain
    undo: on_resolve
""",
    "requeue.yaml": """
playbook: requeue-hanging-job
on: {alert: SlurmJobHangs}
target:
  job: "slurm:{{ labels.slurm_job_id }}"
steps:
  - id: requeue
    action: slurm.requeue
    with: {max_restarts: 2}
""",
}


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SlurmCluster]:
    with SlurmCluster(slurm_cluster.fetched("26.05"), tmp_path_factory.mktemp("slurm") / "cluster") as started:
        yield started


@pytest.fixture(scope="module")
def server(cluster: SlurmCluster, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    directory = tmp_path_factory.mktemp("server")
    playbooks = directory / "playbooks"
    playbooks.mkdir()
    for name, text in PLAYBOOKS.items():
        (playbooks / name).write_text(text)
    options = ("--mode", "enforce", "--slurm-url", cluster.rest_url, "--slurm-user", "root")
    program, url = start_server(
        directory / "server", *options, "--slurm-token-file", str(cluster.token_file), playbooks=playbooks
    )
    with program:
        yield url


def fire(url: str, name: str, **labels: str) -> dict[str, Any]:
    """Deliver an alert that fires; return the delivery."""
    document = delivery(name, "slurm")
    document["alerts"][0]["labels"] = {"alertname": name, **labels}
    document["alerts"][0]["fingerprint"] = f"{name}-{time.time_ns()}"
    httpx.post(f"{url}/webhook", json=document).raise_for_status()
    return document


def run_of(url: str, target: str, undone: bool = False) -> dict[str, Any] | None:
    """The newest run on the target, once it is over, or with `undone` once its undo is."""
    items = httpx.get(f"{url}/history", params={"limit": 50}).raise_for_status().json()["items"]
    item = next((item for item in items if item["target"] == target), None)
    if item is None or item["status"] in ("running", "waiting"):
        return None
    run: dict[str, Any] = httpx.get(f"{url}/history/{item['run_id']}").raise_for_status().json()
    return run if run["undone_at"] or not undone else None


def state_of(cluster: SlurmCluster, node: str) -> str:
    return cluster.run("scontrol", "show", "node", node)


def test_a_node_is_drained_while_its_alert_fires(server: str, cluster: SlurmCluster) -> None:
    """The reason names the run. When the alert has resolved, the node takes jobs again."""
    fired = fire(server, "GPUFellOffBus", node="n2")
    run = eventually(partial(run_of, server, "node:n2"), 120, "the run is over")
    assert run["status"] == "succeeded", run
    shown = state_of(cluster, "n2")
    assert "State=IDLE+DRAIN" in shown
    assert f"Reason=trainmedic:{run['run_id']} " in shown
    httpx.post(f"{server}/webhook", json=resolved(fired)).raise_for_status()
    eventually(partial(run_of, server, "node:n2", undone=True), 120, "the drain is taken back")
    assert "DRAIN" not in state_of(cluster, "n2")


def test_a_job_is_requeued_once(server: str, cluster: SlurmCluster) -> None:
    """The target names it by its Slurm id."""
    job = cluster.submit("while :; do sleep 0.2; done", "--requeue")
    eventually(lambda: cluster.run("squeue", "-h", "-j", job, "-o", "%T").strip() == "RUNNING", 120, "the job runs")
    fire(server, "SlurmJobHangs", slurm_job_id=job)
    run = eventually(partial(run_of, server, f"job:slurm:{job}"), 120, "the run is over")
    assert run["status"] == "succeeded", run
    (step,) = run["steps"]
    assert step["output"]["restarts"] == 1
    assert "Restarts=1" in cluster.run("scontrol", "show", "job", job)


def test_a_target_that_is_no_slurm_job_fails_and_says_how_to_name_one(server: str) -> None:
    """Nothing reaches Slurm."""
    fire(server, "SlurmJobHangs", slurm_job_id="all")
    run = eventually(partial(run_of, server, "job:slurm:all"), 120, "the run is over")
    assert run["status"] == "failed", run
    assert "give job_id, or a target such as job:slurm:4711" in run["message"]
