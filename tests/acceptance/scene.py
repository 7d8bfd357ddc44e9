"""A small cluster on loopback: Prometheus and Alertmanager with the shipped configuration, and a training job.

The configuration is that of ``monitoring/``, and the playbook that of ``playbooks/``, on a faster clock
(``intervals``) and with the addresses changed to ports that are free here. Not here: Trainmedic's server,
whose URL is handed in, and what is expected.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from tests.acceptance.intervals import hasten
from tests.support.programs import ROOT, Program, free_port, start_alertmanager, start_prometheus

FASTER = 15
"""15 s between evaluations become 1 s (5 s of the training rules a third), 5 minutes of a baseline 20 s."""

SHIPPED = ROOT / "monitoring"


@dataclass(frozen=True)
class Scene:
    """What runs, and how to ask it."""

    job: Program
    prometheus_url: str
    alertmanager_url: str
    checkpoints: Path

    def highest(self, metric: str, seconds: int) -> float:
        """The highest value that Prometheus has seen of a metric."""
        return self._value(f"max_over_time({metric}[{seconds}s])")

    def lowest(self, metric: str, seconds: int) -> float:
        return self._value(f"min_over_time({metric}[{seconds}s])")

    def newest(self, metric: str) -> float:
        return self._value(metric)

    def _value(self, query: str) -> float:
        reply = httpx.get(f"{self.prometheus_url}/api/v1/query", params={"query": query}).raise_for_status().json()
        return float(reply["data"]["result"][0]["value"][1])

    def firing(self) -> list[str]:
        """The alerts that Prometheus has firing now, by name."""
        alerts = httpx.get(f"{self.prometheus_url}/api/v1/alerts").raise_for_status().json()["data"]["alerts"]
        return [alert["labels"]["alertname"] for alert in alerts if alert["state"] == "firing"]


def configure(
    directory: Path,
    receiver: str,
    jobs: Sequence[str] = (),
    nodes: Sequence[str] = (),
    exporter: int = 9445,
    factor: int = FASTER,
) -> None:
    """Write the shipped configuration to `directory`, hastened, without Prometheus's pointer to Alertmanager.

    `jobs` are addresses with a port, `nodes` names, whose agents all offer their metrics on the port `exporter`.
    """
    (directory / "rules").mkdir()
    (directory / "targets").mkdir()
    for rules in (SHIPPED / "rules").glob("*.yaml"):
        hastened = hasten(rules.read_text(), factor, least_keep_ms=15_000)
        (directory / "rules" / rules.name).write_text(hastened)
    (directory / "targets" / "nodes.yaml").write_text(json.dumps([{"targets": nodes}]))
    (directory / "targets" / "jobs.yaml").write_text(json.dumps([{"targets": jobs}]))
    alertmanager = hasten((SHIPPED / "alertmanager.yml").read_text(), factor)
    (directory / "alertmanager.yml").write_text(alertmanager.replace("http://127.0.0.1:8080", receiver))
    prometheus = hasten((SHIPPED / "prometheus.yml").read_text(), factor)
    prometheus = prometheus.replace("127.0.0.1:8080", receiver.removeprefix("http://"))
    (directory / "prometheus.yml").write_text(prometheus.replace("$1:9445", f"$1:{exporter}"))


@contextmanager
def watching(directory: Path, alertmanager: Path, receiver: str, **configured: Any) -> Iterator[tuple[str, str]]:
    """Prometheus and Alertmanager, configured so; their URLs. `receiver` is the URL of the server, without a path."""
    directory.mkdir()
    configure(directory, receiver, **configured)
    with ExitStack() as stack:
        alerts, alertmanager_url = start_alertmanager(alertmanager, directory / "alertmanager.yml", directory / "am")
        stack.enter_context(alerts)
        config = directory / "prometheus.yml"
        config.write_text(config.read_text().replace("127.0.0.1:9093", alertmanager_url.removeprefix("http://")))
        prometheus, prometheus_url = start_prometheus(config, directory / "prometheus")
        stack.enter_context(prometheus)
        yield prometheus_url, alertmanager_url


@contextmanager
def running(
    directory: Path,
    alertmanager: Path,
    receiver: str,
    environment: Mapping[str, str],
    start: Callable[[Path, int, Mapping[str, str]], Program] | None = None,
) -> Iterator[Scene]:
    """The whole scene of a training job; `receiver` is the URL of the server, without a path. `start` starts another
    job than `train` does, in that directory, with its metrics on that port, and with that environment."""
    metrics_port = free_port()
    with ExitStack() as stack:
        jobs = [f"127.0.0.1:{metrics_port}"]
        prometheus_url, alertmanager_url = stack.enter_context(watching(directory, alertmanager, receiver, jobs=jobs))
        job = stack.enter_context((start or train)(directory, metrics_port, environment))
        yield Scene(job, prometheus_url, alertmanager_url, directory / "checkpoints")


def train(directory: Path, metrics_port: int, environment: Mapping[str, str]) -> Program:
    """The example job, whose labels are spoiled soon after the checkpoint of step 150.

    A step takes at least 80 ms. So the spoiled batches last for 15 s, which is longer than it takes to
    notice, wait whether it heals, and roll back; the next checkpoint comes 4 s after they begin, when the
    alert fires but the rollback has yet to come; and the 200 batches that the shipped playbook skips reach
    past the last spoiled one.
    """
    example = ROOT / "examples" / "train_char_model.py"
    argv = [sys.executable, str(example), "--checkpoints", str(directory / "checkpoints")]
    pace = ["--pace", "0.08", "--steps", "100000", "--checkpoint-every", "50"]
    poison = ["--poison-at", "158", "--poison-batches", "190", "--metrics-port", str(metrics_port)]
    return Program(
        [*argv, *pace, *poison],
        directory / "job.log",
        {"PYTHONPATH": os.fspath(ROOT / "sdk"), **environment},
    )


def faster_playbook(directory: Path, name: str, factor: int = FASTER) -> Path:
    """A directory with one of the shipped playbooks, on the faster clock."""
    directory.mkdir()
    (directory / name).write_text(hasten((ROOT / "playbooks" / name).read_text(), factor))
    return directory
