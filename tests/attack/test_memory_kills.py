"""A training with in-memory checkpoints is killed at any moment, again and again: what it goes on from is whole."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from pathlib import Path

from tests.attack.effort import random_source, trials
from tests.support.programs import PYTHON_PATH, inherited

PROGRAM = Path(__file__).with_name("doomed_memory.py")


def lines(directory: Path) -> list[dict[str, object]]:
    file = directory / "resumed.jsonl"
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


def at(directory: Path) -> int:
    try:
        return int((directory / "at").read_text() or 0)
    except FileNotFoundError:
        return 0


def test_kills_during_copies_leave_a_consistent_state(tmp_path: Path) -> None:
    """Each process continues from one step's state, later than the one from which the process before it started;
    it loses but a few copies, and in the end nothing is left in memory."""
    source = random_source()
    shared = tmp_path / "shared"
    shared.mkdir()
    environment = {**inherited(), "PYTHONPATH": PYTHON_PATH, "TRAINMEDIC_SHARED_MEMORY": str(shared)}
    kills = trials(2, 40)
    for life in range(kills + 1):
        before, known = at(tmp_path), len(lines(tmp_path))
        steps = 1_000_000 if life < kills else before + 30
        with (tmp_path / f"life-{life}.log").open("wb") as out:
            command = [sys.executable, str(PROGRAM), str(steps)]
            process = subprocess.Popen(command, cwd=tmp_path, env=environment, stdout=out, stderr=subprocess.STDOUT)
        log = tmp_path / f"life-{life}.log"
        until = time.monotonic() + 120
        while len(lines(tmp_path)) == known or (life < kills and at(tmp_path) < before + 20):
            assert process.poll() is None or life == kills, log.read_text()
            assert time.monotonic() < until, log.read_text()
            time.sleep(0.005)
        if life < kills:
            time.sleep(source.random() * 0.5)
            process.send_signal(signal.SIGKILL)
            process.wait()
        else:
            assert process.wait(120) == 0, log.read_text()
        begun = lines(tmp_path)[-1]
        if life:
            step = begun["step"]
            assert isinstance(step, int)
            assert begun["numbers"] == [float(step)], begun
            assert before - step <= 60, (before, step)
    assert not list(shared.rglob("slot-*"))
