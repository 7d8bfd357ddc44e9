"""A fork is like a start of the program: what it is given, what it prints, how it ends, and that it can begin anew."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
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


def test_it_gets_its_inputs_and_can_restart_itself(file: Path) -> None:
    """It has its arguments, directory and environment, and none of this process's settings."""
    with start(file, "again") as program:
        assert isinstance(program.process, forked.Fork)
        assert program.process.wait(60) == program.process.poll() == program.process.returncode == 3
        shown = [json.loads(line) for line in program.tail().splitlines()]
    assert shown == [[[word, "serve"], str(file.parent), "x=1", None, "__main__"] for word in ("again", "last")]


def test_it_can_be_waited_for_and_killed(file: Path) -> None:
    """It behaves like a child process; a later signal is not sent."""
    with start(file, "wait") as program:
        assert program.process.poll() is None
        with pytest.raises(subprocess.TimeoutExpired):
            program.process.wait(0.01)
        program.process.kill()
        assert program.process.wait(60) == -9
        program.process.terminate()
    assert not Path(f"/proc/{program.process.pid}").exists()


def test_it_can_be_killed_while_another_thread_waits_for_it(file: Path) -> None:
    with start(file, "wait") as program, ThreadPoolExecutor(1) as pool:
        status = pool.submit(program.process.wait)
        with pytest.raises(TimeoutError):
            status.result(0.5)
        program.process.kill()
        assert status.result(60) == -9


def test_a_program_whose_parent_was_killed_is_ended(file: Path) -> None:
    """Its exit status is lost, and the next program has another parent."""
    path = f"{PYTHON_PATH}{os.pathsep}{file.parent}"

    def started(word: str) -> forked.Fork:
        environment = {**inherited(), "PYTHONPATH": path, "GIVEN": "x=1"}
        with file.with_suffix(".log").open("wb") as log:
            return forked.parent(path).fork([sys.executable, str(file), word], environment, file.parent, log.fileno())

    program = started("wait")
    first = forked.parent(path)
    first.process.kill()
    assert first.process.wait(60) == -9
    assert program.poll() is None
    program.kill()
    with pytest.raises(ChildProcessError, match="ended with -9"):
        program.wait(60)
    assert started("x").wait(60) == 3
    forked.parent(path).end()


def test_the_parent_ends_while_another_process_has_its_socket() -> None:
    """A plain fork of the test process has it."""
    parent = forked.Parent({**inherited(), "PYTHONPATH": PYTHON_PATH})
    with subprocess.Popen(["sleep", "600"], pass_fds=[parent.control.fileno()]) as holder:
        parent.end()
        assert parent.process.returncode == 0
        assert holder.poll() is None
        holder.kill()


def test_python_startup_variables_take_effect(file: Path) -> None:
    """A program with another environment of that kind is started."""
    assert forked.parent(PYTHON_PATH).can_fork({**inherited(), "PYTHONPATH": PYTHON_PATH, "GIVEN": os.devnull})
    with start(file, "x", PYTHONHASHSEED="0") as program:
        assert isinstance(program.process, subprocess.Popen)
        assert program.process.wait(60) == 3


@pytest.mark.parametrize("word", ["serve", "other"])
def test_it_rarely_collects_garbage_like_all_programs_of_the_tests(tmp_path: Path, word: str) -> None:
    """Even without a fork its imports stay, and its exit looks for no cycles after its exit functions."""
    file = tmp_path / "cycle.py"
    file.write_text("""
import atexit, gc
class Cycle:
    def __init__(self): self.me = self
    def __del__(self): print("collected")
kept = Cycle()
atexit.register(print, gc.get_threshold()[0] > 700)
""")
    with Program([sys.executable, file, word], tmp_path / "log", {"PYTHONPATH": PYTHON_PATH}) as program:
        assert program.process.wait(60) == 0
        assert isinstance(program.process, forked.Fork) == (word == "serve")
        assert program.tail() == "True"


def test_our_own_command_collects_garbage_as_for_users(tmp_path: Path) -> None:
    """Its memory is measured."""
    (tmp_path / "trainmedic_none.py").write_text("import gc; print(gc.get_threshold())")
    shown = [
        subprocess.run([sys.executable, *options], env={"PYTHONPATH": path}, capture_output=True, check=True).stdout
        for path in (f"{PYTHON_PATH}{os.pathsep}{tmp_path}", str(tmp_path))
        for options in (["-m", "trainmedic_none"], ["-P", "-m", "trainmedic_none"])
    ]
    assert len(set(shown)) == 1
