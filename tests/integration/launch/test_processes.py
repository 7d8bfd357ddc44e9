"""``trainmedic-run`` and any command: exit codes, signals, output, and that no process stays. Real processes."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.integration.launch.launched import PATIENCE, Launched
from tests.support.programs import eventually

Launch = Callable[..., Launched]


def python(program: str) -> list[str]:
    return [sys.executable, "-c", program]


def test_output_and_exit_code_pass_through_unchanged(launch: Launch) -> None:
    """The output includes non-text bytes, and it is stored."""
    job = launch(python("import os; os.write(1, b'\\xff\\x00out\\n'); os.write(2, b'err')"))
    assert job.wait() == 0
    assert job.out.read_bytes() == b"\xff\x00out\n"
    assert job.err.read_bytes().endswith(b"err")
    assert sorted(job.kept().launcher(socket.gethostname()).read_bytes()) == sorted(b"\xff\x00out\nerr")


@pytest.mark.parametrize(
    ("end", "code", "cause"),
    [
        ("raise MemoryError", 1, "the job ended with exit code 1 (MemoryError)"),
        ("raise SystemExit(7)", 7, "the job ended with exit code 7"),
        ("import os; os.kill(os.getpid(), 9)", 137, "the job was ended by SIGKILL"),
        ("import os; os.abort()", 134, "the job was ended by SIGABRT"),
    ],
)
def test_a_failed_job_is_restarted_and_the_launcher_returns_its_last_exit_code(
    launch: Launch, end: str, code: int, cause: str
) -> None:
    """Up to the allowed number of retries, each with its attempt's number."""
    job = launch(python(f"import os; print(os.environ['TRAINMEDIC_ATTEMPT']); {end}"), "--retries=1", "--delay=0s")
    assert job.wait() == code
    assert job.out.read_text().split() == ["1", "2"]
    assert [attempt["cause"] for attempt in job.attempts()] == [cause, cause]


def test_the_same_cause_three_times_without_progress_ends_the_retries(launch: Launch) -> None:
    """This holds whatever the number of retries; other causes are retried further."""
    job = launch(python("raise ValueError"), "--retries=100", "--delay=0s")
    assert job.wait() == 1
    assert len(job.attempts()) == 3
    assert "the same 3 times in a row" in job.printed()


def test_a_job_fixed_by_its_next_attempt_ends_well(launch: Launch) -> None:
    """The exit code is that of the last attempt."""
    program = "import os, sys; sys.exit(os.environ['TRAINMEDIC_ATTEMPT'] == '1')"
    job = launch(python(program), "--delay=0s")
    assert job.wait() == 0
    assert len(job.attempts()) == 1


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_an_external_signal_goes_to_the_job_and_ends_it(launch: Launch, number: signal.Signals) -> None:
    """A scheduler or user ends the job: it has time to save, and is not restarted."""
    program = f"""
import signal, sys, time
def save(*_):
    print("saved", flush=True)
    sys.exit(3)
signal.signal({int(number)}, save)
print("ready", flush=True)
while True: time.sleep(0.02)  # a signal that comes just before signal.pause() would be handled after the next one
"""
    job = launch(python(program))
    job.wait_for_output("ready")
    job.process.send_signal(number)
    assert job.wait() == 3
    assert job.out.read_text().split() == ["ready", "saved"]


@pytest.mark.parametrize("loaded", ["trainmedic.launch.program", "redis", "trainmedic.launch.supervisor"])
def test_ctrl_c_while_the_launcher_is_loaded_ends_it_like_any_command(tmp_path: Path, loaded: str) -> None:
    """It ends by the signal itself, which a shell shows as 130, without a traceback."""
    program = f"""
import os, signal, sys
class Interrupt:
    def find_spec(self, name, *_):
        if name == {loaded!r}:
            os.kill(os.getpid(), signal.SIGINT)
sys.meta_path.insert(0, Interrupt())
from trainmedic.launch.__main__ import main
sys.exit(main(["--log-dir=none", "--", "true"]))
"""

    def heed() -> None:
        signal.signal(signal.SIGINT, signal.SIG_DFL)

    ended = subprocess.run(python(program), cwd=tmp_path, capture_output=True, timeout=PATIENCE, preexec_fn=heed)
    assert (ended.returncode, ended.stdout, ended.stderr) == (-signal.SIGINT, b"", b"")


