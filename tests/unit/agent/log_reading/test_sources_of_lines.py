"""Lines of containers, of Slurm's jobs and of ranks, through a real reading: whose they are."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path

import pytest

from tests.driver.driver import Driver
from tests.unit.agent.log_reading.reading import NODE, Reading, policy_of
from trainmedic.wire.log_layout import AttemptLogs
from trainmedic_agent.adapters.nvml_gpus import NvmlGpus
from trainmedic_agent.gpu_record import GpuRecord
from trainmedic_agent.settings import agent
from trainmedic_agent.wiring.agent_check_logs import check_logs
from trainmedic_agent.wiring.agent_link import GpusByAddress
from trainmedic_core import gpu_names
from trainmedic_logs.domain.finding import TimeSource


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a") as file:
        file.write(text)


def test_container_lines_have_their_pod_and_time(tmp_path: Path) -> None:
    """The runtime's prefix is removed; a line that it has divided is joined, also over a kill."""
    log = tmp_path / "pods" / "team-a_worker-0_1b2c" / "main" / "0.log"
    reading = Reading(tmp_path / "state", policy_of(pods=["team-*"]), pods=str(tmp_path / "pods"))
    reading.step()
    write(log, "2026-01-01T00:00:00.5Z stderr F MARK 1\n2026-01-01T00:00:01.5Z stdout P MARK 2\n")
    reading.step()
    reading.runner.store_due(is_last=True)
    reading.kill()
    reading.start()
    write(log, "2026-01-01T00:00:01.6Z stdout F 3\n")
    reading.step()
    first, second = (update.finding for update in reading.last_words().values())
    assert (first.origin.pod, first.origin.source, first.time_source) == (
        "team-a/worker-0",
        "training",
        TimeSource.LINE,
    )
    assert first.first_at == datetime(2026, 1, 1, 0, 0, 0, 500_000, UTC)
    assert (second.fields["n"], second.line) == ("23", "MARK 23")
    reading.kill()


def test_slurm_lines_have_the_task_prefix_of_srun(tmp_path: Path) -> None:
    """The job comes from the file name."""
    reading = Reading(tmp_path / "state", policy_of(slurm=[f"{tmp_path}/slurm/{{job}}-[0-9]*.out"]))
    reading.step()
    write(tmp_path / "slurm" / "llm-1-4711.out", "7: MARK 1\nslurmstepd: error: MARK 2\n")
    reading.step()
    first, second = (update.finding for update in reading.last_words().values())
    assert (first.origin.job, first.origin.source, set(first.ranks)) == ("llm-1", "slurm", {7})
    assert set(second.ranks) == set()
    reading.kill()


def test_a_rank_that_identifies_its_log_later_is_known_from_then_on(tmp_path: Path) -> None:
    """torchrun creates its files before the training starts."""
    attempt = AttemptLogs.of(tmp_path / "logs", "llm-1", 1)
    log = attempt.ranks(NODE) / "x_1" / "attempt_0" / "0" / "stderr.log"
    reading = Reading(tmp_path / "state", policy_of(roots=[str(tmp_path / "logs")]))
    reading.step()
    write(log, "MARK 1\n")
    reading.step()
    said = {"version": 1, "job": "llm-1", "attempt": 1, "rank": 8, "local_rank": 0, "node_rank": 1, "node": NODE}
    write(attempt.sources(NODE, 0), json.dumps(said))
    reading.step()
    reading.step()
    write(log, "MARK 2\n")
    reading.step()
    first, second = (update.finding.origin for update in reading.last_words().values())
    assert (first.job, first.rank, first.local_rank) == ("llm-1", None, 0)
    assert (second.job, second.rank, second.local_rank) == ("llm-1", 8, 0)
    reading.kill()


def test_a_gpu_is_recognised_by_its_address_after_it_has_fallen_off_the_bus(
    make_driver: Callable[..., Driver], gpu_record: GpuRecord
) -> None:
    """This holds for all spellings of the address; its XID is logged at that time."""
    driver = make_driver(2)
    gpus = NvmlGpus()
    gpu_record.observe(gpus.inventory(), [], {})
    driver.remove(1)
    known = GpusByAddress(gpus, gpu_record).uuids()
    addresses = [gpu_names.normal_pci(text) for text in ("0000:18:00", "00000000:20:00.0", "0000:99:00")]
    assert [known.get(each or "") for each in addresses] == [driver.cards[0].uuid, driver.cards[1].uuid, None]
    gpus.close()


@pytest.mark.skipif(os.geteuid() != 0, reason="another user's file takes root to make")
def test_the_check_lists_the_files_to_be_read(tmp_path: Path) -> None:
    """It reports the number of files, skipped ones with the reason, and missing or linked directories."""
    write(tmp_path / "logs" / "a.log", "x\n")
    (tmp_path / "logs" / "b.log").symlink_to("a.log")
    (tmp_path / "way").symlink_to(tmp_path / "logs")
    policy = policy_of(
        files=[f"{tmp_path}/logs/*.log", f"{tmp_path}/way/*.log"],
        roots=[f"{tmp_path}/missing"],
        kernel=f"{tmp_path}/kern.log",
    )
    settings = agent.load({"node": NODE, "state_dir": str(tmp_path / "not" / "made" / "state")}, {})
    report = check_logs(policy, settings)
    assert report.values["files"] == 1
    assert report.values["directories"] == {
        f"{tmp_path}/missing": "No such file or directory",
        f"{tmp_path}/logs": None,
        f"{tmp_path}/way": "a symbolic link, or no directory, is on the way; name the real path",
    }
    assert report.values["refused"] == {"link": 2}
    assert report.values["kernel"] == "file"
    assert not any("sticky" in warning for warning in report.warnings)
    (tmp_path / "shared").mkdir()
    (tmp_path / "shared").chmod(0o777)
    (warned,) = [warning for warning in report.warnings if "own user" in warning]
    assert "--reader-user" in warned, "the parents of pytest's directories are closed to any other user"
    shared = check_logs(policy_of(roots=[f"{tmp_path}/shared"]), settings)
    assert [f"chmod +t {tmp_path}/shared" in warning for warning in shared.warnings].count(True) == 1
    assert [f"{tmp_path}/kern.log is not there" in error for error in report.errors] == [False, True]
