"""How processes ended, from what launchers of different releases print."""

from __future__ import annotations

import json
import time
from datetime import UTC, datetime

import pytest

from trainmedic_logs.diagnosis import exits
from trainmedic_logs.diagnosis.exits import Exit
from trainmedic_logs.domain.finding import CauseClass

RECENT = """
============================================================
train.py FAILED
------------------------------------------------------------
Failures:
[1]:
  time      : 2025-05-21_15:43:05
  host      : train-worker-7
  rank      : 9 (local_rank: 1)
  exitcode  : -6 (pid: 14751) (SIGABRT)
  error_file: <N/A>
  traceback : Signal 6 (SIGABRT) received by PID 14751
------------------------------------------------------------
Root Cause (first observed failure):
[0]:
  time      : 2025-05-21_15:43:03
  host      : train-worker-7
  rank      : 8 (local_rank: 0)
  exitcode  : 1 (pid: 14750)
  error_file: /tmp/torchelastic_x/attempt_0/0/error.json
  traceback : Traceback (most recent call last):
    File "train.py", line 3, in main
      raise ValueError("no such shard")
  ValueError: no such shard

============================================================
"""
OF_2021 = """
***************************************
           train.py FAILED
=======================================
Root Cause:
[0]:
  time: 2021-07-28_11:03:18
  rank: 2 (local_rank: 2)
  exitcode: -9 (pid: 41)
  error_file: <N/A>
  msg: "Signal 9 (SIGKILL) received by PID 41"
=======================================
Other Failures:
[1]:
  time: 2021-07-28_11:03:19
  rank: 3 (local_rank: 3)
  exitcode: 1 (pid: 42)
  error_file: <N/A>
  msg: "Process failed with exitcode 1"
***************************************
"""


def test_a_recent_torchrun_table_states_its_ranks_and_the_first_failure() -> None:
    """It has ranks, signals, the node's clock, and the last line of a traceback."""
    second, first = exits.torchrun_table(RECENT)
    assert (first.rank, first.local_rank, first.code, first.signal, first.pid) == (8, 0, 1, None, 14750)
    assert first.is_first
    assert first.node == "train-worker-7"
    assert first.at == datetime(2025, 5, 21, 15, 43, 3, tzinfo=UTC)
    assert first.said == "ValueError: no such shard"
    assert (second.rank, second.signal, second.is_first, second.is_victims) == (9, 6, False, True)
    assert second.how == "SIGABRT"


def test_a_table_of_2021_has_the_first_failure_at_its_head() -> None:
    """torch 1.9 and 1.10 name the sections differently, and write no host and no blanks before the colons."""
    first, other = exits.torchrun_table(OF_2021, "node-1")
    assert (first.rank, first.signal, first.is_first, first.node) == (2, 9, True, "node-1")
    assert (other.rank, other.code, other.is_first) == (3, 1, False)


def test_a_table_without_its_head_is_read_as_far_as_possible() -> None:
    """Logs are cut; a block whose exit code is missing states nothing."""
    cut = "rank      : 4 (local_rank: 4)\nexitcode  : -9 (pid: 208585)\nerror_file: <N/A>\n"
    (found,) = exits.torchrun_table(cut)
    assert (found.rank, found.signal, found.is_first) == (4, 9, False)
    assert exits.torchrun_table("Root Cause (first observed failure):\n[0]:\n  rank : 4 (local_rank: 4)\n") == []
    (long,) = exits.torchrun_table(f"exitcode : {'9' * 5000} (pid: 4)\n")
    assert long.pid == 4


