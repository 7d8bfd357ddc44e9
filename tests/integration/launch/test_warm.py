"""The process of an attempt that imported PyTorch before: what it runs, and how it ends. Real torchrun, one rank."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.integration.launch.launched import PATIENCE
from trainmedic.launch import warm

_ONE_RANK = ["--standalone", "--nproc-per-node=1"]


def ended(tmp_path: Path, program: str | None, arguments: list[str] | None = None) -> subprocess.CompletedProcess[str]:
    """Run a program as the rank of a warm torchrun. None is a script that does not exist."""
    script = tmp_path / "train.py"
    if program is not None:
        script.write_text(program)
    reading, writing = os.pipe()
    process = subprocess.Popen(
        [sys.executable, warm.__file__, str(reading), ""],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        pass_fds=(reading,),
    )
    os.close(reading)
    torchrun = [*(arguments or _ONE_RANK), str(script), "an argument"]
    cold = [sys.executable, "-m", "torch.distributed.run", *torchrun]
    environment = {**os.environ, "MINE": "set later"}
    os.write(writing, json.dumps({"argv": cold, "torchrun": torchrun, "environment": environment}).encode())
    os.close(writing)
    out, err = process.communicate(timeout=PATIENCE)
    return subprocess.CompletedProcess(process.args, process.returncode, out, err)


def test_a_program_runs_as_the_main_program(tmp_path: Path) -> None:
    """With its arguments, environment, directory, rank, exit functions and signals."""
    program = """
import atexit, os, signal, sys, threading
assert __name__ == "__main__" and sys.modules["__main__"].__dict__ is globals()
atexit.register(lambda: print("at exit"))
threading.Timer(0.2, lambda: print("thread")).start()
handlers = [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGUSR1)]
print(sys.argv[1:], os.environ["MINE"], os.environ["RANK"], sys.path[0] == os.path.dirname(__file__))
print(handlers == [signal.SIG_DFL] * 2, signal.getsignal(signal.SIGINT) is signal.default_int_handler)
print("forked" if sys.orig_argv[1].endswith("warm.py") else "executed")
"""
    run = ended(tmp_path, program)
    assert run.returncode == 0, run.stderr
    assert run.stdout.splitlines() == ["['an argument'] set later 0 True", "True True", "forked", "thread", "at exit"]


@pytest.mark.parametrize(
    ("end", "status"),
    [("raise SystemExit(7)", "7"), ("import os; os.kill(os.getpid(), 9)", "-9"), ("raise ValueError('bad')", "1")],
)
def test_torchrun_says_how_the_rank_ended(tmp_path: Path, end: str, status: str) -> None:
    """By its own table; and a traceback begins in the program."""
    run = ended(tmp_path, end)
    assert run.returncode == 1
    assert f"exitcode  : {status} (pid: " in run.stderr
    if "ValueError" in end:
        trace = run.stderr[run.stderr.index("Traceback") :].splitlines()
        assert trace[1] == f'  File "{tmp_path / "train.py"}", line 1, in <module>'


def test_a_script_that_does_not_exist_fails_as_without_it(tmp_path: Path) -> None:
    """Python itself says so."""
    run = ended(tmp_path, None)
    assert run.returncode == 1
    assert "can't open file" in run.stderr


def test_a_wrong_option_is_torchruns_to_refuse(tmp_path: Path) -> None:
    """By its exit code."""
    run = ended(tmp_path, "", ["--no-such-option"])
    assert run.returncode == 2
    assert "usage: torchrun" in run.stderr


def test_without_pytorch_the_command_itself_is_run(tmp_path: Path) -> None:
    """And the reason is said."""
    reading, writing = os.pipe()
    process = subprocess.Popen(
        [sys.executable, "-S", "-E", warm.__file__, str(reading), ""],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        pass_fds=(reading,),
    )
    os.close(reading)
    order = {"argv": ["echo", "cold"], "torchrun": [], "environment": dict(os.environ)}
    os.write(writing, json.dumps(order).encode())
    os.close(writing)
    out, err = process.communicate(timeout=PATIENCE)
    assert (process.returncode, out) == (0, "cold\n")
    assert "--warm has no effect: ModuleNotFoundError: No module named 'torch'" in err


def test_a_launcher_that_ends_before_the_attempt_leaves_nothing(tmp_path: Path) -> None:
    """The process ends without a word when the pipe closes, and by SIGTERM at any time."""
    for number in (None, signal.SIGTERM):
        reading, writing = os.pipe()
        process = subprocess.Popen([sys.executable, "-S", "-E", warm.__file__, str(reading), ""], pass_fds=(reading,))
        os.close(reading)
        if number is None:
            os.close(writing)
            assert process.wait(PATIENCE) == 0
        else:
            process.send_signal(number)
            assert process.wait(PATIENCE) == -number
            os.close(writing)
