"""Faults from outside the job: its server and Redis are killed, and its disk runs full."""

from __future__ import annotations

import os
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import httpx

from benchmarks.unattended import faults
from benchmarks.unattended.journal import Journal
from benchmarks.unattended.stack import Stack
from trainmedic.recovery import checkpoints

DISK_MEGABYTES = 64
FULL_SECONDS = 6.0
"""More than the time between two checkpoints."""
_PATIENCE = 20.0  # seconds for a repair to begin
_WRITES_WITHIN = 90.0  # seconds for the checkpoint after the disk has room again, on a machine with much other work


@contextmanager
def small_disk(at: Path) -> Iterator[Path]:
    """Mount a file system of its own that can be filled. Only root may do that (else ``unshare --map-root-user
    --mount``).
    """
    at.mkdir(parents=True)
    size = f"size={DISK_MEGABYTES}m"
    subprocess.run(["mount", "-t", "tmpfs", "-o", size, "unattended", str(at)], check=True)
    try:
        yield at
    finally:
        subprocess.run(["umount", "--lazy", str(at)], check=True)


class Intruder(threading.Thread):
    """Watches the journal for faults of its kinds, and causes them."""

    def __init__(self, journal: Journal, stack: Stack, disk: Path) -> None:
        super().__init__(daemon=True)
        self._journal = journal
        self._stack = stack
        self._disk = disk
        self._ends = threading.Event()
        self.failed: BaseException | None = None
        """Reason why it stopped, or None."""

    def end(self) -> None:
        self._ends.set()
        self.join()

    def run(self) -> None:
        seen = 0
        try:
            while not self._ends.wait(0.05):
                told = [event for event in self._journal.events() if event["event"] == "fault"]
                for fault in told[seen:]:
                    self._strike(fault["kind"])
                seen = len(told)
        except BaseException as error:
            self.failed = error

    def _strike(self, kind: str) -> None:
        if kind == faults.FULL_DISK:
            self._fill_disk()
        elif kind in (faults.KILL_SERVER, faults.KILL_REDIS):
            self._wait_for_repair()
            if kind == faults.KILL_SERVER:
                self._stack.server.kill()
            else:
                self._stack.server.kill_redis()
            self._journal.tell("struck", kind=kind)

    def _wait_for_repair(self) -> None:
        """Wait until a playbook has begun to run, to interrupt it."""
        until = time.monotonic() + _PATIENCE
        while time.monotonic() < until and not self._ends.wait(0.02):
            with suppress(httpx.HTTPError):
                if self._stack.open_runs():
                    return

    def _fill_disk(self) -> None:
        ballast = self._disk / "ballast"
        block = bytes(1 << 16)
        until = time.monotonic() + FULL_SECONDS
        with ballast.open("wb", buffering=0) as file:
            while time.monotonic() < until and not self._ends.is_set():
                # What is deleted meanwhile gives no room either.
                try:
                    os.write(file.fileno(), block)
                except OSError:
                    self._ends.wait(0.02)
        ballast.unlink()
        self._journal.tell("room")
        began = time.time()
        until = time.monotonic() + _WRITES_WITHIN
        while time.monotonic() < until and not self._ends.wait(0.1):
            if any(written_at(path) > began for path in self._disk.glob("checkpoints/step-*")):
                self._journal.tell("written")
                return


def written_at(checkpoint: Path) -> float:
    """Return when a complete checkpoint was written, 0 if it is incomplete or deleted."""
    try:
        return checkpoint.stat().st_mtime if checkpoints.completion(checkpoint) else 0.0
    except FileNotFoundError:
        return 0.0
