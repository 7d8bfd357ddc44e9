"""A disk without a free byte: the agent can still write down what it does there, and so can free it.

The disk is a small filesystem of its own that only the agent's process sees, in a user namespace. Where the
machine allows none, this is not tested.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.agent_node import Node
from tests.support.programs import PYTHON_PATH, inherited
from trainmedic.wire import envelope

MEGABYTE = 1 << 20
POLICY = """
allow: [disk.clean]
cleaning:
  owners: [65534]
  rules:
    scratch:
      roots: [{root}]
      globs: ["*.tmp"]
      min_age: 1m
      age_by: modified
"""


@pytest.fixture(scope="module", autouse=True)
def _namespaces() -> None:
    if subprocess.run(["unshare", "-rm", "mount", "-t", "tmpfs", "tmpfs", "/mnt"], check=False).returncode:
        pytest.skip("this machine lets nobody mount a filesystem in a user namespace")


def own_disk(directory: Path) -> tuple[str | Path, ...]:
    """Runs what follows it with a filesystem of 24 MB at `directory`, which nobody else sees."""
    script = 'mount -t tmpfs -o size=24m tmpfs "$0" && exec "$@"'
    return "unshare", "-rm", "sh", "-c", script, directory


class FullDiskNode(Node):
    """A node whose agent has its state, and its scratch directory, on a small disk."""

    def __init__(self, directory: Path, url: str) -> None:
        self.disk = directory / "disk"
        self.disk.mkdir(parents=True)
        super().__init__(directory, url, POLICY.format(root=self.disk))
        self.state = self.disk / "state"

    def _launcher(self) -> tuple[str | Path, ...]:
        return own_disk(self.disk)

    def _entry(self) -> tuple[str | Path, ...]:
        return "-m", "trainmedic_server"

    @property
    def seen_by_agent(self) -> Path:
        """The disk, from outside."""
        return Path(f"/proc/{self.agent.process.pid}/root{self.disk}")


@pytest.fixture
def node(tmp_path: Path, redis_url: str) -> Iterator[FullDiskNode]:
    with FullDiskNode(tmp_path / "node", redis_url) as running:
        yield running


def fill(disk: Path, name: str) -> None:
    """Until nothing more fits."""
    with (disk / name).open("wb", buffering=0) as file:
        try:
            while True:
                file.write(bytes(4096))
        except OSError:
            pass
    long_ago = time.time() - 3600
    os.utime(disk / name, (long_ago, long_ago))


def free(disk: Path) -> int:
    told = os.statvfs(disk)
    return told.f_bavail * told.f_frsize


def test_a_full_disk_is_cleaned_by_the_agent_whose_journal_is_on_it(node: FullDiskNode) -> None:
    """The command is accepted, executed and answered; afterwards the reserve is as large as before."""
    disk = node.seen_by_agent
    reserve = disk / "state" / "agent.reserve"
    kept = reserve.stat().st_size
    assert kept >= MEGABYTE
    fill(disk, "junk.tmp")
    assert free(disk) == 0
    status, output = node.do("disk.clean", rules=["scratch"])
    assert (status, output["files"]) == (envelope.APPLIED, 1), node.agent.tail()
    assert output["bytes"] > 15 * MEGABYTE
    assert output["free_percent_before"] < 5
    assert node.do("disk.clean", rules=["scratch"])[0] == envelope.APPLIED
    assert reserve.stat().st_size == kept
    assert "using reserved space" in node.agent.log.read_text()


def test_a_disk_that_fills_up_at_once_does_not_block_the_agent(node: FullDiskNode) -> None:
    """Each command gets a part of the reserve; only when all is used are commands rejected, with the reason,
    and then nothing is done."""
    disk = node.seen_by_agent
    fill(disk, "junk.dat")
    outcomes = []
    for number in range(400):
        outcomes.append(node.do("disk.clean", rules=["scratch"]))
        fill(disk, f"more-{number}.dat")
        if outcomes[-1][0] == envelope.FAILED:
            break
    assert [status for status, _ in outcomes[:5]] == [envelope.APPLIED] * 5
    assert outcomes[-1][0] == envelope.FAILED
    assert "Is the disk full" in outcomes[-1][1]["reason"]
    for left in disk.glob("*.dat"):
        left.unlink()
    assert node.do("disk.clean", rules=["scratch"])[0] == envelope.APPLIED


def test_an_agent_starts_on_a_full_disk(tmp_path: Path) -> None:
    """It takes its reserve and still has its earlier state."""
    script = f"""
import sys
from pathlib import Path
sys.path[:0] = {PYTHON_PATH.split(os.pathsep)!r}
from datetime import UTC, datetime
from trainmedic.wire.command_book import CommandRecord
from trainmedic_agent.journal import Journal
from tests.integration.test_full_disk import fill, free
disk = Path({str(tmp_path)!r})
now = datetime.now(UTC)
journal = Journal(disk / "state")
journal.record_outcome("c1", CommandRecord("applied", at=now))
journal.close()
fill(disk, "junk.tmp")
assert free(disk) == 0
journal = Journal(disk / "state")
journal.record_outcome("c2", CommandRecord("applied", at=now))
assert [journal.look_up(command).status for command in ("c1", "c2")] == ["applied", "applied"]
"""
    done = subprocess.run(
        [*own_disk(tmp_path), sys.executable, "-c", script],
        env=inherited(),
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
