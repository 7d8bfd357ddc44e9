"""The shipped playbook node-down from the alert to the uncordon, by a real server on the stand-in for the API
server; the health check's own command runs on the stand-in for the GPU driver."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.acceptance.intervals import hasten
from tests.driver.driver import Driver
from tests.kubernetes.api_server import ApiServer
from tests.kubernetes.living_node import LivingNode, is_cordoned
from tests.support.live import Server
from tests.support.messages import delivery, resolved
from tests.support.programs import PYTHON_PATH, ROOT, eventually, inherited
from trainmedic.probe.__main__ import parser
from trainmedic_server.domain.alert import SHIPPED_RULE, SHIPPED_RULE_LABEL

JOBS = ("batch/v1", "jobs")
NAMESPACES = ("v1", "namespaces")
NODES = ("v1", "nodes")
_OF_KUBERNETES = re.compile(r"(    action: k8s\..*\n(?:    .*\n)*?    timeout: )\w+")


def named(alert: dict[str, Any], node: str) -> dict[str, Any]:
    """As the rule NodeDown names the node."""
    for one in alert["alerts"]:
        one["labels"] = {
            "alertname": "NodeDown",
            "severity": "critical",
            "node": node,
            SHIPPED_RULE_LABEL: SHIPPED_RULE,
        }
    return alert


def checked(job: dict[str, Any], driver: Driver) -> int:
    """What the Job's container ends with on a node with that driver, and nothing else of ours."""
    (container,) = job["spec"]["template"]["spec"]["containers"]
    environment = {one["name"]: one["value"] for one in container["env"]}
    done = subprocess.run(
        [sys.executable, "-m", "trainmedic_server", *container["args"]],
        env={**inherited(), "PYTHONPATH": PYTHON_PATH, **driver.environment, **environment},
        capture_output=True,
        check=False,
        timeout=120,
    )
    return done.returncode


def probed(job: dict[str, Any]) -> int:
    """What the probe's container ends with here, on processors instead of GPUs, at the sizes of a test."""
    (container,) = job["spec"]["template"]["spec"]["containers"]
    assert container["image"] == "registry/torch:1"
    assert container["command"] == ["python", "-m", "trainmedic.probe"]
    assert parser().parse_args(container["args"]).backend == "nccl"
    arguments = [*container["args"], "--backend=gloo", "--sizes=0.1", "--barriers=2"]
    done = subprocess.run(
        [sys.executable, *container["command"][1:], *arguments],
        env={**inherited(), "PYTHONPATH": PYTHON_PATH},
        capture_output=True,
        check=False,
        timeout=120,
    )
    return done.returncode


def finish(stand_in: ApiServer, job: dict[str, Any]) -> None:
    """As the cluster does when the Job's pod has ended with 0."""
    conditions = [{"type": one, "status": "True"} for one in ("SuccessCriteriaMet", "Complete")]
    status = {"conditions": conditions, **dict.fromkeys(("startTime", "completionTime"), "2026-01-31T12:00:00Z")}
    place = (job["metadata"]["namespace"], job["metadata"]["name"])
    stand_in.objects.patch(JOBS, *place, {"status": status}, "job-controller")


def test_a_node_accepts_pods_again_only_after_passing_its_checks(
    tmp_path: Path, make_driver: Callable[..., Driver]
) -> None:
    """It is cordoned and drained while down; then the check runs on it, with neither Redis nor a policy,
    and ends with 0 only where every GPU answers; then the probe, where an image for it is named; then it is
    uncordoned."""
    driver = make_driver(2)
    with ApiServer().running() as stand_in:
        stand_in.objects.create(NAMESPACES, "", {"metadata": {"name": "trainmedic"}}, "kubectl")
        kubeconfig = tmp_path / "kubeconfig.json"
        kubeconfig.write_text(json.dumps(stand_in.kubeconfig()))
        server = Server(tmp_path / "s", "", "--kubernetes", str(kubeconfig))
        for path in (tmp_path / "s" / "playbooks").iterdir():
            path.unlink()
        for name in ("node-down.yaml", "node-health_template.yaml", "node-probe_template.yaml"):
            # No agent is there to tell how many GPUs the node had, and is not waited for in vain for so long. The
            # checks take as long as they take here.
            text = _OF_KUBERNETES.sub(r"\g<1>20m", hasten((ROOT / "playbooks" / name).read_text(), 20))
            text = text.replace('probe_image: ""', "probe_image: registry/torch:1").replace(
                "bandwidth: 1.0", "bandwidth: 0.0001"
            )
            (tmp_path / "s" / "playbooks" / name).write_text(text)
        with LivingNode(kubeconfig, 2) as node, server:
            fired = named(delivery("NodeDown", "any"), node.name)
            assert server.ask("/webhook", fired).status == 200
            eventually(lambda: server.only_run()["waiting_on"] == "resolved", 60, "drained", 0.2)
            assert is_cordoned(stand_in, node.ref)
            assert sorted(node.ended) == node.pods
            assert server.ask("/webhook", named(resolved(fired), node.name)).status == 200
            (check,) = eventually(lambda: stand_in.objects.list(JOBS, None), 60, "the check was made", 0.1)
            assert check["spec"]["template"]["spec"]["nodeName"] == node.name
            assert checked(check, driver) == 0
            driver.lose(1)
            assert checked(check, driver) == 1
            finish(stand_in, check)
            probe = eventually(lambda: _newest_but(stand_in, check), 60, "the probe was made", 0.1)
            assert probe["spec"]["template"]["spec"]["nodeName"] == node.name
            assert is_cordoned(stand_in, node.ref)
            assert probed(probe) == 0
            finish(stand_in, probe)
            run = server.closed_run(60)
            assert run["status"] == "succeeded", run
            assert not is_cordoned(stand_in, node.ref)


def _newest_but(stand_in: ApiServer, first: dict[str, Any]) -> dict[str, Any] | None:
    """The Job that is there beside the first; None where there is none yet."""
    jobs: list[dict[str, Any]] = stand_in.objects.list(JOBS, None)
    return next((job for job in jobs if job["metadata"]["uid"] != first["metadata"]["uid"]), None)
