"""Where the cleaner is attacked: a fresh place with something to clean, canaries outside, programs beside it."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.support.programs import PYTHON_PATH, ROOT
from tests.unit.agent.disk.trees import aged, checkpoint, put

FILES = ("a/f1", "a/b/f1", "a/b/f2", "a/b/c/f1", "a/b/c/f2", "a/d/f1", "a/d/c/f1")
RANKS = 4


@contextmanager
def fast_directory(fallback: Path) -> Iterator[Path]:
    """Where it happens: in memory if possible, where a directory costs microseconds."""
    memory = Path("/dev/shm")
    if not os.access(memory, os.W_OK):
        yield fallback
        return
    with tempfile.TemporaryDirectory(dir=memory) as directory:
        yield Path(directory)


def fill(root: Path) -> None:
    """Everything that the rules name, and the two newest checkpoints, which stay."""
    for name in FILES:
        put(root / name)
    for step in (1, 2, 3, 4):
        path = checkpoint(root / "run" / f"checkpoint-{step}", days=100 - step)
        for rank in range(RANKS if step < 3 else 0):
            put(path / "ranks" / str(rank) / "optimizer.pt", days=100 - step, size=0)
            aged(path / "ranks" / str(rank), 100 - step)
        aged(path / "ranks", 100 - step)


@contextmanager
def in_process(script: str, *arguments: object, before: tuple[str, ...] = ()) -> Iterator[subprocess.Popen[str]]:
    """A Python program that may import the tests; `before` is what starts it."""
    with subprocess.Popen(
        [*before, sys.executable, "-c", script, *map(str, arguments)],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": PYTHON_PATH},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        try:
            yield process
        finally:
            process.kill()
