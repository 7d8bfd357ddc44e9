"""Verdicts on logs in which one line seems to be the reason, and another one is, or none."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.unit.diagnosis.test_chained_exceptions import DURING, OWN, SHOWN, verdict_on
from trainmedic_logs.diagnosis.verdict import Advice, Confidence
from trainmedic_logs.domain.finding import CauseClass

BEFORE = "".join(f"step {step} loss 2.3\n" for step in range(10))
OUT_OF_MEMORY = "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB\n"
TIMED_OUT = "requests.exceptions.ReadTimeout: timed out\n"
WRONG_CALL = "TypeError: f() missing 1 required positional argument: 'x'\n"


def test_one_non_finite_loss_before_many_finite_ones_is_no_failure(tmp_path: Path) -> None:
    """The log has no times. A model with non-finite weights does not recover."""
    after = "".join(f"step {step} loss 2.1\n" for step in range(11, 31))
    verdict = verdict_on(tmp_path, f"{BEFORE}step 10 loss nan\n{after}")
    assert (verdict.cause, verdict.advice) == (CauseClass.UNKNOWN, Advice.NONE)


@pytest.mark.parametrize(
    "skipped",
    [
        "step 10 loss inf\n[WARNING] OVERFLOW! Rank 0 Skipping step. Attempted loss scale: 65536, reducing to 32768\n",
        "grad norm is inf, step skipped\nstep 10 | grad_norm: inf | loss: 2.0\n",
        "Gradient overflow.  Skipping step, loss scaler 0 reducing loss scale\nstep 10 loss 2.0 grad_norm nan\n",
    ],
)
@pytest.mark.parametrize(
    ("end", "cause"),
    [(OUT_OF_MEMORY, CauseClass.GPU_MEMORY), (TIMED_OUT, CauseClass.NETWORK), (WRONG_CALL, CauseClass.CODE)],
)
def test_a_step_that_the_loss_scaler_skipped_is_not_the_cause(
    skipped: str, end: str, cause: CauseClass, tmp_path: Path
) -> None:
    assert verdict_on(tmp_path, f"{BEFORE}{skipped}{OWN}{end}").cause is cause


@pytest.mark.parametrize(
    "announced",
    ["WARNING skipping bad sample 17\n", "error in sample 17, skipping:\n", "record 3 is broken and was ignored\n"],
)
def test_an_exception_after_which_the_program_says_that_it_continues_is_a_hint(announced: str, tmp_path: Path) -> None:
    """This holds at the end of a log, too."""
    assert verdict_on(tmp_path, f"{BEFORE}{announced}{OWN}KeyError: 'image'\n").confidence is Confidence.LOW
    alike = f"{BEFORE}Resuming from step 10, skipping the warmup\n{OWN}{WRONG_CALL}"
    assert verdict_on(tmp_path, alike).confidence is Confidence.HIGH


@pytest.mark.parametrize(
    "quoted",
    [
        "sample 3: The log said training hang detected and the job was restarted.\n",
        'completion: "I think a training hang detected here means that rank 3 is stuck."\n',
        'he wrote "rank 3 is stuck in all_reduce" twice\n',
    ],
)
def test_a_text_about_a_hang_is_no_hang(quoted: str, tmp_path: Path) -> None:
    assert verdict_on(tmp_path, f"{BEFORE}{quoted}").cause is CauseClass.UNKNOWN
    assert verdict_on(tmp_path, f"{BEFORE}ERROR training hang detected\n").cause is CauseClass.HANG


@pytest.mark.parametrize(
    ("line", "cause"),
    [
        ("run.sh: line 12: torchrun: command not found", CauseClass.CODE),
        ("ssh: connect to host gpu-3 port 22: No route to host", CauseClass.NETWORK),
        ("fatal: unable to access 'https://github.com/a/b/': Could not resolve host: github.com", CauseClass.NETWORK),
        ("ERROR: No matching distribution found for flash-attn==9.9", CauseClass.CODE),
    ],
)
def test_a_failed_tool_ends_a_launch_if_nothing_else_did(line: str, cause: CauseClass, tmp_path: Path) -> None:
    verdict = verdict_on(tmp_path, f"{line}\n")
    assert (verdict.cause, verdict.confidence) == (cause, Confidence.MEDIUM)
    assert verdict_on(tmp_path, f"{line}\nloading\n{OWN}{OUT_OF_MEMORY}").cause is CauseClass.GPU_MEMORY


def test_the_first_of_two_tracebacks_is_the_cause(tmp_path: Path) -> None:
    """Two ranks print into one log without prefixes."""
    assert verdict_on(tmp_path, f"{BEFORE}{OWN}{TIMED_OUT}{OWN}{WRONG_CALL}").cause is CauseClass.NETWORK
    assert verdict_on(tmp_path, f"{BEFORE}{OWN}{WRONG_CALL}{OWN}{TIMED_OUT}").cause is CauseClass.CODE


def test_two_interleaved_tracebacks_are_no_proof(tmp_path: Path) -> None:
    head, frame, source = OWN.splitlines(keepends=True)
    mixed = f"{head}{head}{frame}{frame}{source}{source}{WRONG_CALL}RuntimeError: peer is gone\n"
    assert verdict_on(tmp_path, BEFORE + mixed).confidence is not Confidence.HIGH


def test_the_first_of_a_chain_that_states_a_non_program_cause_is_the_cause(tmp_path: Path) -> None:
    """It is not what failed while it was reported, nor a key that was only looked up."""
    locked, key = "sqlite3.OperationalError: database is locked\n", "KeyError: 'x'\n"
    assert verdict_on(tmp_path, f"{OWN}{locked}{DURING}{OWN}{TIMED_OUT}").cause is CauseClass.STORAGE
    assert verdict_on(tmp_path, f"{OWN}{key}{DURING}{OWN}{TIMED_OUT}").cause is CauseClass.NETWORK


def test_code_that_a_program_file_executes_is_no_proof(tmp_path: Path) -> None:
    """A reward function runs what a model has written."""
    place = OWN.replace(SHOWN, '    exec(code, scope)\n  File "<string>", line 3, in <module>\n')
    assert verdict_on(tmp_path, f"{place}NameError: name 'n' is not defined\n").confidence is Confidence.LOW


def test_a_cause_after_a_line_without_one_counts(tmp_path: Path) -> None:
    """Slurm states first that the step ends, and then why."""
    aborted = "srun: Job step aborted: Waiting up to 47 seconds for job step to finish.\n"
    why = "slurmstepd: error: *** JOB 71 ON gpu-1 CANCELLED AT 2026-02-03T04:05:06 DUE TO TIME LIMIT ***\n"
    verdict = verdict_on(tmp_path, aborted + why)
    assert (verdict.cause, verdict.confidence) == (CauseClass.PREEMPTION, Confidence.HIGH)


@pytest.mark.parametrize(
    ("shown", "cause"),
    [
        ("libc.unshare(CLONE_NEWUSER)", CauseClass.NODE),
        ("inotify.add_watch(fd, path)", CauseClass.NODE),
        ("shared_memory.SharedMemory(create=True, size=n)", CauseClass.HOST_MEMORY),
        ("torch.save(state, path)", CauseClass.STORAGE),
    ],
)
def test_what_is_full_is_known_from_the_source_line_in_a_traceback(
    shown: str, cause: CauseClass, tmp_path: Path
) -> None:
    """The kernel answers "no space left" for more than disks."""
    log = f"{OWN.replace(SHOWN, f'    {shown}{chr(10)}')}OSError: [Errno 28] No space left on device\n"
    assert verdict_on(tmp_path, log).cause is cause


def test_a_loss_scaler_that_gives_up_is_the_cause(tmp_path: Path) -> None:
    """It has skipped steps before, and then raises."""
    left_out = "WARNING: overflow detected, setting loss scale to: 0.00012207\n"
    raised = "FloatingPointError: Minimum loss scale reached (0.0001). Your loss is probably exploding.\n"
    verdict = verdict_on(tmp_path, f"{BEFORE}{left_out}{OWN}{raised}")
    assert (verdict.cause, verdict.confidence) == (CauseClass.NUMERICS, Confidence.HIGH)


@pytest.mark.parametrize(
    "shown",
    [
        "prompt: What does CUDA out of memory. Tried to allocate 2.00 GiB mean?\n",
        "sample[0] = RuntimeError: CUDA error: uncorrectable ECC error encountered\n",
        "Generated text: CUDA error: uncorrectable ECC error encountered\n",
    ],
)
def test_text_that_the_program_displays_is_not_its_own_message(shown: str, tmp_path: Path) -> None:
    """A model has read or written it. What the program raises later counts."""
    assert verdict_on(tmp_path, f"{BEFORE}{shown}").confidence is Confidence.LOW
    assert verdict_on(tmp_path, f"{BEFORE}{shown}{OWN}{WRONG_CALL}").cause is CauseClass.CODE


def test_a_file_system_that_rejected_bytes_is_high_confidence(tmp_path: Path) -> None:
    """PyTorch's writer states it."""
    raised = "RuntimeError: PytorchStreamWriter failed writing file data/3: file write failed\n"
    verdict = verdict_on(tmp_path, f"{BEFORE}{OWN}{raised}")
    assert (verdict.cause, verdict.confidence) == (CauseClass.STORAGE, Confidence.HIGH)