@pytest.mark.parametrize(
    ("line", "found"),
    [
        (
            "E0325 20:57:27.620000 2606 site-packages/torch/distributed/elastic/multiprocessing/api.py:869] "
            "failed (exitcode: -9) local_rank: 5 (pid: 2630) of binary: /opt/conda/bin/python",
            [("torchrun", None, 9, None, 5, "n1")],
        ),
        (
            "[2023-04-14 13:11:27,885] [ERROR] [launch.py:434:sigkill_handler] ['/usr/bin/python3', '-u', 'main.py', "
            "'--local_rank=7'] exits with return code = -9",
            [("deepspeed", None, 9, None, None, "n1")],
        ),
        (
            "subprocess.CalledProcessError: Command '['python', 'train.py']' returned non-zero exit status 137.",
            [("accelerate", 137, None, None, None, "n1")],
        ),
        (
            "subprocess.CalledProcessError: Command '['python', 'train.py']' died with <Signals.SIGSEGV: 11>.",
            [("accelerate", None, 11, None, None, "n1")],
        ),
        (
            "CalledProcessError: Command 'x' died with <Signals.set_wakeup_fd: 9>.",  # a name, but of no signal
            [("accelerate", None, None, None, None, "n1")],
        ),
        ("srun: error: Orion-18-69: task 289: Bus error", [("slurm", None, 7, 289, None, "Orion-18-69")]),
        ("srun: error: gpu20-15: task 0: Out Of Memory", [("slurm", None, 9, 0, None, "gpu20-15")]),
        (
            "srun: error: n2: tasks 1,4-5: Exited with exit code 1",
            [("slurm", 1, None, rank, None, "n2") for rank in (1, 4, 5)],
        ),
        ("srun: error: n2: task 3: Segmentation fault (core dumped)", [("slurm", None, 11, 3, None, "n2")]),
        ("srun: error: Unable to create step for job 7: Invalid", []),
        (
            "mpirun noticed that process rank 7 with PID 0 on node n3 exited on signal 9 (Killed).",
            [("mpirun", None, 9, 7, None, "n3")],
        ),
        (
            "CalledProcessError: Command '['python', " + "'--option', " * 100 + "'x']' died with <Signals.SIGBUS: 7>.",
            [("accelerate", None, 7, None, None, "n1")],
        ),
        ("ERROR:composer.cli.launcher:Rank 2 crashed with exit code -7.", [("launcher", None, 7, 2, None, "n1")]),
        ("composer: Global rank 9 (PID 4) exited with code 1", [("launcher", 1, None, 9, None, "n1")]),
        ("Process 3 exit with status code 1.", [("launcher", 1, None, 3, None, "n1")]),
        (
            "torch.multiprocessing.spawn.ProcessExitedException: process 1 terminated with signal SIGKILL",
            [("spawn", None, 9, None, 1, "n1")],
        ),
        ("Exception: process 0 terminated with exit code 3", [("spawn", 3, None, None, 0, "n1")]),
        (
            "Process finished with exit code 139 (interrupted by signal 11: SIGSEGV)",
            [("launcher", None, 11, None, None, "n1")],
        ),
        ("rank 2 exited with code names of its own", []),
        ("rank 3 exited with code 0", []),
        ("Process 0 exit with status code 0.", []),
        ("step 12 loss 1.5", []),
    ],
)
def test_a_launcher_line_states_which_process_ended_and_how(line: str, found: list[object]) -> None:
    """DeepSpeed prints the command of the last process it started, so that its rank is not taken for the failed
    one's."""
    told = exits.launcher_line(line, "n1")
    assert [(e.reporter, e.code, e.signal, e.rank, e.local_rank, e.node) for e in told] == found


def test_an_exit_code_of_a_shell_or_container_is_a_signal() -> None:
    """137 is 128 plus SIGKILL; Python reports it as -9."""
    assert exits.of_code(137) == exits.of_code(-9) == (None, 9)
    assert (exits.of_code(1), exits.of_code(0), exits.of_code(128)) == ((1, None), (0, None), (128, None))


def test_the_cause_that_an_exit_status_alone_proves() -> None:
    """A bare SIGKILL has no known cause: a person, a scheduler or the kernel may have sent it."""
    assert exits.meaning(Exit("x", signal=9))[0] is CauseClass.UNKNOWN
    assert exits.meaning(Exit("x", signal=11))[0] is CauseClass.CODE
    assert exits.meaning(Exit("x", signal=7))[0] is CauseClass.HOST_MEMORY
    assert exits.meaning(Exit("x", code=1))[0] is CauseClass.UNKNOWN
    assert exits.signal_name(63) == "signal 63"
    assert not Exit("x", code=0).is_failure


