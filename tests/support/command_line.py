"""The command line as a process, against a server or none."""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
import urllib.request
from dataclasses import dataclass
from datetime import UTC, datetime

from tests.support.programs import PYTHON_PATH, inherited


@dataclass(frozen=True)
class CommandResult:
    """The exit code and the output of a command."""

    code: int
    out: str
    err: str


@dataclass(frozen=True)
class CommandLine:
    """Runs the command against one server."""

    url: str
    token: str = ""

    def run(self, *arguments: str, **environment: str) -> CommandResult:
        done = subprocess.run(
            [sys.executable, "-m", "trainmedic_server", *arguments],
            env=self.environment(**environment),
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        return CommandResult(done.returncode, done.stdout, done.stderr)

    def environment(self, **more: str) -> dict[str, str]:
        path = {"PYTHONPATH": PYTHON_PATH, "COLUMNS": "300"}
        return {**inherited(), **path, "TRAINMEDIC_URL": self.url, "TRAINMEDIC_TOKEN": self.token, **more}

    def alert(self, job: str, name: str = "Trouble", **annotations: str) -> str:
        """Have Alertmanager report trouble with a job; the run's id."""
        alert = {
            "status": "firing",
            "labels": {"alertname": name, "job_name": job},
            "annotations": annotations,
            "startsAt": datetime.now(UTC).isoformat(),
            "fingerprint": hashlib.sha256(job.encode()).hexdigest()[:16],
        }
        payload = {"version": "4", "status": "firing", "receiver": "r", "groupKey": "g", "alerts": [alert]}
        request = urllib.request.Request(
            f"{self.url}/webhook",
            json.dumps(payload).encode(),
            {"Content-Type": "application/json", "Authorization": f"Bearer {self.token}"},
        )
        with urllib.request.urlopen(request, timeout=60) as reply:
            run_id: str = json.load(reply)["runs"][0]["run_id"]
            return run_id

    def wait_for_line(self, run_id: str, part: str) -> None:
        """Wait until the run's story has this in it."""
        for _ in range(50):
            if part in (shown := self.run("history", "show", run_id).out):
                return
        raise AssertionError(f"{part!r} is not in {shown}")
