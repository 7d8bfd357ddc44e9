"""The process of an attempt that imported PyTorch before: what it runs, and how it ends. Real torchrun, one rank."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.integration.launch.launched import PATIENCE
from trainmedic.launch import warm
from trainmedic.launch.attempt import AttemptPlan, JobAttempt
from trainmedic.launch.guarded import WarmStandby

_ONE_RANK = ["--standalone", "--nproc-per-node=1"]


def ended(
    tmp_path: Path,
    program: str | None,
    arguments: list[str] | None = None,
    script: str = "",
    more: Sequence[str] = (),
    **variables: str | None,
) -> subprocess.CompletedProcess[str]:
    """Run a program as the rank of a warm torchrun. None is a script that does not exist."""
    path = tmp_path / "train.py"
    if program is not None:
        path.write_text(program)
    reading, writing = os.pipe()
    process = subprocess.Popen(
        [sys.executable, warm.__file__, str(reading), ""],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        pass_fds=(reading,),
        cwd=tmp_path,
    )
    os.close(reading)
    torchrun = [*(arguments or _ONE_RANK), script or str(path), "an argument", *more]
    cold = [sys.executable, "-m", "torch.distributed.run", *torchrun]
    set_later = {**os.environ, "MINE": "set later", **variables}
    environment = {name: value for name, value in set_later.items() if value is not None}
    with os.fdopen(writing, "wb") as orders:
        orders.write(json.dumps({"argv": cold, "torchrun": torchrun, "environment": environment}).encode())
    out, err = process.communicate(timeout=PATIENCE)
    return subprocess.CompletedProcess(process.args, process.returncode, out, err)


def test_a_program_runs_as_the_main_program(tmp_path: Path) -> None:
    """It has its own arguments, environment, directory, rank, exit functions and signals."""
    program = """
import sys
print([name for name in ("torch", "torch._dynamo", "numpy", "trainmedic.torch") if name not in sys.modules])
import atexit, os, signal, threading
assert __name__ == "__main__" and sys.modules["__main__"].__dict__ is globals()
atexit.register(lambda: print("at exit"))
threading.Timer(0.2, lambda: print("thread")).start()
handlers = [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGUSR1)]
print(sys.argv[1:], os.environ["MINE"], os.environ["RANK"], sys.path[0] == os.path.dirname(__file__))
print(handlers == [signal.SIG_DFL] * 2, signal.getsignal(signal.SIGINT) is signal.default_int_handler)
"""
    run = ended(tmp_path, program)
    assert run.returncode == 0, run.stderr
    assert run.stdout.splitlines() == ["[]", "['an argument'] set later 0 True", "True True", "thread", "at exit"]


def test_a_program_ends_like_a_separate_process(tmp_path: Path) -> None:
    """File buffers are written, and exit functions and threads can pickle the program's classes."""
    program = """
import atexit, pickle, threading
class Step: pass
def pickled(where):
    pickle.dumps(Step())
    file.write(where)
file = open("lines", "w")
atexit.register(pickled, "at exit")
threading.Timer(0.2, pickled, ["thread, "]).start()
file.write("program, ")
"""
    run = ended(tmp_path, program)
    assert run.returncode == 0, run.stderr
    assert (tmp_path / "lines").read_text() == "program, thread, at exit"


def test_a_failing_program_ends_without_being_killed(tmp_path: Path) -> None:
    """Its threads, exit functions, files and last output still complete."""
    program = """
import atexit, sys, threading
class TakenDown:
    def __del__(self):
        open("down", "w").close()
taken_down = TakenDown()
file = open("lines", "w")
atexit.register(file.write, "at exit")
threading.Timer(0.2, file.write, ["thread, "]).start()
file.write("program, ")
sys.exit("the last word")
"""
    run = ended(tmp_path, program)
    assert "exitcode  : 1 (pid: " in run.stderr
    assert "the last word\n" in run.stderr
    assert (tmp_path / "lines").read_text() == "program, thread, at exit"
    assert not (tmp_path / "down").exists()


def test_an_error_at_the_end_does_not_change_the_programs_exit_code(tmp_path: Path) -> None:
    """A class of the program may only look like a file; other files are still written."""
    program = """
import io, sys
class Odd(io.StringIO):
    def flush(self):
        raise RuntimeError("odd")
odd = Odd()
file = open("lines", "w")
file.write("program")
sys.exit(4)
"""
    run = ended(tmp_path, program)
    assert "exitcode  : 4 (pid: " in run.stderr
    assert (tmp_path / "lines").read_text() == "program"


def test_a_program_finds_its_file_after_changing_its_directory(tmp_path: Path) -> None:
    """Hydra, for example, changes it."""
    (tmp_path / "elsewhere").mkdir()
    program = (
        "import os; os.chdir('elsewhere'); print(os.path.exists(__file__), __spec__, globals().get('annotations'))"
    )
    run = ended(tmp_path, program, script="train.py")
    assert run.stdout == "True None None\n", run.stderr


def test_ranks_draw_different_random_numbers_and_have_torchruns_settings(tmp_path: Path) -> None:
    """Otherwise forks of one process would draw the same dropout on each rank."""
    program = """
import os, random, torch, numpy
numbers = [torch.rand(1).item(), random.random(), numpy.random.rand(), os.environ["OMP_NUM_THREADS"]]
print(os.environ["RANK"] + " " + " ".join(map(str, numbers)) + "\\n", end="")
"""
    run = ended(tmp_path, program, ["--standalone", "--nproc-per-node=2"], OMP_NUM_THREADS=None)
    assert run.returncode == 0, run.stderr
    (zero, *first, threads), (one, *second, its) = sorted(line.split() for line in run.stdout.splitlines())
    assert (zero, one, threads, its) == ("0", "1", "1", "1")
    assert not set(first) & set(second)


