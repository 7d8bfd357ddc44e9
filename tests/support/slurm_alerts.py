"""Alerts on nodes and jobs of a test's Slurm: a server with playbooks, deliveries, and what came of them."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import httpx

from tests.support.messages import delivery, resolved
from tests.support.programs import eventually, start_server
from tests.support.slurm_cluster import SlurmCluster

DRAIN = """
playbook: drain-broken-node
on: {alert: GPUFellOffBus}
target: node
steps:
  - id: drain
    action: slurm.drain
    undo: on_resolve
"""


@contextmanager
def serving(
    directory: Path, playbooks: Mapping[str, str], *options: str, environment: Mapping[str, str] | None = None
) -> Iterator[str]:
    """Start a server in mode enforce with playbooks by file name; the value is its URL."""
    folder = directory / "playbooks"
    folder.mkdir()
    for name, text in playbooks.items():
        (folder / name).write_text(text)
    program, url = start_server(
        directory / "server", "--mode", "enforce", *options, environment=environment, playbooks=folder
    )
    with program:
        yield url


def alert(name: str, **labels: str) -> dict[str, Any]:
    """A delivery with one firing alert."""
    document = delivery(name, "slurm")
    document["alerts"][0]["labels"] = {"alertname": name, **labels}
    document["alerts"][0]["fingerprint"] = f"{name}-{time.time_ns()}"
    return document


def fire(url: str, name: str, **labels: str) -> dict[str, Any]:
    """Deliver an alert that fires; return the delivery."""
    document = alert(name, **labels)
    httpx.post(f"{url}/webhook", json=document).raise_for_status()
    return document


def closed_run(url: str, target: str, undone: bool = False) -> dict[str, Any] | None:
    """The newest run on the target, once it is over, or with `undone` once its undo is."""
    items = httpx.get(f"{url}/history", params={"limit": 50}).raise_for_status().json()["items"]
    item = next((item for item in items if item["target"] == target), None)
    if item is None or item["status"] in ("running", "waiting", "awaiting_approval"):
        return None
    run: dict[str, Any] = httpx.get(f"{url}/history/{item['run_id']}").raise_for_status().json()
    return run if run["undone_at"] or not undone else None


def until_closed(url: str, target: str) -> dict[str, Any]:
    return eventually(partial(closed_run, url, target), 120, "the run is over")


def until_drain_has_ended(url: str, cluster: SlurmCluster, node: str, fired: dict[str, Any]) -> None:
    """Resolve the alert, and wait until its run's drain is undone."""
    httpx.post(f"{url}/webhook", json=resolved(fired)).raise_for_status()
    eventually(partial(closed_run, url, f"node:{node}", undone=True), 120, "the drain is taken back")
    assert "DRAIN" not in state_of(cluster, node)


def drain_while_an_alert_fires(url: str, cluster: SlurmCluster, node: str) -> None:
    """The drain's reason names the run. When the alert has resolved, the node takes jobs again."""
    fired = fire(url, "GPUFellOffBus", node=node)
    run = until_closed(url, f"node:{node}")
    assert run["status"] == "succeeded", run
    shown = state_of(cluster, node)
    assert "State=IDLE+DRAIN" in shown
    assert f"Reason=trainmedic:{run['run_id']} " in shown
    until_drain_has_ended(url, cluster, node, fired)


def state_of(cluster: SlurmCluster, node: str) -> str:
    return cluster.run("scontrol", "show", "node", node)