def test_a_signal_that_ends_the_job_is_in_the_exit_code(launch: Launch) -> None:
    """A shell encodes it in the same way."""
    job = launch(python("print('ready', flush=True); import signal; signal.pause()"))
    job.wait_for_output("ready")
    job.process.send_signal(signal.SIGTERM)
    assert job.wait() == 128 + signal.SIGTERM


def test_a_job_that_ignores_the_signal_is_killed_after_the_grace_period(launch: Launch) -> None:
    """All of its processes are killed."""
    program = """
import signal, subprocess, sys
signal.signal(signal.SIGTERM, signal.SIG_IGN)
child = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('child', flush=True); signal.pause()"
subprocess.Popen([sys.executable, "-c", child], start_new_session=True)
signal.pause()
"""
    job = launch(python(program), "--grace=1s")
    job.wait_for_output("child")
    job.process.send_signal(signal.SIGTERM)
    assert job.wait() == 128 + signal.SIGKILL
    job.wait_until_all_are_gone()


DAEMON = """
import os, signal, subprocess, sys
child = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('child', flush=True); signal.pause()"
subprocess.Popen([sys.executable, "-c", child], start_new_session=True)
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        signal.pause()
    os._exit(0)
"""


def test_no_process_of_the_job_outlives_a_killed_launcher(launch: Launch) -> None:
    """This includes one in its own session, and an orphan that ignores signals."""
    job = launch(python(DAEMON + "signal.pause()"), "--grace=1s")
    job.wait_for_output("child")
    eventually(lambda: len(job.living()) == 5, 60, "launcher, guard, job, child and daemon")
    os.kill(job.process.pid, signal.SIGKILL)
    job.process.wait()
    job.wait_until_all_are_gone()


def test_a_killed_guard_fails_the_attempt_and_leaves_no_process(launch: Launch) -> None:
    """The next attempt starts without remains of the last one."""
    job = launch(python(DAEMON + "signal.pause()"), "--grace=1s", "--retries=0")
    job.wait_for_output("child")
    (guard,) = Path(f"/proc/{job.process.pid}/task/{job.process.pid}/children").read_text().split()
    os.kill(int(guard), signal.SIGKILL)
    assert job.wait() == 128 + signal.SIGKILL
    job.wait_until_all_are_gone()


def test_processes_that_outlive_the_job_are_killed(launch: Launch) -> None:
    """They would hold the GPUs or the port of the next attempt; zombies among them are reaped."""
    job = launch(python(DAEMON + "import time; time.sleep(1); sys.exit(5)"), "--grace=1s", "--retries=0")
    assert job.wait() == 5
    job.wait_until_all_are_gone()


def test_a_flood_of_output_is_forwarded_completely_and_stored_in_part(launch: Launch) -> None:
    """The disk does not fill up."""
    program = "import sys\nfor number in range(400_000): print(f'{number:015d}')"
    job = launch(python(program), "--log-size=1M")
    assert job.wait() == 0
    assert job.out.stat().st_size == 400_000 * 16
    kept = list(job.kept().path.glob("launcher-*.log*"))
    assert sum(file.stat().st_size for file in kept) <= 1 << 20
    assert job.kept().launcher(socket.gethostname()).read_text().endswith("000000000399999\n")


def test_unread_output_does_not_disturb_the_job(launch: Launch) -> None:
    """A pager was quit, or a terminal is closed."""
    job = launch(python("for number in range(50_000): print(number)"))
    assert job.wait() == 0
    closing = launch(["sh", "-c", "exec 1>&-; exit 0"])
    assert closing.wait() == 0


