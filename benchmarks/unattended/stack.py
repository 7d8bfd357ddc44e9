"""What looks after the run: ``trainmedic serve``, Prometheus and Alertmanager, as they are shipped.

All rules, all playbooks and both configurations are those of the checkout; only their durations are divided
by one factor, so that hours of training pass in minutes, and the addresses are ports that are free here.
Expressions, thresholds, labels and numbers of steps stay as shipped. Who calls it: ``__main__``.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from tests.acceptance.intervals import hasten
from tests.support.programs import ROOT, alertmanagers, start_alertmanager, start_prometheus, start_server

MONITORING = ROOT / "monitoring"


@dataclass(frozen=True)
class Stack:
    """What runs, and what the history says."""

    server_url: str
    state: Path
    metrics_port: int

    def runs(self) -> list[dict[str, Any]]:
        """Every run for a training job, oldest first, with its alerts, steps and events."""
        with httpx.Client(base_url=self.server_url, timeout=30) as client:
            items = client.get("/history", params={"limit": 1000}).raise_for_status().json()["items"]
            started = [item for item in reversed(items) if item["status"] != "not_started"]
            return [client.get(f"/history/{item['run_id']}").raise_for_status().json() for item in started]

    def open_runs(self) -> int:
        with httpx.Client(base_url=self.server_url, timeout=30) as client:
            states = ("running", "waiting", "awaiting_approval")
            return sum(len(client.get("/history", params={"status": state}).json()["items"]) for state in states)


@contextmanager
def running(directory: Path, metrics_port: int, faster: int) -> Iterator[Stack]:
    """All of it, in `directory`, until the context is left."""
    playbooks = directory / "playbooks"
    playbooks.mkdir(parents=True)
    for path in (ROOT / "playbooks").glob("*.yaml"):
        (playbooks / path.name).write_text(hasten(path.read_text(), faster))
    with ExitStack() as stack:
        server, server_url = start_server(directory / "server", "--mode", "enforce", playbooks=playbooks)
        stack.enter_context(server)
        _configure(directory, server_url, metrics_port, faster)
        binary = alertmanagers()["installed"]
        alerts, alerts_url = start_alertmanager(binary, directory / "alertmanager.yml", directory / "alertmanager")
        stack.enter_context(alerts)
        config = directory / "prometheus.yml"
        config.write_text(config.read_text().replace("127.0.0.1:9093", alerts_url.removeprefix("http://")))
        prometheus, _ = start_prometheus(config, directory / "prometheus")
        stack.enter_context(prometheus)
        yield Stack(server_url, directory / "server" / "state", metrics_port)


def _configure(directory: Path, server_url: str, metrics_port: int, faster: int) -> None:
    for name in ("rules", "targets"):
        (directory / name).mkdir()
    for rules in (MONITORING / "rules").glob("*.yaml"):
        (directory / "rules" / rules.name).write_text(hasten(rules.read_text(), faster))
    (directory / "targets" / "nodes.yaml").write_text("[]\n")
    (directory / "targets" / "jobs.yaml").write_text(f"- targets: ['127.0.0.1:{metrics_port}']\n")
    alertmanager = hasten((MONITORING / "alertmanager.yml").read_text(), faster)
    (directory / "alertmanager.yml").write_text(alertmanager.replace("http://127.0.0.1:8080", server_url))
    prometheus = hasten((MONITORING / "prometheus.yml").read_text(), faster)
    prometheus = prometheus.replace("127.0.0.1:8080", server_url.removeprefix("http://"))
    (directory / "prometheus.yml").write_text(prometheus)