@pytest.mark.parametrize(
    ("said", "cause"),
    [
        ("KeyError: 'labels'", CauseClass.CODE),
        ("torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB", CauseClass.UNKNOWN),
        ("OSError: [Errno 28] No space left on device: '/ckpt/7.pt'", CauseClass.STORAGE),
        ("PIL.UnidentifiedImageError: cannot identify image file '7.jpg'", CauseClass.DATA),
        ("RuntimeError: expected scalar type Half but found Float", CauseClass.UNKNOWN),
        ("RuntimeError: Trying to backward through the graph a second time", CauseClass.CODE),
        # What a peer's end causes as well
        ("ConnectionResetError: [Errno 104] Connection reset by peer", CauseClass.UNKNOWN),
        ("torch.distributed.DistBackendError: NCCL error in: x.cpp:1, unhandled system error", CauseClass.UNKNOWN),
        ("RuntimeError: CUDA error: unspecified launch failure", CauseClass.UNKNOWN),
        ("Signal 9 (SIGKILL) received by PID 12", CauseClass.UNKNOWN),
        # The machine
        ("FileNotFoundError: [Errno 2] No such file or directory: '/dev/nvidia3'", CauseClass.UNKNOWN),
        ("AssertionError: GPU 3 is not visible", CauseClass.UNKNOWN),
        ("AssertionError", CauseClass.UNKNOWN),
    ],
)
def test_the_exception_in_an_exit_report_is_its_cause_if_no_peer_can_be(said: str, cause: CauseClass) -> None:
    assert exits.meaning(Exit("torchrun", code=1, said=said)) == (cause, said)


def test_a_torch_record_error_file_is_read() -> None:
    """The exception is timed by the clock of its node; a file of another form is not read as one."""
    more = {"py_callstack": "Traceback …\nValueError: x", "timestamp": "1758610505"}
    raw = json.dumps({"message": {"message": "ValueError: x", "extraInfo": more}}).encode()
    found = exits.error_file(raw, local_rank=2)
    assert found is not None
    assert (found.said, found.local_rank, found.at) == ("ValueError: x", 2, datetime.fromtimestamp(1758610505, UTC))
    assert exits.call_stack(raw).endswith("ValueError: x")
    text = exits.error_file(b'{"message": "Signal 9"}')
    assert text is not None
    assert text.said == "Signal 9"
    for other in (
        b"",
        b"[]",
        b"{}",
        b'{"message": 7}',
        b"[" * 100_000,
        b'{"message": {"extraInfo": {"timestamp": "x"}}}',
    ):
        assert exits.error_file(other) is None
        assert exits.call_stack(other) == ""


@pytest.mark.parametrize("start", ["srun: error: a: task 1: ", "CalledProcessError: Command ", "failed (exitcode: "])
def test_a_hostile_line_costs_little(start: str) -> None:
    """It has blanks, and words that nearly match, over the whole length that a line can have."""
    for filler in (" ", "returned non-zero exit status ", "task 1-9999999: "):
        line = start + filler * (8192 // len(filler))
        began = time.thread_time()
        exits.launcher_line(line)
        assert time.thread_time() - began < 0.05


@pytest.mark.parametrize(("number", "is_victims"), [(15, True), (2, True), (11, False)])
def test_a_terminated_launcher_is_no_failure_of_its_own(number: int, is_victims: bool) -> None:
    """torchrun then exits with 1, and leaves what ended it in its error file."""
    said = f"SignalException: Process 7931 got signal: {number}"
    assert Exit("error file", code=1, said=said).is_victims is is_victims


@pytest.mark.parametrize(
    ("line", "ended_by"),
    [
        ("      Exit Code:    137", [9]),
        ("command terminated with exit code 139", [11]),
        ('  "terminated": {"exitCode": 137, "reason": "Error", "finishedAt": "2025-06-24T01:18:28Z"}', [9]),
        ('{"exitCode":134}', [6]),
        # an exit code that is no signal, success, and a policy that only names one
        ("      Exit Code:    1", []),
        ("      Exit Code:    0", []),
        ("      Exit Code:    137 is retried", []),
        ("onExitCodes: {operator: In, values: [137]}", []),
    ],
)
def test_a_container_ended_by_a_signal_is_read_from_kubectl(line: str, ended_by: list[int]) -> None:
    """The forms are `describe`, `exec` and the status as JSON; only codes that mean a signal count."""
    assert [ended.signal for ended in exits.launcher_line(line)] == ended_by


@pytest.mark.parametrize("stated", ["253402300799", "-62135596800", "9" * 12, "9" * 30])
def test_an_error_file_may_state_any_time(stated: str) -> None:
    """A time that no clock shows is unknown; the exception counts."""
    written = {"message": {"message": "ValueError: x", "extraInfo": {"timestamp": stated}}}
    ended = exits.error_file(json.dumps(written).encode())
    assert ended is not None
    assert (ended.said, ended.at) == ("ValueError: x", None)
