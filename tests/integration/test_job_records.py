"""A real process of a job writes its records where the environment says, however it ends."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

JOB = """
import trainmedic

medic = trainmedic.connect(job="llm-1")
for step in range(1, 26):
    medic.report(step, loss=2.0, samples=8)
medic.saved(25)
{end}
"""


def records_of(directory: Path, end: str, code: int) -> list[dict[str, Any]]:
    variables = {"TRAINMEDIC_LOG_DIR": str(directory), "TRAINMEDIC_ATTEMPT": "2", "TRAINMEDIC_NODE": "gpu-07"}
    error_file = {"TORCHELASTIC_ERROR_FILE": str(directory / "error.json")}
    environment = {name: value for name, value in os.environ.items() if not name.startswith("TRAINMEDIC_")}
    job = subprocess.run(
        [sys.executable, "-c", JOB.format(end=end)],
        env={**environment, **variables, **error_file, "TRAINMEDIC_REDIS_URL": "redis://127.0.0.1:1"},
        capture_output=True,
        timeout=60,
    )
    assert job.returncode == code, job.stderr
    file = directory / "llm-1" / "attempt-2" / "rank-0.jsonl"
    return [json.loads(line) for line in file.read_text().splitlines()]


@pytest.mark.parametrize(
    ("end", "code", "last"),
    [
        ("", 0, ["end"]),
        ("medic.close()", 0, ["end"]),
        ("raise ValueError('a bad batch')", 1, ["exception", "end"]),
        ("with medic: raise ValueError('a bad batch')", 1, ["exception", "end"]),
        ("import os, signal, time; time.sleep(2); os.kill(os.getpid(), signal.SIGKILL)", -9, []),
    ],
)
def test_the_records_show_what_happened(tmp_path: Path, end: str, code: int, last: list[str]) -> None:
    """One without an end was killed; what it had recorded until half a second before is there."""
    records = records_of(tmp_path, end, code)
    assert [record["event"] for record in records] == ["restart", "step", "step", "step", "checkpoint", *last]
    assert [record["step"] for record in records[1:5]] == [1, 11, 21, 25]
    assert (tmp_path / "error.json").exists() == ("exception" in last)
    if "exception" in last:
        assert (records[-2]["error"], records[-2]["message"]) == ("ValueError", "a bad batch")
        assert json.loads((tmp_path / "error.json").read_text())["message"]["message"] == "ValueError: a bad batch"