def test_a_command_that_cannot_be_started_is_reported(launch: Launch) -> None:
    """It has a shell's exit code, and no retry."""
    job = launch(["no-such-program"])
    assert job.wait() == 127
    assert "no-such-program cannot be started: No such file or directory" in job.printed()


def test_a_launch_without_a_command_shows_the_usage(launch: Launch) -> None:
    """The exit code is 2, as for wrong options."""
    job = launch([])
    assert job.wait() == 2
    assert "put it after --" in job.printed()


def test_a_launch_keeps_its_logs_next_to_those_of_the_one_before(launch: Launch) -> None:
    """Attempt numbers continue, so they are unique per job; the job finds its number and the directory."""
    program = python("import os; print(os.environ['TRAINMEDIC_ATTEMPT'], os.environ['TRAINMEDIC_LOG_DIR'])")
    for number in (1, 2):
        job = launch(program)
        assert job.wait() == 0
        printed = f"{number} {job.logs.parent}\n"
        assert job.out.read_text() == printed
        assert job.kept(number).launcher(socket.gethostname()).read_text() == printed
    assert job.kept(1).path.stat().st_mode & 0o777 == 0o700


def test_a_job_gets_no_log_directory_if_none_is_set(launch: Launch) -> None:
    """Whatever the environment says, nothing is stored."""
    program = python("import os; print(repr(os.environ['TRAINMEDIC_LOG_DIR']))")
    job = launch(program, "--log-dir=none", TRAINMEDIC_LOG_DIR="/elsewhere")
    assert job.wait() == 0
    assert job.out.read_text() == "''\n"
    assert not job.logs.parent.exists()


def test_an_unwritable_directory_does_not_prevent_a_job(launch: Launch) -> None:
    """The launcher reports it and forwards the output."""
    job = launch(python("print('runs')"), "--log-dir=/proc/nowhere")
    assert job.wait() == 0
    assert job.out.read_text() == "runs\n"
    assert "cannot store the job's output" in job.printed()


def test_a_job_runs_even_if_redis_is_unavailable(launch: Launch) -> None:
    """Nothing listens at the address; the launcher ends at most some seconds later."""
    job = launch(python("print('runs')"), "--job=llm-1", TRAINMEDIC_REDIS_URL="redis://127.0.0.1:1")
    assert job.wait() == 0
    assert job.out.read_text() == "runs\n"


def test_invalid_settings_do_not_prevent_a_job(launch: Launch) -> None:
    """The job itself will report them; the launcher reports what it does not do."""
    job = launch(python("print('runs')"), "--job=two words", TRAINMEDIC_REDIS_URL="http://example")
    assert job.wait() == 0
    assert "cannot report to the server" in job.printed()


_SAVES = """
import os, signal, subprocess, sys, time
def save(*_):
    print("saved", flush=True)
signal.signal(signal.SIGUSR1, save)
"""
_WORKS = """
while not os.path.exists("end"): time.sleep(0.02)
"""


@pytest.mark.parametrize("number", [signal.SIGUSR1, signal.SIGUSR2])
def test_a_signal_for_the_job_reaches_the_process_that_handles_it(
    launch: Launch, tmp_path: Path, number: signal.Signals
) -> None:
    """Schedulers send it before the time limit. The shell in between does not handle it, and would die of it."""
    inner = _SAVES.replace("SIGUSR1", number.name) + "print('ready', flush=True)" + _WORKS
    job = launch(["sh", "-c", f'"{sys.executable}" -c "$0"; exit $?', inner])
    job.wait_for_output("ready")
    job.process.send_signal(number)
    job.wait_for_output("saved")
    (tmp_path / "end").touch()
    (job.out.parent / "end").touch()
    assert job.wait() == 0
    assert job.out.read_text().split() == ["ready", "saved"]


def test_a_child_of_the_process_that_handles_a_signal_does_not_get_it(launch: Launch) -> None:
    """A forked loader worker inherits the handler of its parent."""
    program = _SAVES + "if os.fork() == 0: time.sleep(0.1)\nprint('ready', flush=True)" + _WORKS
    job = launch(python(program))
    eventually(lambda: job.printed().count("ready") == 2, PATIENCE, "both processes")
    job.process.send_signal(signal.SIGUSR1)
    job.wait_for_output("saved")
    (job.out.parent / "end").touch()
    assert job.wait() == 0
    assert job.out.read_text().count("saved") == 1


