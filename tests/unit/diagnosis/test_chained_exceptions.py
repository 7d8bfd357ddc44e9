"""Verdicts on exceptions that are not what they seem: chains, groups, executed code, assertions, other ends."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.log_rules import shipped
from trainmedic_logs.diagnosis.verdict import Confidence, Verdict
from trainmedic_logs.domain.finding import CauseClass
from trainmedic_logs.folder_diagnosis import diagnose_folder

OWN = 'Traceback (most recent call last):\n  File "/home/ada/run.py", line 31, in <module>\n    work()\n'
SHOWN = "    work()\n"
DIRECT = "\nThe above exception was the direct cause of the following exception:\n\n"
DURING = "\nDuring handling of the above exception, another exception occurred:\n\n"
TIME_LIMIT = "slurmstepd: error: *** JOB 71 ON gpu-3 CANCELLED AT 2026-02-03T04:05:06 DUE TO TIME LIMIT ***\n"


def verdict_on(directory: Path, log: str) -> Verdict:
    """The verdict on a job with this log."""
    (directory / "train.log").write_text(log, encoding="utf-8")
    return diagnose_folder(directory, shipped()).attempts[-1].verdict


@pytest.mark.parametrize("link", [DIRECT, DURING])
@pytest.mark.parametrize(
    ("first", "cause"),
    [
        ("ConnectionResetError: [Errno 104] Connection reset by peer", CauseClass.NETWORK),
        ("httpx.ReadTimeout: timed out", CauseClass.NETWORK),
        ("zipfile.BadZipFile: File is not a zip file", CauseClass.DATA),
    ],
)
@pytest.mark.parametrize("last", ["KeyError: 'answer'", "NameError: name 'log' is not defined"])
def test_an_error_while_handling_another_is_not_the_cause(
    first: str, cause: CauseClass, last: str, link: str, tmp_path: Path
) -> None:
    """The verdict names the exception that came first, and shows its line."""
    verdict = verdict_on(tmp_path, f"{OWN}{first}\n{link}{OWN}{last}\n")
    assert verdict.cause is cause
    assert verdict.confidence is not Confidence.HIGH
    assert first in verdict.summary


def test_a_chain_of_program_errors_is_attributed_to_the_program(tmp_path: Path) -> None:
    verdict = verdict_on(tmp_path, f"{OWN}KeyError: 'size'\n{DURING}{OWN}TypeError: unsupported operand\n")
    assert (verdict.cause, verdict.confidence) == (CauseClass.CODE, Confidence.HIGH)


def test_an_exception_from_a_task_group_is_read(tmp_path: Path) -> None:
    group = (
        "  + Exception Group Traceback (most recent call last):\n"
        '  |   File "/home/ada/run.py", line 31, in <module>\n'
        "  | ExceptionGroup: unhandled errors in a TaskGroup (1 sub-exception)\n"
        "  +-+---------------- 1 ----------------\n"
        "    | Traceback (most recent call last):\n"
        '    |   File "/home/ada/run.py", line 12, in ask\n'
        "    | ConnectionRefusedError: [Errno 111] Connect call failed ('10.7.0.2', 8000)\n"
        "    +------------------------------------\n"
    )
    verdict = verdict_on(tmp_path, group)
    assert verdict.cause is CauseClass.NETWORK
    assert verdict.summary == (
        "Probably the network failed: ConnectionRefusedError: [Errno 111] Connect call failed ('10.7.0.2', 8000)."
    )


@pytest.mark.parametrize(
    ("path", "confidence"),
    [("<string>", Confidence.LOW), ("/tmp/tmpx3k_9ab2/answer.py", Confidence.MEDIUM)],
)
def test_code_executed_from_a_string_or_a_temporary_file_is_no_proof(
    path: str, confidence: Confidence, tmp_path: Path
) -> None:
    """Reward functions execute what a model has written; its failure ends nothing."""
    place = f'Traceback (most recent call last):\n  File "{path}", line 4, in <module>\n'
    answer = f"{place}NameError: name 'n' is not defined\n"
    assert verdict_on(tmp_path, f"step 10 reward 0.1\n{answer}").confidence is confidence


def test_an_exception_in_a_job_that_hit_its_time_limit_is_not_certain(tmp_path: Path) -> None:
    """The exception ended nothing, or left other ranks waiting."""
    alone = f"step 10 loss 2.1\n{OWN}TypeError: unsupported operand\n"
    assert verdict_on(tmp_path, alone).confidence is Confidence.HIGH
    assert verdict_on(tmp_path, alone + TIME_LIMIT).confidence is not Confidence.HIGH


@pytest.mark.parametrize(
    "end",
    [
        "    check()\nAssertionError: expected 4 GPUs, found 3",
        "    assert torch.cuda.is_available()\nAssertionError",
        "    assert os.path.exists(args.data)\nAssertionError",
        "    check()\nAssertionError: only 31 of 32 workers connected",
    ],
)
def test_an_assertion_about_the_machine_is_no_proof_against_the_program(end: str, tmp_path: Path) -> None:
    assert verdict_on(tmp_path, f"{OWN.removesuffix(SHOWN)}{end}\n").confidence is not Confidence.HIGH


def test_an_assertion_about_numbers_is_attributed_to_numbers(tmp_path: Path) -> None:
    """The traceback shows what was checked where the message is empty."""
    checked = OWN.replace("work()", "assert torch.isfinite(loss).all()")
    assert verdict_on(tmp_path, f"{checked}AssertionError\n").cause is CauseClass.NUMERICS


def test_an_assertion_about_the_program_is_proof(tmp_path: Path) -> None:
    verdict = verdict_on(tmp_path, f"{OWN}AssertionError: hidden size 96 is not divisible by 7 heads\n")
    assert (verdict.cause, verdict.confidence) == (CauseClass.CODE, Confidence.HIGH)


@pytest.mark.parametrize(
    "line",
    [
        "RuntimeError: NCCL error: unhandled system error (run with NCCL_DEBUG=INFO for details)",
        "RuntimeError: Executor failed.",
    ],
)
def test_a_consequential_error_names_no_cause(line: str, tmp_path: Path) -> None:
    assert verdict_on(tmp_path, f"{OWN}{line}\n").cause is CauseClass.UNKNOWN


def test_a_quoted_device_error_is_not_high_confidence(tmp_path: Path) -> None:
    """A model may have written it."""
    line = "RuntimeError: CUDA error: uncorrectable ECC error encountered"
    assert verdict_on(tmp_path, f"{OWN}{line}\n").confidence is Confidence.HIGH
    assert verdict_on(tmp_path, f"answer 2: '{line}'\n").confidence is not Confidence.HIGH


def test_a_large_loss_that_falls_is_not_high_confidence(tmp_path: Path) -> None:
    """It may be a sum over the samples."""
    log = "".join(f"step {step} loss: {90000 - step * 30}.0\n" for step in range(30))
    assert verdict_on(tmp_path, log).confidence is not Confidence.HIGH


def test_a_loss_that_becomes_finite_again_lowers_the_confidence_in_an_explosion(tmp_path: Path) -> None:
    """The trainer may have skipped the step."""
    exploded = "step 8 loss 2.2\nstep 9 loss nan\n"
    assert verdict_on(tmp_path, exploded).confidence is Confidence.HIGH
    later = "".join(f"step {step} loss 2.1\n" for step in range(10, 30))
    assert verdict_on(tmp_path, exploded + later).confidence is not Confidence.HIGH


@pytest.mark.parametrize(
    ("last", "cause", "confidence"),
    [
        ("MemoryError", CauseClass.HOST_MEMORY, Confidence.HIGH),
        ("MemoryError: out of host memory", CauseClass.HOST_MEMORY, Confidence.MEDIUM),
        ("MemoryError: Allocation of 3.1 GB failed on AMD", CauseClass.CODE, Confidence.MEDIUM),
    ],
)
def test_a_memory_error_is_attributed_to_the_machine_if_it_states_it(
    last: str, cause: CauseClass, confidence: Confidence, tmp_path: Path
) -> None:
    """Python's own has no message. GPU allocators raise the class too."""
    verdict = verdict_on(tmp_path, f"step 10 loss 2.1\n{OWN}{last}\n")
    assert (verdict.cause, verdict.confidence) == (cause, confidence)


def test_words_about_the_machine_do_not_prove_a_program_fault(tmp_path: Path) -> None:
    """What proves a full memory proves nothing for a line that is read as the program's."""
    verdict = verdict_on(tmp_path, f"step 10 loss 2.1\n{OWN}ValueError: it says 'bad_alloc'\n")
    assert verdict.confidence is not Confidence.HIGH
