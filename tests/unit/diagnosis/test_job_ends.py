"""Ends of whole jobs as batch systems and tools print them, and what an epilogue says about an exception before it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from trainmedic_logs.diagnosis import exits
from trainmedic_logs.folder_diagnosis import diagnose_folder
from trainmedic_logs.rules import log_rule_roots
from trainmedic_logs.rules.log_rule_library import LogRuleLibrary

TRACEBACK = """Traceback (most recent call last):
  File "/home/user/main.py", line 92, in <module>
    model = torch_geometric.compile(model)
NameError: name 'torch_geometric' is not defined
"""
# LSF's report below a job's output, of MrCogito/Deep_learning_2023
EPILOGUE = """
------------------------------------------------------------
Sender: LSF System <lsfadmin@hpc.dtu.dk>
Subject: Job 19574338: <LossFix2_0> in cluster <dcc> Exited

Job was executed on host(s) <4*n-62-18-9>, in queue <gpua100>, as user <user> in cluster <dcc>
</home/user> was used as the home directory.
Started at Tue Nov 28 04:21:04 2023
Terminated at Tue Nov 28 04:22:35 2023
Results reported at Tue Nov 28 04:22:35 2023

Your job looked like:
# LSBATCH: User input
#BSUB -q gpua100
#BSUB -n 4
#BSUB -W 1440
python main.py $MYARGS

"""


def cause_of(text: str, directory: Path) -> tuple[str, str]:
    (directory / "train.log").write_text(text)
    library = LogRuleLibrary([log_rule_roots.shipped()])
    library.reload()
    verdict = diagnose_folder(directory, library.rule_set).attempts[-1].verdict
    return str(verdict.cause), str(verdict.confidence)


@pytest.mark.parametrize(
    ("line", "code", "by_signal"),
    [
        ("Exited with exit code 1.", 1, None),
        ("Exited with exit code 137.", None, 9),
        ("Exited by signal 11.", None, 11),
        ("Exit_status=271", 271, None),
        ("State: FAILED (exit code 1)", 1, None),
        ("train-1 exited with code 139", None, 11),
        ("ERROR: Job failed: command terminated with exit code 1", 1, None),
        ("##[error]Process completed with exit code 2.", 2, None),
        ("Command exited with non-zero status 1", 1, None),
        ("Command terminated by signal 9", None, 9),
        ("train.service: Main process exited, code=exited, status=1/FAILURE", 1, None),
        ("train.service: Main process exited, code=killed, status=9/KILL", None, 9),
        ("make: *** [Makefile:12: train] Error 1", 1, None),
        ("command terminated with exit code 1", 1, None),
        ("Successfully completed.", 0, None),
    ],
)
def test_a_tool_reports_how_the_job_ended(line: str, code: int | None, by_signal: int | None) -> None:
    (ended,) = exits.launcher_line(line)
    assert (ended.code, ended.signal, ended.rank) == (code, by_signal, None)


@pytest.mark.parametrize(
    "line",
    [
        "Exited with exit code 0.",
        "the script exited with code 3 in an earlier test of this pipeline",
        "Successfully completed. Next: evaluation",
        "make: Nothing to be done for 'default'.",
        "Sandbox: sample 3 exited with exit code 1",
    ],
)
def test_other_lines_report_no_end_of_the_job(line: str) -> None:
    assert exits.launcher_line(line) == []


def test_a_report_below_the_output_does_not_show_that_an_exception_was_caught(tmp_path: Path) -> None:
    """The program's exception is the cause, although many ordinary lines follow it."""
    text = TRACEBACK + EPILOGUE + "Exited with exit code 1.\n"
    assert cause_of(text, tmp_path)[0] == "code"


def test_a_completed_job_did_not_fail_by_a_caught_exception(tmp_path: Path) -> None:
    assert cause_of(TRACEBACK + EPILOGUE + "Successfully completed.\n", tmp_path) == ("unknown", "low")


@pytest.mark.parametrize("reason", ["", " DUE TO TIME LIMIT"])
def test_srun_s_notice_does_not_hide_the_line_that_states_the_end(reason: str, tmp_path: Path) -> None:
    notice = "srun: Job step aborted: Waiting up to 62 seconds for job step to finish.\n"
    ended = f"slurmstepd: error: *** STEP 1809577.0 ON r6i5n1 CANCELLED AT 2021-05-23T08:46:02{reason} ***\n"
    assert cause_of(notice + ended, tmp_path) == ("preemption", "high" if reason else "medium")


def test_srun_s_notice_alone_states_no_reason(tmp_path: Path) -> None:
    failed = "srun: error: n1: task 3: Exited with exit code 1\nsrun: Job step aborted: Waiting up to 62 seconds\n"
    assert cause_of(failed, tmp_path)[0] == "unknown"


def test_a_kernel_s_oom_kill_beside_the_shell_s_report_is_the_cause(tmp_path: Path) -> None:
    killed = "/pai/docker_bootstrap.sh: line 159:   943 Killed                  /usr/bin/python3 train.py\n"
    kernel = "[Thu Aug 16 09:05:19 2018] Memory cgroup out of memory: Kill process 17811 ({name}) score 1994"
    kernel += " or sacrifice child\n"
    assert cause_of(killed + kernel.format(name="python3"), tmp_path) == ("host_memory", "medium")
    assert cause_of(killed + kernel.format(name="chrome"), tmp_path)[0] == "unknown"


def test_frames_of_a_c_crash_behind_an_unknown_prefix_do_not_show_that_the_program_went_on(tmp_path: Path) -> None:
    lines = ["Traceback (most recent call last):", '  File "/a/train.py", line 3, in <module>', "    loss.backward()"]
    lines += ["RuntimeError: CUDA error: uncorrectable ECC error encountered"]
    lines += [f"frame #{n}: <unknown function> + 0x110b7c (0x56434fc53b7c in /opt/python)" for n in range(20)]
    assert cause_of("".join(f"node7: {line}\n" for line in lines), tmp_path)[0] == "gpu"


@pytest.mark.parametrize("prefix", ["704.7s\t{n}\t", "{n}\t", "1770000000{n:03}\t", "000{n:03}   ", "45{n:03}: "])
def test_numbered_lines_are_read_without_their_numbers(prefix: str, tmp_path: Path) -> None:
    text = "".join(prefix.format(n=n + 90) + line + "\n" for n, line in enumerate(TRACEBACK.splitlines()))
    assert cause_of(text, tmp_path)[0] == "code"


def test_a_framed_traceback_in_a_log_store_s_export_is_read(tmp_path: Path) -> None:
    lines = ["╭──── Traceback (most recent call last) ────╮", "│ /app/train.py:395 in step               │"]
    lines += ["╰─────────────────────────────────────────╯", "NameError: name 'loss' is not defined"]
    text = "".join(json.dumps({"labels": {"pod": "llm-0"}, "line": line}) + "\n" for line in lines)
    assert cause_of(text, tmp_path)[0] == "code"


def test_a_message_behind_a_progress_bar_is_read(tmp_path: Path) -> None:
    bar = "  0%|          | 6/1281167 [00:00<11:48:39, 30.13it/s]"
    assert cause_of(f"{bar}Fatal Python error: Segmentation fault\n", tmp_path)[0] == "code"
    assert cause_of(f"{bar}[rank 0] ok\n", tmp_path)[0] == "unknown"
