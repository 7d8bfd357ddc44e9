"""Causes beyond a rank's own exception: launches, rendezvous, accelerators, memory services, and what to do then."""

# ruff: noqa: E501 (lines stand here as programs print them)

from __future__ import annotations

from pathlib import Path

import pytest

from tests.unit.diagnosis.test_folder import diagnosed, write
from trainmedic_logs.diagnosis.verdict import Advice, Confidence, Verdict
from trainmedic_logs.domain.finding import CauseClass

RAY = """ray.exceptions.RayTaskError({name}): ray::Trainer.step() (pid=91, ip=10.0.0.9, repr=<trainer.Trainer object>)
  File "/app/trainer.py", line 44, in step
    out = self.update(batch)
  File "/app/trainer.py", line 71, in update
    return fetch(batch)
{last}
"""
RERUN = "ERROR:megatron.core.rerun_state_machine:"
WHERE = f"{RERUN}Rank 6, node gpu-09, device 6, iteration #812: "


def verdict_on(directory: Path, text: str, name: str = "train.log") -> Verdict:
    """The verdict on one file."""
    return diagnosed(write(directory, **{name: text})).attempts[-1].verdict


@pytest.mark.parametrize("prefix", ["", "(TaskRunner pid=812) "])
@pytest.mark.parametrize(
    ("name", "last", "cause"),
    [
        ("ConnectionError", "ConnectionError: Max retries exceeded with url: /api", CauseClass.NETWORK),
        ("OSError", "OSError: [Errno 116] Stale file handle: '/ckpt/a'", CauseClass.STORAGE),
        ("OutOfMemoryError", "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB.", "gpu_memory"),
        ("ActorDiedError", "ray.exceptions.ActorDiedError: The actor died.", CauseClass.UNKNOWN),
    ],
)
def test_an_exception_forwarded_by_ray_is_read(name: str, last: str, cause: str, prefix: str, tmp_path: Path) -> None:
    """Its traceback is below Ray's line, with or without a heading."""
    text = "".join(f"{prefix}{line}\n" for line in RAY.format(name=name, last=last).splitlines())
    assert verdict_on(tmp_path / "bare", text).cause == cause
    heading = f'{prefix}Traceback (most recent call last):\n{prefix}  File "/app/main.py", line 9, in <module>\n'
    assert verdict_on(tmp_path / "headed", heading + text).cause == cause


def test_an_exception_forwarded_by_ray_is_recognised_by_its_first_line(tmp_path: Path) -> None:
    """The log ends there."""
    text = "ray.exceptions.RayTaskError(ReadTimeout): ray::Trainer.step() (pid=91, ip=10.0.0.9)\n"
    assert verdict_on(tmp_path, text).cause is CauseClass.NETWORK


@pytest.mark.parametrize(
    ("log", "cause", "words"),
    [
        (
            "torch.distributed.elastic.rendezvous.api.RendezvousTimeoutError\n",
            CauseClass.HANG,
            "too few nodes joined the rendezvous",
        ),
        (
            "torch.distributed.DistStoreError: Timed out after 301 seconds waiting for clients. 14/16 clients joined.\n",
            CauseClass.HANG,
            "It did not start: 14 of 16 processes joined",
        ),
        (
            "srun: error: Task launch for 71.0 failed on node gpu-3: Job credential expired\n",
            CauseClass.NODE,
            "a machine, or its setup, refused what the job needs",
        ),
        (
            "nvidia-container-cli: mount error: failed to create user namespace: No space left on device\n",
            CauseClass.NODE,
            "The job did not start: nvidia-container-cli: mount error: failed to create user namespace",
        ),
        ("salloc: error: Node failure on gpu-3\n", CauseClass.NODE, "a machine failed"),
    ],
)
def test_a_job_that_did_not_start_is_reported_as_such(log: str, cause: CauseClass, words: str, tmp_path: Path) -> None:
    """The sentence states what was refused, or how many ranks came."""
    verdict = verdict_on(tmp_path, log)
    assert verdict.cause is cause
    assert words in verdict.summary, verdict.summary
    assert verdict.confidence is not Confidence.HIGH


