"""What one rank prints of others: exceptions of a shared checkpoint, the loss of the rank that made an identifier."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.log_rules import shipped
from trainmedic_logs.diagnosis.verdict import Confidence, Verdict
from trainmedic_logs.domain.finding import CauseClass
from trainmedic_logs.folder_diagnosis import diagnose_folder

SHARED = """{p}Traceback (most recent call last):
{p}  File "/app/run.py", line 60, in <module>
{p}    dcp.{call}(state, checkpoint_id=path)
{p}  File "/opt/lib/python3.12/site-packages/torch/distributed/checkpoint/utils.py", line 229, in all_reduce
{p}    raise final_result
{p}torch.distributed.checkpoint.api.CheckpointException: CheckpointException ranks:dict_keys([3])
{p}Traceback (most recent call last): (RANK 3)
{p}  File "/opt/lib/python3.12/site-packages/torch/distributed/checkpoint/utils.py", line 250, in all_reduce
{p}    local_data = map_fun()
{p}{error}
"""


def verdict_on(directory: Path, log: str) -> Verdict:
    (directory / "train.log").write_text(log, encoding="utf-8")
    return diagnose_folder(directory, shipped()).attempts[-1].verdict


@pytest.mark.parametrize("prefix", ["", "[rank0]: ", "2026-03-04 05:06:07,123 - app - ERROR - "])
@pytest.mark.parametrize(
    ("call", "error", "cause"),
    [
        ("save", "OSError: [Errno 28] No space left on device", CauseClass.STORAGE),
        ("load", "RuntimeError: Missing key in checkpoint state_dict: model.out.weight.", CauseClass.CODE),
    ],
)
def test_the_quoted_exception_is_named_and_no_rank_of_the_job(
    prefix: str, call: str, error: str, cause: CauseClass, tmp_path: Path
) -> None:
    """Neither the printing rank nor the checkpoint is blamed: the number is of the checkpoint's group."""
    verdict = verdict_on(tmp_path, SHARED.format(p=prefix, call=call, error=error))
    assert (verdict.cause, verdict.ranks, verdict.confidence) == (cause, (), Confidence.MEDIUM)
    assert error.rstrip(".") in verdict.summary
    assert "rank 3 of the checkpoint's group" in verdict.summary


@pytest.mark.parametrize("prefix", ["", "[rank0]: "])
def test_a_training_that_continues_survives_a_quoted_exception(prefix: str, tmp_path: Path) -> None:
    shared = SHARED.format(p=prefix, call="save", error="OSError: [Errno 28] No space left on device")
    steps = [f"{prefix}step {step} loss {2 - step / 1000}\n" for step in range(100, 900, 100)]
    assert verdict_on(tmp_path, "".join([steps[0], shared, *steps[1:5]])).confidence is Confidence.MEDIUM
    assert verdict_on(tmp_path, "".join([steps[0], shared, *steps[1:]])).cause is CauseClass.UNKNOWN


def test_the_rank_that_prints_the_exception_itself_is_named(tmp_path: Path) -> None:
    """This holds whatever its number in the checkpoint's group."""
    error = "OSError: [Errno 28] No space left on device"
    own = '[rank11]: Traceback (most recent call last):\n[rank11]:   File "/app/run.py", line 60, in save\n'
    verdict = verdict_on(
        tmp_path,
        f"{own}[rank11]:     write(path)\n[rank11]: {error}\n" + SHARED.format(p="[rank0]: ", call="save", error=error),
    )
    assert (verdict.cause, verdict.ranks) == (CauseClass.STORAGE, (11,))


def test_a_rank_that_lost_the_creator_of_the_nccl_id_does_not_hang(tmp_path: Path) -> None:
    got = (
        "[5] is setting up NCCL communicator and retrieving ncclUniqueId from [0] via c10d key-value store by key '0', "
    )
    lost = f"[rank5]: RuntimeError: {got}but store->get('0') got error: "
    assert verdict_on(tmp_path, f"{lost}Connection reset by peer\n").cause is CauseClass.UNKNOWN
    assert verdict_on(tmp_path, f"{lost}wait timeout after 600000ms\n").cause is CauseClass.HANG


def test_a_truncated_traceback_is_weaker_than_a_failed_request(tmp_path: Path) -> None:
    retried = "wandb: Network error (ConnectTimeout), entering retry loop.\n"
    cut = 'Traceback (most recent call last):\n  File "/app/run.py", line 3, in <module>\n    start()\n'
    verdict = verdict_on(tmp_path, retried + cut)
    assert (verdict.cause, verdict.confidence) == (CauseClass.NETWORK, Confidence.LOW)
    assert verdict_on(tmp_path, f"{retried}{cut}ValueError: no such split\n").cause is CauseClass.CODE


def test_an_exception_that_refers_to_a_worker_is_no_cause(tmp_path: Path) -> None:
    raised = (
        "RuntimeError: the queue was closed. Maybe one of your workers crashed. This is not the actual error message!\n"
    )
    assert verdict_on(tmp_path, raised).cause is CauseClass.UNKNOWN


def test_an_invalid_cuda_argument_reported_by_nccl_blames_no_gpu(tmp_path: Path) -> None:
    warned = "gpu-3:2211:2345 [3] include/alloc.h:102 NCCL WARN Cuda failure 1 'invalid argument'\n"
    verdict = verdict_on(tmp_path, warned)
    assert (verdict.cause, verdict.confidence) == (CauseClass.CODE, Confidence.LOW)
