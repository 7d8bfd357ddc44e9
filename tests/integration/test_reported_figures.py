"""Curves and readings without Prometheus: a real job, agent and server."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.driver.driver import Driver, cards
from tests.support.agent_node import KEY
from tests.support.gpu_node import GpuNode
from tests.support.live import Server
from tests.support.programs import PYTHON_PATH, Program, eventually, free_port

PLAYBOOK = "playbook: p\non: {alert: Nothing}\ntarget: job\nsteps: [{action: job.checkpoint}]\n"


def test_a_server_without_prometheus_shows_the_figures_reported_to_it(
    tmp_path: Path, redis_url: str, make_driver: Callable[..., Driver]
) -> None:
    """A restarted server starts a new record."""
    job = {"PYTHONPATH": PYTHON_PATH, "TRAINMEDIC_REDIS_URL": redis_url, "TRAINMEDIC_SIGNING_KEY": KEY}
    job |= {"TRAINMEDIC_JOB": "llm-1", "TRAINMEDIC_NODE": "n1", "METRICS_PORT": str(free_port())}
    job["GPU"] = cards(2)[1].uuid
    program = [sys.executable, Path(__file__).with_name("placed_job.py")]
    with (
        GpuNode(tmp_path / "node", redis_url, make_driver(2)) as node,
        Program(program, tmp_path / "job.log", job),
        Server(
            *(tmp_path / "server", PLAYBOOK, "--redis", redis_url),
            environment={"TRAINMEDIC_SIGNING_KEY": KEY},
        ) as server,
    ):

        def curves() -> dict[str, Any] | None:
            body = server.ask("/jobs/llm-1/curves").body or {}
            return body if len(body.get("curves", [])) == 2 else None

        def readings() -> dict[str, Any] | None:
            body = server.ask(f"/agents/{node.name}/readings").body or {}
            return body if body.get("gpus") else None

        def last_seen() -> str:
            items = (server.ask("/jobs").body or {}).get("items")
            return str(items[0]["last_seen"]) if items else ""

        first = eventually(curves, 60, "the job's curves")
        of_node = eventually(readings, 60, "the node's readings")
        # Redis keeps the newest report, with which the next server begins.
        eventually(lambda: last_seen() > first["reported_since"], 60, "another report")
        server.kill()
        server.start()
        second = eventually(curves, 60, "the curves after a restart")
    assert [(each["name"], each["unit"]) for each in first["curves"]] == [("loss", ""), ("throughput", "samples/s")]
    # A presence that precedes the first step makes a point without a value.
    assert {value for _, value in first["curves"][0]["points"]} - {None} == {2.0}
    assert (first["source"], first["unknown"]) == ("reports", None)
    assert first["not_prometheus"] == "no Prometheus is set (--prometheus-url)"
    assert second["reported_since"] > first["reported_since"]
    assert len(of_node["gpus"]) == 2
    assert of_node["source"] == "reports"
    assert {each["name"] for each in of_node["gpus"][0]["curves"]} == {"temperature", "power limit"}
    assert of_node["gpus"][0]["temperature_celsius"] > 0
