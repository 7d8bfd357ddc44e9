"""Source trees of the measured Trainmedic: this checkout, and another revision of it."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from tests.support.programs import ROOT


@dataclass(frozen=True)
class Tree:
    """Server, SDK, playbooks and rules of one revision."""

    root: Path

    @property
    def python_path(self) -> str:
        """Import path of this revision; benchmark and tests come from this checkout."""
        return os.pathsep.join(map(str, (*(self.root / part for part in ("app", "agent", "logs", "sdk")), ROOT)))

    @property
    def sdk(self) -> Path:
        return self.root / "sdk"

    @cached_property
    def keeps_warm(self) -> bool:
        """Return whether its launcher has the option ``--warm``."""
        argv = [sys.executable, "-m", "trainmedic.launch", "--help"]
        environment = {**os.environ, "PYTHONPATH": self.python_path}
        return "--warm" in subprocess.run(argv, env=environment, check=True, capture_output=True, text=True).stdout


HERE = Tree(ROOT)


@contextmanager
def checked_out(revision: str, at: Path) -> Iterator[Tree]:
    """Check `revision` out into `at`, removed when the context ends."""
    git = ["git", "-C", str(ROOT), "worktree"]
    subprocess.run([*git, "add", "--detach", str(at), revision], check=True, capture_output=True)
    try:
        yield Tree(at)
    finally:
        subprocess.run([*git, "remove", "--force", str(at)], check=True, capture_output=True)
