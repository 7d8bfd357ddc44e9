"""A two-node training with the SDK as a Slurm job, whose node breaks, and the ways to move it off that node.

The loop does plain steps and saves its step in a file. It tells which nodes each step ran on, and when.
"""

from __future__ import annotations

import json
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, Self

import httpx

from tests.support import slurm_cluster
from tests.support.messages import delivery, resolved
from tests.support.programs import PYTHON_PATH, eventually, start_server
from tests.support.slurm_cluster import SlurmCluster

TRAINING = Path(__file__).with_name("slurm_training.py")
BROKEN = "n1"
_EPILOG = """#!/bin/sh
export SLURM_CONF=/mnt/slurm.conf PATH=/usr/bin:/bin
! scontrol show node "$SLURMD_NODENAME" | grep -q "Reason=trainmedic:"
"""
_NODE = """
playbook: keep-broken-node-out
on: {{alert: GPUBroken}}
target: node
guards: {{min_available: 2}}
steps:
  - {{id: drain, action: slurm.drain}}
{also}
  - {{id: repaired, wait_for: resolved}}
  - id: healthy
    action: http.request
    with: {{method: GET, url: "{health}"}}
  - {{id: resume, action: slurm.resume}}
"""
_JOB = """
playbook: move-job
on: {alert: GPUBroken}
target: {job: "node:{{ labels.node }}"}
steps:
  - {id: checkpoint, action: job.checkpoint, timeout: 2m}
"""
_SPARE = """  - id: leave
    action: job.command
    with: {name: test.leave, with: {node: "{{ labels.node }}"}}
"""
_REQUEUE = """  - {id: requeue, action: slurm.requeue, with: {hold: true, at_once: true}}
  - id: exclude
    action: slurm.update
    with: {exclude_nodes: ["{{ labels.node }}"]}
  - {id: release, action: slurm.release}
"""
_END = """  - id: end
    action: slurm.signal
    with: {job_id: "{{ labels.slurm_job_id }}", signal: TERM}
"""


@dataclass(frozen=True)
class Lever:
    """One way to move the job, and the releases that have it."""

    name: str
    releases: tuple[str, ...]
    options: tuple[str, ...]
    """Of sbatch."""
    settings: str = ""
    job: str | None = None
    """Steps after the checkpoint. None: the node's playbook ends the job, which saves by itself."""


LEVERS = {
    lever.name: lever
    for lever in (
        Lever("spare", ("24.11", "26.05"), ("-N3", "--no-kill"), job=_SPARE),
        Lever("requeue", ("26.05",), ("-N2", "--requeue"), job=_REQUEUE),
        Lever(
            *("expedite", ("26.05",), ("-N2", "--requeue=expedite")),
            "SlurmctldParameters=enable_expedited_requeue\nEpilog=/mnt/scripts/epilog\n",
        ),
        Lever("exit code", ("24.11", "26.05"), ("-N2", "--requeue"), "RequeueExit=93\n"),
    )
}


@dataclass
class Repair:
    """What happened; times are seconds from the alert."""

    lever: str
    release: str
    job_id: str = ""
    saved_step: int = 0
    first_good: dict[str, Any] = field(default_factory=dict)
    """The first step after the alert that ran without the broken node."""
    seconds: float = 0.0
    lost_steps: int = 0
    """Steps done on the broken node after the checkpoint."""
    out_until_checked: bool = False
    """Whether the node was drained when its health was checked."""
    returned: bool = False
    runs: list[dict[str, Any]] = field(default_factory=list)


def repaired(lever: Lever, release: str, directory: Path) -> Repair:
    """Break the node of a running training, and follow it until the node is back."""
    repair = Repair(lever.name, release)
    with HealthCheck() as health, _started(lever, release, directory, health) as (cluster, url):
        health.is_out = partial(_is_drained, cluster)
        job_id = repair.job_id = _submit(cluster, lever, directory)
        eventually(lambda: len(_steps(cluster)) > 3, 240, "the training runs")
        eventually(partial(_knows_job, url), 60, "the server knows the job")
        before, began = len(_steps(cluster)), time.time()
        alert = _alert(job_id)
        httpx.post(f"{url}/webhook", json=alert).raise_for_status()
        repair.first_good = eventually(
            lambda: next((step for step in _steps(cluster)[before:] if BROKEN not in step["nodes"]), None),
            *(300, f"the training goes on by {lever.name}"),
        )
        repair.saved_step = repair.first_good["from"]
        repair.lost_steps = max(step["step"] for step in _steps(cluster) if BROKEN in step["nodes"]) - repair.saved_step
        repair.seconds = repair.first_good["at"] - began
        httpx.post(f"{url}/webhook", json=resolved(alert)).raise_for_status()
        eventually(lambda: not _is_drained(cluster), 120, "the node is back")
        repair.returned, repair.out_until_checked = True, health.was_out
        repair.runs = eventually(partial(_closed_runs, url), 120, "the runs are over")
        cluster.run("scancel", job_id)
    return repair


