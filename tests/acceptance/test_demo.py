"""``trainmedic demo`` as somebody shows it: real programs, real repairs, and nothing left after it."""

from __future__ import annotations

import os
import pty
import signal
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

from tests.support.programs import PYTHON_PATH, Program, eventually, inherited


def environment(directory: Path) -> Mapping[str, str]:
    return {**inherited(), "PYTHONPATH": PYTHON_PATH, "TMPDIR": str(directory)}


def left_over(directory: Path) -> list[str]:
    """The programs that work in `directory`, by their command lines."""
    left = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            words = (process / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
            is_inside = (process / "cwd").readlink().is_relative_to(directory)
        except OSError:
            continue
        if is_inside or f"{directory}/" in words:
            left.append(words)
    return left


@pytest.mark.parametrize("options", [("--plain", "--only-own"), ()], ids=["alone", "with what is installed"])
def test_faults_are_repaired_and_nothing_is_left(tmp_path: Path, options: tuple[str, ...]) -> None:
    """Without a terminal, the demo ends when both faults are repaired and their changes are reverted."""
    argv = [sys.executable, "-m", "trainmedic_server", "demo", "--for", "5m", *options]
    done = subprocess.run(
        [*argv, "--fault", "data", "--fault", "heat"],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        env=environment(tmp_path),
        text=True,
        timeout=540,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "loss-spike on job llm-1: succeeded" in done.stdout
    assert "hot-gpu on node-1 · GPU 0: succeeded, undone" in done.stdout
    assert left_over(tmp_path) == []
    assert list(tmp_path.iterdir()) == []


def test_keys_cause_faults_and_a_signal_ends_the_demo(tmp_path: Path) -> None:
    """On a terminal, also if two keys are pressed at once; its programs end with it."""
    keyboard, terminal = pty.openpty()
    log = tmp_path / "demo.log"
    work = tmp_path / "work"
    work.mkdir()
    with log.open("wb") as out:
        demo = subprocess.Popen(
            [sys.executable, "-m", "trainmedic_server", "demo", "--plain", "--only-own", "--for", "10m"],
            stdin=terminal,
            stdout=out,
            stderr=subprocess.STDOUT,
            env=environment(work),
        )
    try:
        eventually(lambda: "Keys:" in log.read_text() or demo.poll() is not None, 240, "the keys")
        os.write(keyboard, b"gh")
        eventually(lambda: "gradient-explosion on job llm-2" in log.read_text(), 120, "the repair")
        assert "FAULT gradients" in log.read_text()
        assert "FAULT heat" in log.read_text()
        assert left_over(work) != []
        demo.send_signal(signal.SIGTERM)
        assert demo.wait(120) == 0, log.read_text()
    finally:
        if demo.poll() is None:
            demo.terminate()
            demo.wait(120)
        os.close(keyboard)
        os.close(terminal)
    assert left_over(work) == []
    assert list(work.iterdir()) == []


def test_an_invalid_duration_is_rejected(tmp_path: Path) -> None:
    """The error comes before any program is started."""
    log = tmp_path / "demo.log"
    argv = [sys.executable, "-m", "trainmedic_server", "demo", "--for", "3h"]
    with Program(argv, log, {"PYTHONPATH": PYTHON_PATH}) as demo:
        assert demo.process.wait(60) == 2
    assert "3h is not between 1s and 2h" in log.read_text()
