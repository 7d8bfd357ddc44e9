"""DiskSpaceLow from Alertmanager to the disk: the agent frees it by its policy's rules, no more than it takes.

The disk is a small filesystem of its own that only the agent's process sees, in a user namespace. There is no
node-exporter here, so the alert is posted to Alertmanager, and ended as soon as the disk has room; whether the
rule fires when it should is tested by promtool.
"""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Iterator
from contextlib import ExitStack
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.acceptance import scene
from tests.acceptance.intervals import hasten
from tests.support.agent_node import KEY, Node
from tests.support.programs import alertmanagers, eventually, start_alertmanager, start_server

FASTER = 60
"""The 2 minutes that temporary files have to be enough become 2 s."""
MEGABYTE = 1 << 20
POLICY = """
allow: [disk.clean]
cleaning:
  owners: [65534]
  rules:
    temporary-files:
      roots: [{disk}/scratch]
      globs: ["**"]
      min_age: 7d
      age_by: modified
    old-logs:
      roots: [{disk}/logs]
      globs: ["*.log"]
      min_age: 7d
      age_by: modified
    superseded-checkpoints:
      roots: [{disk}/checkpoints]
      globs: ["*"]
      kind: checkpoints
      keep_newest: 2
      min_age: 1h
      age_by: modified
"""
LABELS = {
    "alertname": "DiskSpaceLow",
    "severity": "critical",
    "node": "node-1",
    "instance": "node-1:9100",
    "job": "node",
    "device": "/dev/nvme1n1",
    "fstype": "xfs",
}


class SmallDiskNode(Node):
    """A node with a disk of 40 MB."""

    def __init__(self, directory: Path, url: str) -> None:
        self._disk = directory / "disk"
        self._disk.mkdir(parents=True)
        super().__init__(directory, url, POLICY.format(disk=self._disk), "node-1")

    def _launcher(self) -> tuple[str | Path, ...]:
        script = 'mount -t tmpfs -o size=40m tmpfs "$0" && cd "$0" && mkdir scratch logs checkpoints && exec "$@"'
        return "unshare", "-rm", "sh", "-c", script, self._disk

    def _entry(self) -> tuple[str | Path, ...]:
        return "-m", "trainmedic_server"

    @property
    def disk(self) -> Path:
        """As the agent sees it."""
        return Path(f"/proc/{self.agent.process.pid}/root{self._disk}")

    @property
    def mounted_at(self) -> Path:
        """The path of the disk in the agent's mount namespace."""
        return self._disk

    def put(self, name: str, megabytes: float, days: float) -> None:
        """A file of that size and age."""
        path = self.disk / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(bytes(round(megabytes * MEGABYTE)))
        then = time.time() - days * 86400
        for one in (path, path.parent):
            os.utime(one, (then, then))

    def free_percent(self) -> float:
        told = os.statvfs(self.disk)
        return 100 * told.f_bavail / told.f_blocks

    def files(self) -> set[str]:
        return {str(path.relative_to(self.disk)) for path in self.disk.rglob("*") if path.is_file()}


@pytest.fixture
def place(tmp_path: Path) -> Iterator[tuple[SmallDiskNode, str, str]]:
    """A node with its agent, the URL of a server in mode enforce, and that of an Alertmanager."""
    if subprocess.run(["unshare", "-rm", "mount", "-t", "tmpfs", "tmpfs", "/mnt"], check=False).returncode:
        pytest.skip("this machine lets nobody mount a filesystem in a user namespace")
    signed = {"TRAINMEDIC_SIGNING_KEY": KEY}
    playbooks = scene.faster_playbook(tmp_path / "playbooks", "disk-space-low.yaml", FASTER)
    config = tmp_path / "alertmanager.yml"
    with ExitStack() as stack:
        directory = tmp_path / "server"
        server, url = start_server(directory, "--mode", "enforce", environment=signed, playbooks=playbooks)
        stack.enter_context(server)
        shipped = hasten((scene.SHIPPED / "alertmanager.yml").read_text(), FASTER)
        config.write_text(shipped.replace("http://127.0.0.1:8080", url))
        alerts, alertmanager = start_alertmanager(alertmanagers()["installed"], config, tmp_path / "am")
        stack.enter_context(alerts)
        node = SmallDiskNode(tmp_path / "node", (directory / "state" / "redis.url").read_text().strip())
        yield stack.enter_context(node), url, alertmanager


def post(alertmanager: str, disk: Path, began: datetime, ends: datetime) -> None:
    alert = {
        "labels": {**LABELS, "mountpoint": str(disk)},
        "annotations": {"summary": "node-1 has 2% left"},
        "startsAt": began.isoformat(),
        "endsAt": ends.isoformat(),
    }
    httpx.post(f"{alertmanager}/api/v2/alerts", json=[alert]).raise_for_status()


def test_a_full_disk_is_freed_in_the_playbooks_order_and_only_as_far_as_needed(
    place: tuple[SmallDiskNode, str, str],
) -> None:
    """First old temporary files and logs, then the oldest superseded checkpoint; the history states the freed bytes."""
    node, server, alertmanager = place
    node.put("scratch/old.tmp", 1, days=8)
    node.put("scratch/young.tmp", 1, days=1)
    node.put("logs/old.log", 1, days=30)
    for step in (100, 200, 300, 400):
        node.put(f"checkpoints/step-{step}/model.pt", 8, days=5 - step / 100)
        node.put(f"checkpoints/step-{step}/.trainmedic-complete", 0, days=5 - step / 100)
    node.put("data.bin", 40 * node.free_percent() / 100 - 0.8, days=0)
    before = node.files()
    assert node.free_percent() < 10

    began = datetime.now(UTC)
    post(alertmanager, node.mounted_at, began, began + timedelta(hours=1))

    def has_room() -> bool:
        return node.free_percent() >= 10

    eventually(has_room, 60, "room on the disk")
    post(alertmanager, node.mounted_at, began, datetime.now(UTC))

    def closed() -> dict[str, Any] | None:
        (item,) = httpx.get(f"{server}/history").raise_for_status().json()["items"]
        return item if item["status"] not in ("running", "waiting") else None

    item = eventually(closed, 60, "the run's end")
    assert (item["status"], item["target"]) == ("succeeded", "node:node-1"), item
    assert before - node.files() == {
        "scratch/old.tmp",
        "logs/old.log",
        "checkpoints/step-100/model.pt",
        "checkpoints/step-100/.trainmedic-complete",
    }
    run = httpx.get(f"{server}/history/{item['run_id']}").raise_for_status().json()
    steps = {step["id"]: step for step in run["steps"]}
    temporary, checkpoints = steps["temporary"]["output"], steps["checkpoints"]["output"]
    assert (temporary["files"], temporary["bytes"]) == (2, 2 * MEGABYTE)
    assert temporary["free_percent_after"] < 10 <= 20 <= checkpoints["free_percent_after"]
    assert (checkpoints["files"], checkpoints["bytes"]) == (2, 8 * MEGABYTE)
    assert steps["enough"]["status"] == "timed_out"