class HealthCheck:
    """A server that the node's playbook asks before it returns the node."""

    def __init__(self) -> None:
        self.is_out: Callable[[], bool] = lambda: False
        self.was_out = False
        """Whether the node was out of service then."""
        check = self

        class Handler(BaseHTTPRequestHandler):
            def log_message(self, *_: object) -> None:
                """Print nothing."""

            def do_GET(self) -> None:
                check.was_out = check.is_out()
                self.send_response(200)
                self.end_headers()

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}/"

    def __enter__(self) -> Self:
        threading.Thread(target=self._server.serve_forever, daemon=True).start()
        return self

    def __exit__(self, *error: object) -> None:
        self._server.shutdown()
        self._server.server_close()


@contextmanager
def _started(lever: Lever, release: str, directory: Path, health: HealthCheck) -> Iterator[tuple[SlurmCluster, str]]:
    directory.mkdir(parents=True, exist_ok=True)
    scripts = directory / "scripts"
    scripts.mkdir()
    (scripts / "epilog").write_text(_EPILOG)
    (scripts / "epilog").chmod(0o755)
    playbooks = directory / "playbooks"
    playbooks.mkdir()
    also = _END if lever.job is None else ""
    (playbooks / "node.yaml").write_text(_NODE.format(also=also, health=health.url))
    if lever.job is not None:
        (playbooks / "job.yaml").write_text(f"{_JOB}{lever.job}")
    with SlurmCluster(slurm_cluster.fetched(release), directory / "cluster", lever.settings, scripts) as cluster:
        options = ("--mode", "enforce", "--slurm-url", cluster.rest_url, "--slurm-user", "root")
        program, url = start_server(
            *(directory / "server", *options, "--slurm-token-file", str(cluster.token_file)), playbooks=playbooks
        )
        with program:
            yield cluster, url


def _submit(cluster: SlurmCluster, lever: Lever, directory: Path) -> str:
    environment = {
        "PYTHONPATH": PYTHON_PATH,
        "TRAINMEDIC_STATE_DIR": str(directory / "server" / "state"),
        "TRAINMEDIC_JOB": "llm-1",
    }
    assignments = " ".join(f"{name}={value}" for name, value in environment.items())
    step = f"chroot /srv /usr/bin/env {assignments} {sys.executable} {TRAINING} {cluster.work}"
    (cluster.work / "batch").write_text(f"""#!/bin/bash
while :; do
    left=$(cat /mnt/left 2>/dev/null)
    srun -N2 ${{left:+--exclude=$left}} --kill-on-bad-exit=1 sh -c '
        export TRAINMEDIC_NODE=$SLURMD_NODENAME; exec {step}' && exit 0
    [ -e /mnt/left ] || exit 93
done
""")
    given = ("--parsable", "-J", "llm", "-o", "/mnt/job.log", "--open-mode=append", "--mem=10", "--ntasks-per-node=1")
    return cluster.run("sbatch", *given, *lever.options, "/mnt/batch").strip()


def _steps(cluster: SlurmCluster) -> list[dict[str, Any]]:
    file = cluster.work / "steps.jsonl"
    lines = file.read_text().splitlines() if file.exists() else []
    return [json.loads(line) for line in lines if line.endswith("}")]


def _knows_job(url: str) -> bool:
    # Shown once the server also knows the job's Slurm ID.
    return 'trainmedic_job_gone{job_name="llm-1"} 0.0' in httpx.get(f"{url}/metrics").raise_for_status().text


def _is_drained(cluster: SlurmCluster) -> bool:
    return "DRAIN" in cluster.run("scontrol", "show", "node", BROKEN)


def _closed_runs(url: str) -> list[dict[str, Any]] | None:
    items: list[dict[str, Any]] = httpx.get(f"{url}/history").raise_for_status().json()["items"]
    return None if any(item["status"] in ("running", "waiting") for item in items) else items


def _alert(job_id: str) -> dict[str, Any]:
    document = delivery("GPUBroken", "slurm")
    document["alerts"][0]["labels"] = {"alertname": "GPUBroken", "node": BROKEN, "slurm_job_id": job_id}
    document["alerts"][0]["fingerprint"] = f"broken-{time.time_ns()}"
    return document
