"""Jobs in which nothing failed, as a folder of their logs tells it: ended, slow, or with an earlier failed attempt."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.unit.diagnosis.test_folder import RAISED, diagnosed, write
from trainmedic_logs.domain.finding import CauseClass

STEP = '{"ts": "2025-01-21T04:41:40Z", "event": "step", "step": 5, "rank": 0, "loss": 2.0, "node": "node-1"}\n'
END = '{"ts": "2025-01-21T04:41:50Z", "event": "end", "step": 9, "rank": 0, "node": "node-1"}\n'
HUNG = {"attempt": 1, "cause": "the job hung", "status": 0, "error": "hang", "rank": None, "step": 24}
KILLED = {"attempt": 1, "cause": "rank 1 was ended by SIGKILL", "status": -9, "error": "", "rank": 1, "step": 24}


def test_a_rank_that_finished_has_no_failure(tmp_path: Path) -> None:
    """This holds whatever it printed before."""
    place = write(
        tmp_path, **{"llm-1__attempt-1__rank-0.jsonl": STEP + END, "llm-1__attempt-1__launcher-n.log": RAISED}
    )
    verdict = diagnosed(place).attempts[-1].verdict
    assert (verdict.cause, verdict.advice) == (CauseClass.UNKNOWN, "none")
    assert "Nothing failed" in verdict.summary


def test_a_launcher_record_of_an_attempt_applies_only_to_that_attempt(tmp_path: Path) -> None:
    """The first hung; nothing states that the second, or another job, failed."""
    files = {
        "llm-1__attempts.jsonl": json.dumps(HUNG) + "\n",
        "llm-1__attempt-1__rank-0.jsonl": STEP,
        "llm-1__attempt-2__rank-0.jsonl": STEP,
        "llm-2__attempt-1__rank-0.jsonl": STEP,
    }
    place = write(tmp_path, **files)
    for job in ("llm-1", "llm-2"):
        verdict = diagnosed(place, job).attempts[-1].verdict
        assert (verdict.cause, verdict.advice) == (CauseClass.UNKNOWN, "none"), job


def test_the_launchers_view_of_how_an_attempt_ended_counts(tmp_path: Path) -> None:
    """It counts where no log of the attempt states more."""
    files = {"llm-1__attempts.jsonl": json.dumps(KILLED) + "\n", "llm-1__attempt-1__launcher-n.log": "loading\n"}
    verdict = diagnosed(write(tmp_path, **files)).attempts[-1].verdict
    assert (verdict.cause, verdict.confidence, verdict.ranks) == (CauseClass.UNKNOWN, "low", (1,))


def test_slow_data_loading_is_detected_in_a_trainers_own_log(tmp_path: Path) -> None:
    """Steps are fast at first; then data take 8 s of each 9 s step."""
    line = "Epoch: [1][{}/5005]\tTime {} (0.3)\tData {} (0.2)\tLoss 1.2 (1.3)\n"
    log = "".join(line.format(at, "0.170", "0.045") for at in range(0, 100, 20))
    log += "".join(line.format(at, "9.051", "8.843") for at in range(100, 220, 20))
    verdict = diagnosed(write(tmp_path, **{"train.log": log})).attempts[-1].verdict
    assert (verdict.cause, verdict.shares and verdict.shares["data"] > 0.9) == (CauseClass.DATA, True)


def test_a_rising_loss_is_a_hint(tmp_path: Path) -> None:
    """A loss that has come down again is none."""
    form = " iteration {}/ 500 | consumed samples: 8 | lm loss: {}E+00 |\n"
    steps = [form.format(at, loss) for at, loss in enumerate((3, 2, 9))]
    verdict = diagnosed(write(tmp_path, **{"train.log": "".join(steps)})).attempts[-1].verdict
    assert (verdict.cause, verdict.confidence, verdict.advice) == (CauseClass.NUMERICS, "low", "ask")
    down = form.format(4, 2)
    verdict = diagnosed(write(tmp_path, **{"train.log": "".join(steps) + down})).attempts[-1].verdict
    assert verdict.cause is CauseClass.UNKNOWN


def steps_of(rates: list[float], between: str = "") -> str:
    """A log of steps with their throughput; `between` stands before the last six, which prove that it went on."""
    lines = [f"step {at}: loss=2.1, lr=1e-4, tok/sec: {rate}\n" for at, rate in enumerate(rates)]
    return "".join(lines[:-6]) + between + "".join(lines[-6:])


@pytest.mark.parametrize(
    ("between", "cause"),
    [("", CauseClass.DATA), ("NCCL timeout: unhandled system error\n", CauseClass.NETWORK)],
)
def test_a_drop_in_throughput_is_a_hint_next_to_timeouts(tmp_path: Path, between: str, cause: CauseClass) -> None:
    """The job continues. It is never more than a hint, because neither proves anything."""
    log = steps_of([5000.0 + at % 7 for at in range(60)] + [2100.0] * 8, between)
    verdict = diagnosed(write(tmp_path, **{"train.log": log})).attempts[-1].verdict
    assert (verdict.cause, verdict.confidence, verdict.advice) == (cause, "low", "ask")
    assert "a hint" in verdict.summary
    assert verdict.fingerprint.startswith("slow:")


@pytest.mark.parametrize(
    "rates",
    [
        [5000.0 + at % 7 for at in range(60)],
        [5000.0] * 60 + [2100.0] * 3 + [5000.0] * 5,
        [2000.0] * 5 + [5000.0] * 60,
        [5000.0 if at % 2 else 2000.0 for at in range(60)],
        [5000.0] * 8,
    ],
)
def test_a_throughput_that_did_not_drop_is_no_hint(tmp_path: Path, rates: list[float]) -> None:
    """It is steady, recovered, slow at its start, noisy, or too short to judge."""
    verdict = diagnosed(write(tmp_path, **{"train.log": steps_of(rates)})).attempts[-1].verdict
    assert (verdict.cause, verdict.advice) == (CauseClass.UNKNOWN, "none")


def test_own_waiting_times_take_precedence_over_timeouts(tmp_path: Path) -> None:
    """A trainer that states how long it waits for data says more than a timeout next to it."""
    slow = "".join(f"Epoch: [1][{at}/99] Time  8.70 ( 8.2) Data  8.60 ( 8.1) Loss 1.2 (1.1)\n" for at in range(30))
    log = slow + "NCCL timeout: unhandled system error\n" + slow.replace("Epoch: [1]", "Epoch: [2]")
    verdict = diagnosed(write(tmp_path, **{"train.log": log})).attempts[-1].verdict
    assert (verdict.cause, verdict.confidence) == (CauseClass.DATA, "medium")


@pytest.mark.parametrize("is_well_again", [False, True])
def test_a_job_that_ended_with_a_non_finite_loss_is_reported(tmp_path: Path, *, is_well_again: bool) -> None:
    """Nothing failed, and the model is useless. A loss that became finite again is not mentioned."""
    lost = STEP.replace('"loss": 2.0', '"loss": "NaN"')
    after = "".join(
        STEP.replace("04:41:40", f"04:4{minute}:00").replace('"step": 5', f'"step": {minute}') for minute in range(2, 9)
    )
    records = STEP + lost * 3 + (after if is_well_again else "") + END.replace("04:41:50", "04:50:00")
    verdict = diagnosed(write(tmp_path, **{"llm-1__attempt-1__rank-0.jsonl": records})).attempts[-1].verdict
    if is_well_again:
        assert verdict.summary.startswith("Nothing failed")
    else:
        assert (verdict.cause, verdict.ranks, verdict.advice) == (CauseClass.NUMERICS, (0,), "ask")
        assert verdict.summary.startswith("The job ended without an error, but its numbers were wrong until its end")


@pytest.mark.parametrize(
    "end",
    [
        "rank 3 exited with code 0",
        "Process 0 exit with status code 0.",
        "(launcher) Global rank 2 (PID 44) exited with code 0",
        "[2025-01-21 04:41:44,183] [INFO] [launch.py:347:main] Process 2631 exits successfully.",
        '{"ts": "2025-01-21T04:41:50Z", "event": "end", "step": 9, "rank": 3, "node": "node-1"}',
    ],
)
@pytest.mark.parametrize(
    ("failure", "cause"),
    [
        ("IndexError: list index out of range", CauseClass.CODE),
        ("OSError: [Errno 28] No space left on device: '/data/7.pt'", CauseClass.STORAGE),
        ("RuntimeError: CUDA error: unspecified launch failure", CauseClass.GPU),
        (
            "[E1120 10:00:00.0 ProcessGroupNCCL.cpp:616] [Rank 1] Watchdog caught collective operation timeout: "
            "WorkNCCL(SeqNum=12, OpType=ALLREDUCE, Timeout(ms)=600000) ran for 600010 milliseconds before timing out.",
            CauseClass.HANG,
        ),
    ],
)
def test_the_success_of_one_process_hides_no_failure(failure: str, cause: CauseClass, end: str, tmp_path: Path) -> None:
    log = f"step 100 loss 2.1\nstep 200 loss 2.0\n[rank1]: {failure}\n{end}\n"
    assert diagnosed(write(tmp_path, **{"train.log": log})).attempts[-1].verdict.cause is cause