def test_an_unhandled_signal_does_not_end_the_job(launch: Launch) -> None:
    """The launcher reports that it did not forward it."""
    job = launch(python("import os, time\nprint('ready', flush=True)" + _WORKS))
    job.wait_for_output("ready")
    job.process.send_signal(signal.SIGUSR1)
    job.wait_for_output("SIGUSR1 was not passed on: no process of the job handles it")
    (job.out.parent / "end").touch()
    assert job.wait() == 0


def test_a_signal_to_every_process_of_the_job_arrives_once(launch: Launch) -> None:
    """``scancel --signal`` sends it to a whole job step: to the launcher, the guard and the job."""
    job = launch(python(_SAVES + "print('ready', flush=True)" + _WORKS))
    job.wait_for_output("ready")
    for pid in job.living():
        os.kill(pid, signal.SIGUSR1)
    job.wait_for_output("saved")
    time.sleep(1)  # a second one of the first sending would come within this time
    job.process.send_signal(signal.SIGUSR1)
    eventually(lambda: job.printed().count("saved") >= 2, PATIENCE, "the second signal")
    (job.out.parent / "end").touch()
    assert job.wait() == 0
    assert job.out.read_text().count("saved") == 2


def test_with_tty_the_job_prints_to_a_terminal_and_bytes_are_unchanged(launch: Launch) -> None:
    """Each stream is its own terminal, with the size that the environment states; the output is stored."""
    program = """
import os, sys
sys.stdout.write(f"{sys.stdout.isatty()} {os.get_terminal_size(1).columns}\\n")
sys.stderr.write(f"{sys.stderr.isatty()}\\n")
"""
    job = launch(python(program), "--tty", COLUMNS="97", LINES="31")
    assert job.wait() == 0
    assert job.out.read_bytes() == b"True 97\n"
    assert b"True\n" in job.err.read_bytes()
    kept = job.kept().launcher(socket.gethostname()).read_bytes()
    assert sorted(kept.splitlines()) == [b"True", b"True 97"]


def test_a_record_after_one_cut_off_by_a_full_disk_gets_its_own_line(
    launch: Callable[..., Launched], tmp_path: Path
) -> None:
    """Otherwise neither of them is readable."""
    file = tmp_path / "logs" / "job" / "attempts.jsonl"
    file.parent.mkdir(parents=True)
    file.write_text('{"attempt": 1, "cau')
    assert launch(["false"], "--retries=0").wait() == 1
    cut, whole = file.read_text().splitlines()
    assert (cut, json.loads(whole)["status"]) == ('{"attempt": 1, "cau', 1)


def test_a_job_is_restarted_whatever_it_prints_or_records(launch: Callable[..., Launched], tmp_path: Path) -> None:
    """Numbers of thousands of digits, deep JSON, a pipe in the place of a file: the launcher would end or wait by
    them."""
    program = tmp_path / "hostile.py"
    program.write_text(
        "import os, pathlib, sys, time\n"
        "attempt = int(os.environ['TRAINMEDIC_ATTEMPT'])\n"
        "file = pathlib.Path(os.environ['TRAINMEDIC_ATTEMPT_DIR']) / 'rank-0.json'\n"
        "os.mkfifo(file) if attempt == 1 else file.write_text('[' * 4000)\n"
        "time.sleep(1)\n"
        "number = '9' * 5000\n"
        "print(f'  rank : {number} (local_rank: 0)\\n  exitcode : {number} (pid: 1)', file=sys.stderr)\n"
        "sys.exit(3)\n"
    )
    launched = launch([sys.executable, program], "--retries=1", "--delay=0.1s")
    assert launched.wait() == 3
    assert [attempt["cause"] for attempt in launched.attempts()] == ["the job ended with exit code 3"] * 2
