"""Where the accidents of ``failing_job`` happen: a group of processes with little memory, a file system with little
room."""

from __future__ import annotations

import contextlib
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

_MEMORY = Path("/sys/fs/cgroup/memory")


@contextlib.contextmanager
def memory_group(name: str) -> Iterator[Path]:
    """A group of processes that may use 300 MB. Skips where this user may make none."""
    group = _MEMORY / f"trainmedic-{name}"
    try:
        group.mkdir()
        (group / "memory.limit_in_bytes").write_text("300M")
    except OSError:
        pytest.skip("memory cgroups (version 1) that this user may make are needed")
    try:
        yield group
    finally:
        group.rmdir()


@contextlib.contextmanager
def small_tmpfs(directory: Path) -> Iterator[Path]:
    """A tmpfs of 4 MB at `directory`. Skips where this user may mount none."""
    directory.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", str(directory)]
    if subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("the right to mount a tmpfs is needed")
    try:
        yield directory
    finally:
        subprocess.run(["umount", str(directory)], check=True)
