"""How far a job has come, from the process that trains to the launcher of its node."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from trainmedic.job.progress import Progress
from trainmedic.job.status_file import begin_status_file
from trainmedic.launch.causes import Reached
from trainmedic.launch.job_status import JobStatus, StatusReader


def written(directory: Path, monkeypatch: pytest.MonkeyPatch, rank: int, local_rank: int, over: bool = True) -> None:
    """A rank that has come to step 40 says so, as one that ended or that was killed when it had hung for long."""
    monkeypatch.setenv("TRAINMEDIC_ATTEMPT_DIR", str(directory))
    monkeypatch.setenv("LOCAL_RANK", str(local_rank))
    progress = Progress(time.perf_counter() - 7200.0)
    progress.step = 40
    file = begin_status_file(progress, rank, tuple)
    if file is not None:
        file.close()
        if not over:
            path = directory / f"rank-{rank}.json"
            path.write_text(path.read_text().replace('"over": true', '"over": false'))


def test_a_launcher_without_rank_0_detects_progress_by_its_nodes_first_rank(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise three similar failures far apart in a long run would end the attempts of that node."""
    written(tmp_path, monkeypatch, rank=8, local_rank=0)
    assert StatusReader(tmp_path).read() == JobStatus(Reached(40, -1), 0.0)


def test_only_the_first_rank_of_a_node_writes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One file is enough."""
    written(tmp_path, monkeypatch, rank=9, local_rank=1)
    assert StatusReader(tmp_path).read() is None


def test_a_hang_is_judged_by_rank_0_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Others wait for rank 0 in a collective while it evaluates, and do not report that."""
    written(tmp_path, monkeypatch, rank=8, local_rank=0, over=False)
    other = StatusReader(tmp_path).read()
    assert other is not None
    assert other.stalled_for == 0.0
    written(tmp_path, monkeypatch, rank=0, local_rank=0, over=False)
    first = StatusReader(tmp_path).read()
    assert first is not None
    assert first.stalled_for > 0.0
