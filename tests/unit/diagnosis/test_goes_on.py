"""A caught exception, more steps, and then a hang: nobody blames the exception, whichever trainer prints the steps."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest

from tests.unit.diagnosis.test_folder import diagnosed
from tests.unit.logs.test_progress import NAMES, TRAINERS, step_line
from trainmedic_logs.domain.finding import CauseClass

RAISED = [
    "Traceback (most recent call last):",
    '  File "/app/train.py", line 214, in evaluate',
    "    scores = scorer(batch)",
    "TypeError: scorer() missing 1 required positional argument: 'labels'",
]
HANG = (
    "[rank{0}]:[E ProcessGroupNCCL.cpp:616] [Rank {0}] Watchdog caught collective operation "
    "timeout: WorkNCCL(SeqNum=28956, OpType=ALLREDUCE, NumelIn=1, NumelOut=1, Timeout(ms)=600000) ran for 600003 "
    "milliseconds before timing out."
)


def steps(form: str, first: int, last: int) -> list[str]:
    """Those steps, each in one line."""
    return [step_line(form, number) for number in range(first, last + 1)]


def written(directory: Path, lines: list[str]) -> Path:
    """One log without any time that is sure."""
    (directory / "train.log").write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    return directory


@pytest.mark.parametrize("trainer", TRAINERS, ids=NAMES)
def test_a_caught_exception_is_not_blamed_for_a_hang(trainer: Mapping[str, str], tmp_path: Path) -> None:
    """The hang comes twenty steps later."""
    form = trainer["line"]
    log = [*steps(form, 10, 30), *RAISED, *steps(form, 31, 50), HANG.format(0), HANG.format(1)]
    assert diagnosed(written(tmp_path, log)).attempts[-1].verdict.cause is CauseClass.HANG


@pytest.mark.parametrize("trainer", TRAINERS, ids=NAMES)
def test_an_exception_that_ended_the_job_is_blamed(trainer: Mapping[str, str], tmp_path: Path) -> None:
    """It is the same exception, as the last line."""
    log = [*steps(trainer["line"], 10, 30), *RAISED]
    assert diagnosed(written(tmp_path, log)).attempts[-1].verdict.cause is CauseClass.CODE


@pytest.mark.parametrize("trainer", TRAINERS, ids=NAMES)
def test_a_job_that_steps_has_no_failure(trainer: Mapping[str, str], tmp_path: Path) -> None:
    """It has printed an NCCL timeout, which was caught, and continues."""
    form = trainer["line"]
    log = [*steps(form, 10, 30), HANG.format(0), *steps(form, 31, 50)]
    verdict = diagnosed(written(tmp_path, log)).attempts[-1].verdict
    assert (verdict.cause, verdict.advice) == (CauseClass.UNKNOWN, "none")


@pytest.mark.parametrize("drawn", ["\r{}", "{}\r"])
@pytest.mark.parametrize(
    "bar",
    [
        " {0}%|███       | {0}/1000 [00:{0}<10:00,  1.02it/s]",
        "Epoch 0:  {0}%|█    | {0}/500 [00:{0}<01:00,  9.1it/s, v_num=0, train_loss=2.3]",
        "{0}/500 [=====>........................] - ETA: 3s - loss: 2.3",
    ],
    ids=["tqdm", "Lightning", "Keras"],
)
def test_a_progress_bar_redrawn_in_one_line_is_many_steps(bar: str, drawn: str, tmp_path: Path) -> None:
    """The line shows the last state alone, and has not ended."""
    before, after = ("".join(drawn.format(bar.format(i)) for i in part) for part in (range(10, 30), range(30, 50)))
    raised = "\n".join([*RAISED, HANG.format(0)])
    (tmp_path / "train.log").write_bytes(f"{before}\n{raised}\n{after}".encode())
    verdict = diagnosed(tmp_path).attempts[-1].verdict
    assert (verdict.cause, verdict.advice) == (CauseClass.UNKNOWN, "none")


def test_a_progress_bar_that_ends_with_the_program_is_no_step(tmp_path: Path) -> None:
    """It is drawn once more as it is closed."""
    bars = "".join(f"\r {i}%|███       | {i}/1000 [00:{i}<10:00,  1.02it/s]" for i in range(10, 30))
    closed = "\r 29%|███       | 29/1000 [00:29<10:00,  1.02it/s]"
    (tmp_path / "train.log").write_bytes("\n".join([bars, *RAISED, closed, ""]).encode())
    assert diagnosed(tmp_path).attempts[-1].verdict.cause is CauseClass.CODE


FULL = "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 79.10 GiB"


@pytest.mark.parametrize(
    "told",
    [
        "Batch size 128 failed, trying batch size 96",
        "Decreasing batch size to: 64.",
        "CUDA out of memory detected. Train microbatch size will be decreased from 8 -> 4.",
        "| WARNING: ran out of memory, retrying batch",
    ],
)
def test_an_oom_that_a_smaller_batch_fixed_is_not_blamed(told: str, tmp_path: Path) -> None:
    """The later exception is blamed; a second full GPU is blamed again."""
    for last, cause in ((RAISED, CauseClass.CODE), ([FULL], CauseClass.GPU_MEMORY)):
        verdict = diagnosed(written(tmp_path, [FULL, told, *last])).attempts[-1].verdict
        assert verdict.cause is cause


@pytest.mark.parametrize("told", ["Try decreasing batch size to 8", "Consider retrying with a smaller batch size."])
def test_an_advised_smaller_batch_did_not_help(told: str, tmp_path: Path) -> None:
    """The full GPU ended the job."""
    assert diagnosed(written(tmp_path, [FULL, told])).attempts[-1].verdict.cause is CauseClass.GPU_MEMORY
