"""Which number an attempt has, and what its processes are told of where their logs go."""

from __future__ import annotations

import os
import time
from importlib.metadata import PackageNotFoundError
from pathlib import Path

import pytest

from trainmedic.launch import attempt_logs
from trainmedic.wire.log_layout import AttemptLogs

LOG_DIR = Path("/logs")
LOGS = AttemptLogs.of(LOG_DIR, "llm-1", 2)


def keep(job: Path, number: int, *nodes: str, age: float = 0.0) -> None:
    """An attempt of so many seconds ago, in which these nodes have taken part."""
    logs = AttemptLogs(job / f"attempt-{number}")
    attempt_logs.make_directories(logs)
    for node in nodes:
        logs.launcher(node).touch()
    at = time.time() - age
    os.utime(logs.path, (at, at))


def test_a_first_launch_begins_at_one(tmp_path: Path) -> None:
    """Where there is no directory yet, and where it holds something else."""
    assert attempt_logs.first_number(tmp_path / "none", "a", False) == 1
    (tmp_path / "attempt-x").mkdir()
    assert attempt_logs.first_number(tmp_path, "a", False) == 1


@pytest.mark.parametrize(("node", "is_one_of_several"), [("a", False), ("a", True), ("b", False)])
def test_another_launch_counts_on(tmp_path: Path, node: str, is_one_of_several: bool) -> None:
    """At once: the attempt before is this node's own, or that of a job of one launcher."""
    keep(tmp_path, 1, "a")
    keep(tmp_path, 2, "a")
    assert attempt_logs.first_number(tmp_path, node, is_one_of_several) == 3


def test_the_nodes_of_one_launch_have_one_number(tmp_path: Path) -> None:
    """Whichever comes first, also with a node that has not taken part before."""
    keep(tmp_path, 3, "a", "b", age=3600)
    assert [attempt_logs.first_number(tmp_path, node, True) for node in "abc"] == [4, 4, 4]
    keep(tmp_path, 4, "a")
    assert [attempt_logs.first_number(tmp_path, node, True) for node in "bc"] == [4, 4]


RECORDED = {
    "TRAINMEDIC_LOG_DIR": "/logs",
    "TORCH_FR_BUFFER_SIZE": "2000",
    "TORCH_NCCL_DUMP_ON_TIMEOUT": "1",
    "TORCH_FR_DUMP_TEMP_FILE": "/logs/llm-1/attempt-2/flight-recorder/rank-",
    "TORCHELASTIC_ERROR_FILE": "/logs/llm-1/attempt-2/error-gpu-07.json",
}
OLD_NAMES = {
    "TORCH_NCCL_TRACE_BUFFER_SIZE": "2000",
    "TORCH_NCCL_DEBUG_INFO_TEMP_FILE": "/logs/llm-1/attempt-2/flight-recorder/rank-",
}


@pytest.mark.parametrize(
    ("installed", "older"),
    [("2.13.0+cpu", {}), ("2.8.0a0+git1f2e", {}), ("2.7.1", OLD_NAMES), ("unknown", OLD_NAMES), (None, OLD_NAMES)],
)
def test_pytorch_is_told_to_record_collectives_under_the_names_that_it_knows(
    installed: str | None, older: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """And where to write them and the error that ends a rank. A new PyTorch would warn of an old name in each rank."""

    def version(name: str) -> str:
        assert name == "torch"
        if installed is None:
            raise PackageNotFoundError(name)
        return installed

    monkeypatch.setattr(attempt_logs, "version", version)
    assert attempt_logs.variables(LOGS, LOG_DIR, "gpu-07", {}) == {**RECORDED, **older}


def test_what_the_user_has_set_stays_under_whatever_name() -> None:
    """An old name that is set is not overruled by the new one."""
    own = {"TORCH_NCCL_TRACE_BUFFER_SIZE": "0", "TORCH_FR_DUMP_TEMP_FILE": "/x", "TORCHELASTIC_ERROR_FILE": "/y"}
    found = attempt_logs.variables(LOGS, LOG_DIR, "gpu-07", own)
    assert found == {"TRAINMEDIC_LOG_DIR": "/logs", "TORCH_NCCL_DUMP_ON_TIMEOUT": "1"}


def test_where_nothing_is_kept_nothing_is_set() -> None:
    """And the job writes no records either."""
    assert attempt_logs.variables(None, None, "gpu-07", {}) == {"TRAINMEDIC_LOG_DIR": ""}
