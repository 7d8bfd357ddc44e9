"""``trainmedic-run`` as a process, and what is left of it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tests.support.programs import PYTHON_PATH, eventually
from trainmedic.wire.log_layout import AttemptLogs, job_directory

PATIENCE = 180
"""Seconds for a torchrun of two ranks on a loaded machine."""


class Launched:
    """A launcher and its job, whose processes have a mark in their environment by which they are found."""

    def __init__(self, directory: Path, command: Sequence[str], *options: str, **variables: str) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        log_dir = directory / "logs"
        jobs = [option.partition("=")[2] for option in options if option.startswith("--job=")]
        self.logs = job_directory(log_dir, next(iter(jobs), variables.get("TRAINMEDIC_JOB", "job")))
        self._mark = f"LAUNCHED_TEST={directory}"
        argv = [sys.executable, "-m", "trainmedic.launch", f"--log-dir={log_dir}", *options, "--", *command]
        mine: Mapping[str, str] = {
            "LAUNCHED_TEST": str(directory),
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": PYTHON_PATH,
            **variables,
        }
        self.out, self.err = directory / "stdout", directory / "stderr"
        with self.out.open("wb") as out, self.err.open("wb") as err:
            environment = {name: value for name, value in os.environ.items() if not name.startswith("TRAINMEDIC_")}
            self.process = subprocess.Popen(
                argv,
                stdout=out,
                stderr=err,
                env={**environment, **mine},
                cwd=directory,
                # What runs the tests in the background may have SIGINT ignored, and a launcher heeds that.
                preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
            )

    def wait(self, within: float = PATIENCE) -> int:
        return self.process.wait(within)

    def living(self) -> list[int]:
        """All its processes, the launcher among them, without zombies."""
        pids = []
        for entry in Path("/proc").glob("[0-9]*"):
            try:
                is_mine = self._mark.encode() in (entry / "environ").read_bytes().split(b"\0")
                is_zombie = (entry / "stat").read_bytes().rpartition(b")")[2].split()[0] == b"Z"
            except OSError:
                continue
            if is_mine and not is_zombie:
                pids.append(int(entry.name))
        return pids

    def wait_until_all_are_gone(self) -> None:
        eventually(lambda: not self.living(), 60, f"the end of {self.living()}")

    def wait_for_output(self, text: str) -> None:
        eventually(lambda: text in self.printed(), PATIENCE, f"{text!r} to be printed")

    def printed(self) -> str:
        return self.out.read_text() + self.err.read_text()

    def kept(self, attempt: int = 1) -> AttemptLogs:
        """The logs of an attempt."""
        return AttemptLogs(self.logs / f"attempt-{attempt}")

    def attempts(self) -> list[dict[str, Any]]:
        """The attempts that have failed."""
        file = self.logs / "attempts.jsonl"
        return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []

    def close(self) -> None:
        for pid in self.living():
            os.kill(pid, signal.SIGKILL)
        self.process.wait(60)
