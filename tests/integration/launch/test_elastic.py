"""An elastic job of two nodes, a torchrun on each: a playbook leaves one out and takes it back; real server, Redis."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.integration.launch.launched import PATIENCE, Launched
from tests.support.live import Server
from tests.support.messages import KEY, delivery, resolved
from tests.support.programs import eventually, free_port
from trainmedic.wire.signing import identity_key, job_identity

STEPS = 3000
PLAYBOOK = """
playbook: without-bad-node
on: {alert: NodeBad}
target: job
steps:
  - {id: save, action: job.checkpoint, timeout: 2m}
  - {id: leave, action: launcher.exclude_node, with: {node: node-b}, timeout: 2m, undo: on_failure}
  - {id: mended, wait_for: resolved, timeout: 1h}
  - {id: save_again, action: job.checkpoint, timeout: 2m}
  - {id: return, action: launcher.include_node, with: {node: node-b}, timeout: 2m}
"""


@pytest.fixture
def server(tmp_path: Path, redis_url: str) -> Iterator[Server]:
    signed = {"TRAINMEDIC_SIGNING_KEY": KEY}
    with Server(tmp_path / "server", PLAYBOOK.strip(), "--redis", redis_url, environment=signed) as serving:
        yield serving


class Nodes:
    """Two nodes of a job, each with its launcher and its torchrun, of one rank."""

    def __init__(self, directory: Path, redis_url: str) -> None:
        self._directory = directory
        port = free_port()
        program = Path(__file__).with_name("fragile_job.py")
        conf = "last_call_timeout=4,keep_alive_interval=1,keep_alive_max_attempt=3"
        rendezvous = ["--rdzv-backend=c10d", f"--rdzv-endpoint=localhost:{port}", f"--rdzv-conf={conf}"]
        run = [sys.executable, "-m", "torch.distributed.run", *rendezvous, "--rdzv-id=fragile", "--nproc-per-node=1"]
        command = [*run, str(program), str(directory), "none", str(STEPS)]
        options = ("--job=fragile", "--min-nodes=1", "--max-nodes=2", "--delay=1s", "--grace=10s")
        key = identity_key(KEY.encode(), job_identity("fragile")).decode()
        variables = {"TRAINMEDIC_REDIS_URL": redis_url, "TRAINMEDIC_SIGNING_KEY": key, "STEP_SECONDS": "0.02"}
        self.nodes = [
            Launched(directory / name, command, *options, **variables, TRAINMEDIC_NODE=name)
            for name in ("node-a", "node-b")
        ]

    def wait_for_output(self, text: str, times: int = 1) -> None:
        def is_printed() -> bool:
            return sum(node.printed().count(text) for node in self.nodes) >= times

        eventually(is_printed, PATIENCE, f"{text!r} to be printed")

    def close(self) -> None:
        for node in self.nodes:
            node.close()


@pytest.fixture
def nodes(tmp_path: Path, redis_url: str) -> Iterator[Nodes]:
    made = Nodes(tmp_path / "job", redis_url)
    yield made
    made.close()


@pytest.mark.long
def test_a_playbook_excludes_a_node_and_takes_it_back(server: Server, nodes: Nodes, tmp_path: Path) -> None:
    """Checkpoint, change, resume, and the same once more: with one rank two batches make a step, then one again."""
    nodes.wait_for_output("2 ranks accumulate 1", times=2)
    alert = delivery("NodeBad", "fragile")
    _wait_for_checkpoint(tmp_path / "job")
    server.ask("/webhook", alert)
    nodes.wait_for_output("1 ranks accumulate 2")
    eventually(lambda: _steps(server).get("leave") == "succeeded", 60, "the step to succeed")
    server.ask("/webhook", resolved(alert))
    nodes.wait_for_output("2 ranks accumulate 1", times=4)
    eventually(lambda: _steps(server).get("return") == "succeeded", 60, "the step to succeed")
    assert _steps(server) == dict.fromkeys(("save", "leave", "mended", "save_again", "return"), "succeeded")


def _wait_for_checkpoint(directory: Path) -> None:
    eventually(lambda: list(directory.glob("checkpoints/step-*[1-9]0")), PATIENCE, "a checkpoint")


def _steps(server: Server) -> dict[str, str]:
    return {step["id"]: step["status"] for step in server.run(server.runs()[0]["run_id"])["steps"]}
