"""Real torchrun jobs of four gloo ranks that fail, each in its way: the verdict has the right rank and cause."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.integration.diagnosis.accident_places import memory_group
from tests.integration.launch.launched import Launched
from tests.unit.diagnosis.test_scenes import shipped_rules
from trainmedic_logs.diagnosis.verdict import Confidence, Verdict
from trainmedic_logs.domain.finding import CauseClass
from trainmedic_logs.folder_diagnosis import diagnose_folder

_JOB = Path(__file__).with_name("failing_job.py")


def failed(directory: Path, accident: str, place: str = "") -> Verdict:
    """The verdict on a job in which rank 2 had an accident, from what `trainmedic-run` kept of it."""
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=4"]
    job = Launched(directory, [*torchrun, str(_JOB), accident, place], "--retries=0", "--job=j1")
    try:
        assert (job.wait() == 0) == (accident == "nan"), job.printed()
    finally:
        job.close()
    return diagnose_folder(directory / "logs", shipped_rules()).attempts[-1].verdict


@pytest.mark.parametrize(
    ("accident", "cause", "confidence"),
    [
        ("raise", CauseClass.CODE, Confidence.HIGH),
        ("kill", CauseClass.UNKNOWN, Confidence.LOW),
        ("leave", CauseClass.HANG, Confidence.MEDIUM),
        ("disk", CauseClass.STORAGE, Confidence.HIGH),
        ("memory", CauseClass.HOST_MEMORY, Confidence.HIGH),
        ("segfault", CauseClass.CODE, Confidence.MEDIUM),
        ("nan", CauseClass.NUMERICS, Confidence.HIGH),
    ],
)
def test_the_rank_and_the_cause_are_found(
    accident: str, cause: CauseClass, confidence: Confidence, tmp_path: Path
) -> None:
    """Of four ranks that all fail or wait, the verdict names the first one, and no node."""
    verdict = failed(tmp_path, accident)
    assert (verdict.ranks, verdict.cause, verdict.confidence, verdict.node) == ((2,), cause, confidence, None), verdict


def test_the_kernel_log_identifies_a_rank_killed_by_its_memory_group(tmp_path: Path) -> None:
    """Without the kernel log it is a bare SIGKILL; with it, out of memory of that rank, by its process id."""
    with memory_group(tmp_path.name) as group:
        without = failed(tmp_path, "cgroup", str(group))
    assert (without.ranks, without.cause) == ((2,), CauseClass.UNKNOWN), without
    kernel = subprocess.run(["dmesg", "--time-format", "iso"], capture_output=True, check=False)
    if kernel.returncode:
        pytest.skip("the kernel's log must be readable")
    (tmp_path / "logs" / "dmesg.txt").write_bytes(kernel.stdout)
    verdict = diagnose_folder(tmp_path / "logs", shipped_rules()).attempts[-1].verdict
    found = (verdict.ranks, verdict.cause, verdict.confidence, verdict.node)
    assert found == ((2,), CauseClass.HOST_MEMORY, Confidence.HIGH, None), verdict
