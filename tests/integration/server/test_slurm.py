"""From an alert to a drained Slurm node and back: a real server, a real Slurm 26.05."""

from __future__ import annotations

import re
import signal
import time
from collections.abc import Iterator
from functools import partial

import httpx
import pytest

from tests.support import slurm_cluster
from tests.support.programs import ROOT, eventually
from tests.support.slurm_alerts import DRAIN, alert, drain_while_an_alert_fires, fire, serving, until_closed
from tests.support.slurm_cluster import SlurmCluster

PLAYBOOKS = {
    "drain.yaml": DRAIN,
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
    "capacity.yaml": """
playbook: drain-while-others-work
on: {alert: NodeWorn}
target: node
guards: {min_available: 60%}
steps:
  - id: drain
    action: slurm.drain
    undo: on_resolve
""",
    "hold.yaml": """
playbook: hold-job-on-gpu
on: {alert: GPUSlow}
target:
  job: "gpu:{{ labels.node }}/{{ labels.gpu }}"
steps:
  - id: hold
    action: slurm.hold
    undo: on_resolve
""",
}


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SlurmCluster]:
    root, work = slurm_cluster.fetched("26.05"), tmp_path_factory.mktemp("slurm") / "cluster"
    with SlurmCluster(root, work, "MetricsType=metrics/openmetrics\n", gpus=2) as started:
        yield started


