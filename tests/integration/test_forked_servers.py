"""A fork is like a start of the program: what it is given, what it prints, how it ends, and that it can begin anew."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support import forked
from tests.support.programs import PYTHON_PATH, Program, inherited

SHOWN = """
import json, os, sys
print(json.dumps([sys.argv[1:], os.getcwd(), os.environ["GIVEN"], os.environ.get("TRAINMEDIC_MODE"), __name__]))
sys.stdout.flush()
if sys.argv[1] == "again":
    os.execv(sys.executable, [argument.replace("again", "last") for argument in sys.orig_argv])
elif sys.argv[1] == "wait":
    import signal; signal.pause()
sys.exit(3)
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    written = tmp_path / "shown.py"
    written.write_text(SHOWN)
    return written


def start(file: Path, word: str, **environment: str) -> Program:
    argv = [sys.executable, file, word, "serve"]
    return Program(argv, file.with_suffix(".log"), {"PYTHONPATH": PYTHON_PATH, "GIVEN": "x=1", **environment})


def test_it_has_what_it_is_given_and_can_begin_anew(file: Path) -> None:
    """Its arguments, its directory and its environment, and none of this process's settings."""
    with start(file, "again") as program:
        assert isinstance(program.process, forked.Fork)
        assert program.process.wait(60) == program.process.poll() == program.process.returncode == 3
        shown = [json.loads(line) for line in program.tail().splitlines()]
    assert shown == [[[word, "serve"], str(file.parent), "x=1", None, "__main__"] for word in ("again", "last")]


def test_it_is_waited_for_and_killed(file: Path) -> None:
    """As a process that this one has started; a signal that comes later is not sent."""
    with start(file, "wait") as program:
        assert program.process.poll() is None
        with pytest.raises(subprocess.TimeoutExpired):
            program.process.wait(0.01)
        program.process.kill()
        assert program.process.wait(60) == -9
        program.process.terminate()
    assert not Path(f"/proc/{program.process.pid}").exists()


def test_what_python_reads_at_its_start_is_read(file: Path) -> None:
    """A program with another environment of that kind is started."""
    assert forked.parent(PYTHON_PATH).can_fork({**inherited(), "PYTHONPATH": PYTHON_PATH, "GIVEN": os.devnull})
    with start(file, "x", PYTHONHASHSEED="0") as program:
        assert isinstance(program.process, subprocess.Popen)
        assert program.process.wait(60) == 3