def test_a_module_runs_as_the_main_program(tmp_path: Path) -> None:
    """It has its package; Python's own error reports a missing one."""
    (tmp_path / "package").mkdir()
    (tmp_path / "package" / "beside.py").write_text("here = 1\n")
    program = "from .beside import here; import sys; print(__name__, __spec__.name, sys.argv[1:], here)"
    (tmp_path / "package" / "train.py").write_text(program)
    run = ended(tmp_path, None, [*_ONE_RANK, "-m"], script="package.train")
    assert (run.returncode, run.stdout) == (0, "__main__ package.train ['an argument'] 1\n"), run.stderr
    run = ended(tmp_path, None, [*_ONE_RANK, "-m"], script="package.missing")
    assert run.returncode == 1
    assert "No module named package.missing" in run.stderr
    assert "runpy" not in run.stderr


def test_a_rank_with_more_arguments_than_a_message_holds_still_starts(tmp_path: Path) -> None:
    """A long list of files, for example, has as many."""
    run = ended(tmp_path, "import sys; print(len(sys.argv))", more=["x" * 1000] * 300)
    assert run.stdout == "302\n", run.stderr


@pytest.mark.parametrize(
    ("end", "status"),
    [("raise SystemExit(7)", "7"), ("import os; os.kill(os.getpid(), 9)", "-9"), ("raise ValueError('bad')", "1")],
)
def test_torchrun_reports_how_the_rank_ended(tmp_path: Path, end: str, status: str) -> None:
    """It prints its own table; a traceback starts in the program."""
    run = ended(tmp_path, end)
    assert run.returncode == 1
    assert f"exitcode  : {status} (pid: " in run.stderr
    if "ValueError" in end:
        trace = run.stderr[run.stderr.index("Traceback") :].splitlines()
        assert trace[1] == f'  File "{tmp_path / "train.py"}", line 1, in <module>'


def test_a_missing_script_fails_as_without_the_warm_start(tmp_path: Path) -> None:
    """Python itself reports it."""
    run = ended(tmp_path, None)
    assert run.returncode == 1
    assert "can't open file" in run.stderr


def test_torchrun_itself_rejects_a_wrong_option(tmp_path: Path) -> None:
    """The exit code is torchrun's."""
    run = ended(tmp_path, "", ["--no-such-option"])
    assert run.returncode == 2
    assert "usage: torchrun" in run.stderr


def test_the_command_itself_runs_without_pytorch(tmp_path: Path) -> None:
    """The reason is reported."""
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
    """The process ends silently when the pipe closes, and by SIGTERM at any time."""
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


def in_place_of_python(tmp_path: Path, line: str) -> str:
    """An interpreter that does nothing but this line of a shell: it stands for one that is slow, or that dies."""
    program = tmp_path / "python"
    program.write_text(f"#!/bin/sh\n{line}\n")
    program.chmod(0o755)
    return str(program)


@pytest.mark.parametrize("end", ["exit 3", "kill -9 $$"])
def test_a_process_that_dies_before_the_attempt_costs_only_its_head_start(
    tmp_path: Path, end: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Even if its guard has not noticed yet: the attempt runs once, without it, and has its own exit status."""
    standby = WarmStandby(in_place_of_python(tmp_path, f"sleep 1; {end}"), "", 1.0, prints_to_terminal=False)
    ran = ["sh", "-c", f"echo ran >> {tmp_path}/ran; exit 7"]
    plan = AttemptPlan(1, ran, None, "here", dict(os.environ), 1.0, None, 1 << 20)
    attempt = JobAttempt(plan, lambda environment: standby.begin(plan.argv, [], environment))
    result = attempt.run(lambda: None)
    assert result.exit_code == 7
    assert (tmp_path / "ran").read_text() == "ran\n"
    assert "starting without it" in caplog.text


def test_an_attempt_stopped_while_its_process_imports_does_not_start(tmp_path: Path) -> None:
    """It does not start without that process either."""
    standby = WarmStandby(in_place_of_python(tmp_path, "exec sleep 60"), "", 1.0, prints_to_terminal=False)
    plan = AttemptPlan(1, ["touch", str(tmp_path / "ran")], None, "here", dict(os.environ), 1.0, None, 1 << 20)
    attempt = JobAttempt(plan, lambda environment: standby.begin(plan.argv, [], environment))
    assert attempt.run(lambda: attempt.stop(signal.SIGTERM)).exit_code == 128 + signal.SIGTERM
    assert not (tmp_path / "ran").exists()


def test_an_attempt_starts_though_its_process_still_imports(tmp_path: Path) -> None:
    """The launcher does not wait for it, however large the environment is. A signal for the job would wait too."""
    standby = WarmStandby(in_place_of_python(tmp_path, "exec sleep 20"), "", 1.0, prints_to_terminal=False)
    guarded = standby.begin(["torchrun"], [], {f"LARGE_{number}": "x" * 100_000 for number in range(3)})
    assert guarded is not None
    assert guarded.process.poll() is None
    standby.close()
    guarded.process.wait(PATIENCE)