@pytest.fixture(scope="module")
def server(cluster: SlurmCluster, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    options = ("--slurm-url", cluster.rest_url, "--slurm-user", "root", "--slurm-token-file", str(cluster.token_file))
    with serving(tmp_path_factory.mktemp("server"), PLAYBOOKS, *options) as url:
        yield url


@pytest.fixture(autouse=True)
def _cleared(cluster: SlurmCluster) -> Iterator[None]:
    """A requeued job would start again minutes later, on the node of another test."""
    yield
    cluster.clear()


def test_a_node_is_drained_while_its_alert_fires(server: str, cluster: SlurmCluster) -> None:
    """The drain goes through slurmrestd."""
    drain_while_an_alert_fires(server, cluster, "n2")


def test_a_job_is_requeued_once(server: str, cluster: SlurmCluster) -> None:
    """The target contains the job's Slurm ID."""
    job = cluster.submit("while :; do sleep 0.2; done", "--requeue")
    eventually(lambda: cluster.run("squeue", "-h", "-j", job, "-o", "%T").strip() == "RUNNING", 120, "the job runs")
    fire(server, "SlurmJobHangs", slurm_job_id=job)
    run = until_closed(server, f"job:slurm:{job}")
    assert run["status"] == "succeeded", run
    (step,) = run["steps"]
    assert step["output"]["restarts"] == 1
    assert "Restarts=1" in cluster.run("scontrol", "show", "job", job)


def test_a_target_that_is_not_a_slurm_job_fails_and_explains_the_naming(server: str) -> None:
    """No request reaches Slurm."""
    fire(server, "SlurmJobHangs", slurm_job_id="all")
    run = until_closed(server, "job:slurm:all")
    assert run["status"] == "failed", run
    assert "give job_id, or a target such as job:slurm:4711" in run["message"]


def decision_on(url: str, name: str, **labels: str) -> tuple[str, str]:
    """Deliver an alert; return the first playbook's decision and target."""
    (run,) = httpx.post(f"{url}/webhook", json=alert(name, **labels)).raise_for_status().json()["runs"]
    return run["decision"], run["target"]


def would_be_limited(url: str) -> bool:
    """Whether the server would keep n1 in service, by what it has read of Slurm."""
    (item,) = httpx.post(f"{url}/explain", json=alert("NodeWorn", node="n1")).raise_for_status().json()["items"]
    return any(playbook["decision"] == "capacity_limited" for playbook in item["playbooks"])


def test_a_node_is_kept_while_others_are_out(server: str, cluster: SlurmCluster) -> None:
    """An operator's drain and a reservation count. 60 % of three nodes are two."""

    def decision_is(wanted: str) -> bool:
        return decision_on(server, "NodeWorn", node="n1")[0] == wanted

    reserve = ("reservationname=maint", "starttime=now", "duration=60", "nodes=n3", "users=root")
    for take, give_back in (
        (("update", "nodename=n3", "state=drain", "reason=disk"), ("update", "nodename=n3", "state=resume")),
        (("create", "reservation", *reserve), ("delete", "reservationname=maint")),
    ):
        cluster.run("scontrol", *take)
        try:
            # A delivery before the server has read Slurm would start a run, which takes the node out, as it may.
            eventually(partial(would_be_limited, server), 60, "the server has read Slurm", every=0.5)
            assert decision_is("capacity_limited")
        finally:
            cluster.run("scontrol", *give_back)
    eventually(partial(decision_is, "started"), 60, "the node may be drained", every=0.5)
    run = until_closed(server, "node:n1")
    assert run["status"] == "succeeded", run


def test_no_node_is_taken_out_of_service_while_slurm_is_unavailable(server: str, cluster: SlurmCluster) -> None:
    """The last reading would allow it. Once Slurm answers, the run starts."""
    frozen = cluster.programs["slurmrestd"].process
    frozen.send_signal(signal.SIGSTOP)
    time.sleep(20)  # A reading begins every 5 s and is too late after 10 s. A run that starts earlier may.
    try:
        assert decision_on(server, "NodeWorn", node="n1")[0] == "capacity_limited"
        ready = httpx.get(f"{server}/ready").json()
        assert ready["ready"]
        assert not ready["slurm"]["ok"]
        assert re.match(r"does not answer since \S+Z; ", ready["slurm"]["detail"])
        (refused, *_) = httpx.get(f"{server}/history", params={"limit": 1}).raise_for_status().json()["items"]
        assert re.fullmatch(
            r"min_available: the state of the nodes is not known since \S+Z: Slurm does not answer", refused["message"]
        )
    finally:
        frozen.send_signal(signal.SIGCONT)
    eventually(
        lambda: decision_on(server, "NodeWorn", node="n1")[0] == "started", 120, "the node is drained", every=0.5
    )
    run = until_closed(server, "node:n1")
    assert run["status"] == "succeeded", run
    assert httpx.get(f"{server}/ready").json()["slurm"] == {
        "ok": True,
        "detail": "answers, with 3 nodes",
        "caution": False,
    }


def test_a_gpu_index_finds_its_job_and_a_shared_host_name_finds_no_node(server: str, cluster: SlurmCluster) -> None:
    """All nodes of this cluster have one host name and address."""
    job = cluster.submit("sleep 600", "--gres=gpu:1", "-w", "n2")
    eventually(
        lambda: decision_on(server, "GPUSlow", node="n2", gpu="0") == ("started", f"job:slurm:{job}"),
        60,
        "the job is known",
        every=0.5,
    )
    run = until_closed(server, f"job:slurm:{job}")
    assert run["steps"][0]["output"]["job_id"] == job
    assert decision_on(server, "GPUSlow", node="n2", gpu="1")[0] == "target_unknown"
    assert decision_on(server, "GPUFellOffBus", node="127.0.0.1")[0] == "target_unknown"


def test_the_rules_read_metrics_that_slurmctld_has(cluster: SlurmCluster) -> None:
    """Each name exists, with the partition label, and shows the effect of a drain."""
    rules = (ROOT / "monitoring" / "rules" / "slurm.yaml").read_text()
    names = set(re.findall(r"slurm_partition_\w+", rules))

    def series() -> dict[str, str]:
        text = httpx.get(f"http://127.0.0.1:{cluster.controller_port}/metrics/partitions", timeout=60).text
        return dict(re.findall(r'^(\w+)\{partition="main"\} (\d+)$', text, re.MULTILINE))

    assert names <= series().keys()
    cluster.run("scontrol", "update", "nodename=n3", "state=drain", "reason=disk")
    try:
        assert series()["slurm_partition_nodes_drain"] == "1"
    finally:
        cluster.run("scontrol", "update", "nodename=n3", "state=resume")
