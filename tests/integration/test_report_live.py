"""From a job that says which GPU it uses to the report of that GPU: a real job, agent, server and Prometheus."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.driver.driver import Driver, cards
from tests.support.agent_node import KEY
from tests.support.gpu_node import GpuNode
from tests.support.live import Server
from tests.support.programs import PYTHON_PATH, Program, eventually, free_port, start_prometheus

FIRST, SECOND = (card.uuid for card in cards(2))
PLAYBOOK = "playbook: p\non: {alert: Nothing}\ntarget: job\nsteps: [{action: job.checkpoint}]\n"


def scraping(targets: dict[str, str]) -> str:
    """A configuration that scrapes these, by the names of their jobs, each second."""
    jobs = [{"job_name": name, "static_configs": [{"targets": [target]}]} for name, target in targets.items()]
    return json.dumps({"global": {"scrape_interval": "1s"}, "scrape_configs": jobs})


def test_the_gpus_of_a_job_are_found_and_measured(
    tmp_path: Path, redis_url: str, make_driver: Callable[..., Driver]
) -> None:
    """The server's metric of the job's ranks is joined with the agent's measurements: the node's other
    GPU is not the job's."""
    port = free_port()
    job = {"PYTHONPATH": PYTHON_PATH, "TRAINMEDIC_REDIS_URL": redis_url, "TRAINMEDIC_SIGNING_KEY": KEY, "GPU": SECOND}
    job |= {"TRAINMEDIC_JOB": "llm-1", "TRAINMEDIC_NODE": "n1", "METRICS_PORT": str(port)}
    program = [sys.executable, Path(__file__).with_name("placed_job.py")]
    prometheus_url = f"http://127.0.0.1:{free_port()}"
    options = ("--redis", redis_url, "--prometheus-url", prometheus_url)
    driver = make_driver(2)
    driver.load(1, 0.8)
    driver.fill(1, 20 * 2**30)
    with (
        GpuNode(tmp_path / "node", redis_url, driver) as node,
        Program(program, tmp_path / "job.log", job),
        Server(tmp_path / "server", PLAYBOOK, *options, environment={"TRAINMEDIC_SIGNING_KEY": KEY}) as server,
    ):
        targets = {
            "trainmedic": f"127.0.0.1:{server.port}",
            "gpu": node.exporter().split("/")[2],
            "training": f"127.0.0.1:{port}",
        }
        config = tmp_path / "prometheus.yml"
        config.write_text(scraping(targets))
        prometheus, _ = start_prometheus(config, tmp_path / "prometheus", prometheus_url)
        with prometheus:

            def report() -> dict[str, Any] | None:
                answer = server.ask("/jobs/llm-1/report?since=1m")
                is_whole = answer.status == 200 and answer.body["gpu_memory"] and answer.body["throughput"]
                is_whole = is_whole and answer.body["evaluations"] and answer.body["cpu"]
                return answer.body if is_whole else None

            whole = eventually(report, 60, "all of it was measured")
    assert whole["gpus"] == 1
    assert whole["gpu_utilization"] == {"average": 80, "max": 80, "min": 80}
    assert whole["gpu_memory"]["min"] == pytest.approx(25, abs=1)
    assert whole["throughput_unit"] == "samples/s"
    assert whole["goodput"]["ratio"] > 0
    assert [(each["metric"], each["value"], each["problem"], each["step"]) for each in whole["evaluations"]] == [
        ("accuracy", 0.625, None, 20),
        ("mmlu/acc", None, "not a finite number", 20),
    ]
    of_logs = {"oom_events", "network_errors"}
    assert whole["unknown"].keys() == {"baseline", "efficiency", "step_shares", "bottleneck", *of_logs}
    assert whole["unknown"]["efficiency"] == "there is no baseline to rate it against"
