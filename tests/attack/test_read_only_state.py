"""A disk that fails under a server and an agent at work: its filesystem becomes read-only, as ext4 does after an error.

The filesystem is real, in a file behind a loop device, and the kernel is made to find an error in it. So these tests
need root, and a kernel with loop devices and ext4.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Self

import pytest

from tests.driver.driver import Driver
from tests.support.agent_node import KEY
from tests.support.gpu_node import GpuNode
from tests.support.live import Server
from tests.support.messages import delivery, resolved
from tests.support.programs import eventually

PLAYBOOK = """
playbook: cap
on: {alert: Hot}
target: {node: n1, gpu: "{{ labels.job_name }}"}
steps:
  - {id: cap, action: gpu.power_limit, with: {percent: 80}, timeout: 10s, undo: on_resolve}
"""
SIGNED = {"TRAINMEDIC_SIGNING_KEY": KEY}
pytestmark = pytest.mark.skipif(
    os.geteuid() != 0 or not Path("/dev/loop-control").exists(),
    reason="needs root and a kernel with loop devices, to mount a filesystem",
)


class FailingDisk:
    """An ext4 filesystem of 64 MiB at `path`."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._image = path.with_suffix(".image")

    def __enter__(self) -> Self:
        self.path.mkdir()
        with self._image.open("wb") as file:
            file.truncate(64 << 20)
        self._call("mkfs.ext4", "-q", str(self._image))
        self._mount()
        return self

    def __exit__(self, *_: object) -> None:
        self._call("umount", str(self.path))

    def fail(self) -> None:
        """Make the kernel find an error, after which nothing can be written."""
        device = self.path.stat().st_dev
        name = Path(f"/sys/dev/block/{os.major(device)}:{os.minor(device)}").resolve().name
        Path(f"/sys/fs/ext4/{name}/trigger_fs_error").write_text("tried by a test\n")
        with pytest.raises(OSError, match="Read-only"):
            (self.path / "written").touch()

    def mend(self) -> None:
        """Check the filesystem and mount it again. No program may use it meanwhile."""
        self._call("umount", str(self.path))
        # 1: errors were corrected.
        subprocess.run(["e2fsck", "-p", "-f", self._image], capture_output=True, check=False)
        self._mount()

    def _mount(self) -> None:
        self._call("mount", "-o", "loop,errors=remount-ro", str(self._image), str(self.path))

    def _call(self, *argv: str) -> None:
        subprocess.run(argv, check=True, capture_output=True, timeout=60)


def test_a_server_with_a_failing_disk_accepts_and_loses_nothing(
    tmp_path: Path, redis_url: str, make_driver: Callable[..., Driver]
) -> None:
    """It states the reason in answers and in its health endpoint, and continues once the disk is fixed."""
    driver, first, second = make_driver(2), delivery("Hot", "0"), delivery("Hot", "1")
    with FailingDisk(tmp_path / "disk") as disk, GpuNode(tmp_path / "node", redis_url, driver):
        server = Server(_with_state_on(disk, tmp_path / "server"), PLAYBOOK, "--redis", redis_url, environment=SIGNED)
        with server:
            assert [run["decision"] for run in server.ask("/webhook", first).body["runs"]] == ["started"]
            eventually(lambda: driver.watts(0) == 560, 60, "capped")
            disk.fail()
            refused = server.ask("/webhook", second)
            ended = server.ask("/webhook", resolved(first))
            ready = server.ask("/ready")
            assert (refused.status, ended.status, ready.status) == (503, 503, 503)
            assert "read-only" in refused.body["detail"].lower()
            assert "read-only" in str(ready.body).lower()
            assert driver.watts(1) == 700
            server.kill()
        disk.mend()
        with server:
            assert server.ask("/webhook", second).status == 200
            assert server.ask("/webhook", resolved(first)).status == 200
            eventually(lambda: (driver.watts(0), driver.watts(1)) == (700, 560), 60, "one reverted, one capped")
            assert len(server.runs()) == 2
            server.kill()


def test_an_agent_with_a_failing_disk_refuses_with_the_reason(
    tmp_path: Path, redis_url: str, make_driver: Callable[..., Driver]
) -> None:
    """It does nothing that it cannot record. Earlier changes are reverted once, on the fixed disk."""
    driver, first, second = make_driver(2), delivery("Hot", "0"), delivery("Hot", "1")
    with (
        FailingDisk(tmp_path / "disk") as disk,
        GpuNode(_with_state_on(disk, tmp_path / "node"), redis_url, driver) as node,
        Server(tmp_path / "server", PLAYBOOK, "--redis", redis_url, environment=SIGNED) as server,
    ):
        server.ask("/webhook", first)
        eventually(lambda: driver.watts(0) == 560, 60, "capped")
        disk.fail()
        server.ask("/webhook", second)
        failed = eventually(
            lambda: next((run for run in server.runs() if run["gpu"] == "1" and run["success"] is False), None),
            60,
            "the second run failed",
        )
        assert "read-only" in str(server.run(failed["run_id"])["steps"][0]).lower()
        assert driver.watts(1) == 700
        server.ask("/webhook", resolved(first))
        node.kill()
        disk.mend()
        node.start()
        eventually(lambda: driver.watts(0) == 700, 60, "reverted")
        node.kill()


def _with_state_on(disk: FailingDisk, directory: Path) -> Path:
    """Make a directory whose ``state``, and nothing else, is on the disk."""
    directory.mkdir()
    (disk.path / "state").mkdir()
    (directory / "state").symlink_to(disk.path / "state")
    return directory