@pytest.mark.parametrize(
    ("told", "cause"),
    [
        ("", CauseClass.NUMERICS),
        ("First rerun: unexpected result is reproducible within the tolerance (nan = nan).", CauseClass.NUMERICS),
        ("First rerun: unexpected result is not reproducible within the tolerance (2.1 != nan)", CauseClass.GPU),
    ],
)
def test_a_step_that_is_still_being_recomputed_proves_nothing(told: str, cause: CauseClass, tmp_path: Path) -> None:
    """The log ends before Megatron-LM has a result of another GPU."""
    nan = f"{RERUN}Unexpected result nan on rank 6 at iteration #812 invocation #1 (message='found NaN in loss')\n"
    verdict = verdict_on(tmp_path, nan + f"{WHERE}{told}\n" * bool(told))
    assert (verdict.cause, verdict.ranks, verdict.confidence) == (cause, (6,), Confidence.MEDIUM)


@pytest.mark.parametrize("what", ["Possible transient error!", "Possible persistent error!"])
def test_a_step_with_a_different_recomputed_result_is_a_gpu_fault(what: str, tmp_path: Path) -> None:
    """Megatron-LM computed it again; the NaN before it is not the cause."""
    nan = f"{RERUN}Unexpected result nan on rank 6 at iteration #812 invocation #1 (message='found NaN in loss')\n"
    again = f"{WHERE}First rerun: unexpected result is not reproducible within the tolerance (2.1 != nan)\n"
    verdict = verdict_on(tmp_path, nan + again + f"{WHERE}{what}\n")
    assert (verdict.cause, verdict.ranks) == (CauseClass.GPU, (6,))
    assert verdict.advice is Advice.ASK
    assert verdict.confidence is not Confidence.HIGH


def test_a_step_with_the_same_recomputed_result_is_a_training_fault(tmp_path: Path) -> None:
    """Another GPU gives it too, so the numbers are what the program computes."""
    nan = f"{RERUN}Unexpected result nan on rank 6 at iteration #812 invocation #1 (message='found NaN in loss')\n"
    told = f"{WHERE}Correct result (but possible Application error)\n"
    verdict = verdict_on(tmp_path, nan + told)
    assert (verdict.cause, verdict.ranks, verdict.confidence) == (CauseClass.NUMERICS, (6,), Confidence.HIGH)


def test_a_kill_by_an_oom_service_is_out_of_memory(tmp_path: Path) -> None:
    """earlyoom writes into the journal, as a program."""
    line = 'Aug 04 10:39:10 gpu-3 earlyoom[845]: sending SIGTERM to process 3226 uid 0 "python3": oom_score 1282, VmRSS 2\n'
    verdict = verdict_on(tmp_path, line, "journal-gpu-3.txt")
    assert (verdict.cause, verdict.advice) == (CauseClass.HOST_MEMORY, Advice.RESTART)
    other = line.replace("earlyoom[845]", "train[845]")
    assert verdict_on(tmp_path / "other", other, "journal-gpu-3.txt").cause is CauseClass.UNKNOWN


def test_corrected_link_errors_explain_no_exception(tmp_path: Path) -> None:
    """They are a hint for the people who maintain the node."""
    aer = "".join(
        f"[{100 + number / 10:.6f}] pcieport 0000:00:03.1: AER: Corrected error received: 0000:01:00.0\n"
        for number in range(60)
    )
    raised = "Traceback (most recent call last):\n  File \"/app/train.py\", line 9, in main\nKeyError: 'labels'\n"
    verdict = diagnosed(write(tmp_path, **{"dmesg-gpu-3.txt": aer, "train.log": raised})).attempts[-1].verdict
    assert verdict.cause is CauseClass.CODE


@pytest.mark.parametrize(
    "line",
    [
        "RuntimeError: unable to write to file </torch_9021_1>: No space left on device (28)",
        "OSError: [Errno 28] No space left on device: '/psm_7f21'",
        "NCCL WARN Error: failed to extend /dev/shm/nccl-ab12 to 9637892 bytes, error: No space left on device (28)",
    ],
)
def test_full_shared_memory_is_not_a_full_disk(line: str, tmp_path: Path) -> None:
    """It has 64 MB in a container by default."""
    assert verdict_on(tmp_path, f"{line}\n").cause is CauseClass.HOST_MEMORY


def test_a_semaphore_that_cannot_be_created_is_not_a_full_disk(tmp_path: Path) -> None:
    """The traceback shows that it is shared memory."""
    raised = (
        "Traceback (most recent call last):\n"
        '  File "/usr/lib/python3.11/multiprocessing/synchronize.py", line 57, in __init__\n'
        "    sl = self._semlock = _multiprocessing.SemLock(\n"
        "OSError: [Errno 28] No space left on device\n"
    )
    assert verdict_on(tmp_path, raised).cause is CauseClass.HOST_MEMORY


@pytest.mark.parametrize(
    ("line", "is_nccl"),
    [
        ("NCCL WARN NET/IB : Got completion from peer 10.0.0.7<44206> with status=12 opcode=0 len=0 vendor err 129\n", True),
        ("RuntimeError: NPU out of memory. Tried to allocate 2.00 GiB (NPU 0; 60.97 GiB total capacity)\n", False),
        ("pynvml.NVMLError_GpuIsLost: GPU is lost\n", False),
    ],
)  # fmt: skip
def test_flight_recorder_dumps_are_missing_only_where_nccl_was_used(line: str, is_nccl: bool, tmp_path: Path) -> None:
    """No other library writes them."""
    verdict = verdict_on(tmp_path, line)
    assert ("no flight recorder dumps" in verdict.missing) == is_nccl


@pytest.mark.parametrize(
    "line",
    [
        "pynvml.NVMLError_GpuIsLost: GPU is lost\n",
        "RuntimeError: CUDA error: uncorrectable ECC error encountered\n",
        "HW Exception by GPU node-4 (Agent handle: 0x1) reason :GPU Hang\n",
        "RuntimeError: synStatus=26 [Generic failure] Device acquire failed.\n",
    ],
)
def test_a_lost_gpu_never_leads_to_a_restart_advice(line: str, tmp_path: Path) -> None:
    """On the same GPU the job fails again: a person checks the node first."""
    verdict = verdict_on(tmp_path, line)
    assert verdict.cause is CauseClass.GPU
    assert verdict.advice in (Advice.ASK, Advice.ISOLATE_NODE)


@pytest.mark.parametrize(
    ("later", "cause"),
    [
        ("", CauseClass.NETWORK),
        (
            "slurmstepd: error: *** JOB 3 ON n1 CANCELLED AT 2021-03-15T18:00:46 DUE TO TIME LIMIT ***",
            CauseClass.PREEMPTION,
        ),
        ("RuntimeError: Trying to backward through the graph a second time", CauseClass.CODE),
    ],
)
def test_a_retried_request_is_a_hint_if_nothing_else_happened(later: str, cause: CauseClass, tmp_path: Path) -> None:
    """Libraries retry for minutes, and mostly succeed."""
    retried = "'(ReadTimeoutError(...), '(Request ID: 8a)')' thrown while requesting GET https://hub.internal/a.zst\n"
    verdict = verdict_on(tmp_path, f"{retried}{later}\n")
    assert verdict.cause is cause
    assert (verdict.confidence is Confidence.LOW) == (cause is CauseClass.NETWORK)


def test_a_rank_that_waits_for_another_is_not_the_cause(tmp_path: Path) -> None:
    """The other rank could not start, in a log without times. Without that log, the network is named."""
    waits = "torch.distributed.DistNetworkError: The client socket has timed out after 600000ms while trying to connect to (n2, 29500)."
    fails = "Traceback (most recent call last):\n  File \"/app/train.py\", line 3, in <module>\n    import flash_attn\nModuleNotFoundError: No module named 'flash_attn'\n"
    write(tmp_path, **{"n1.log": f"{waits}\n"})
    assert diagnosed(tmp_path).attempts[-1].verdict.cause is CauseClass.NETWORK
    write(tmp_path, **{"n2.log": fails})
    assert diagnosed(tmp_path).attempts[-1].verdict.cause is CauseClass.CODE
