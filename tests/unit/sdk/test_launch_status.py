"""What rank 0 writes for its launcher, and what the launcher reads of it."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.programs import eventually
from trainmedic.job import status_file
from trainmedic.job.progress import Progress
from trainmedic.job.status_file import FILE_NAME, WAITING, StatusFile, waited_before
from trainmedic.launch.job_status import StatusReader

ROLLBACK = "01890a5d-ac96-774b-bcce-b302099a8057"


def write(directory: Path, **fields: object) -> None:
    status = {"step": 30, "checkpoint": 20, "stall": 70.0, "limit": 60.0, "over": False, **fields}
    (directory / FILE_NAME).write_text(json.dumps(status))


def test_pending_rollbacks_are_reported(tmp_path: Path) -> None:
    """The status states how long the job hangs beyond its limit."""
    write(tmp_path, waiting=[ROLLBACK])
    status = StatusReader(tmp_path).read()
    assert status is not None
    assert status.waiting == (ROLLBACK,)
    assert 10.0 <= status.stalled_for < 11.0
    assert (status.reached.step, status.reached.checkpoint) == (30, 20)


def test_a_job_that_never_counts_as_hanging_states_the_step_it_reached(tmp_path: Path) -> None:
    """It sets ``connect(hang_floor=math.inf)``."""
    write(tmp_path, limit=float("inf"))
    status = StatusReader(tmp_path).read()
    assert status is not None
    assert (status.stalled_for, status.reached.step) == (0.0, 30)


@pytest.mark.parametrize("waiting", [["a,b", "x" * 36, 7, None, ROLLBACK + "\n"], []])
def test_an_invalid_id_is_skipped(tmp_path: Path, waiting: list[object]) -> None:
    """It would go into the environment of the next attempt."""
    write(tmp_path, waiting=waiting)
    status = StatusReader(tmp_path).read()
    assert status is not None
    assert status.waiting == ()


def test_an_older_sdk_reports_no_rollbacks(tmp_path: Path) -> None:
    """Job and launcher need not be of the same release."""
    write(tmp_path)
    status = StatusReader(tmp_path).read()
    assert status is not None
    assert status.waiting == ()


def test_a_job_writes_its_pending_rollbacks(tmp_path: Path) -> None:
    """It does so at the next check, and stops when they are over."""
    waiting = [ROLLBACK]
    file = StatusFile(Progress(time.perf_counter()), tmp_path / FILE_NAME, lambda: waiting)
    try:
        eventually((tmp_path / FILE_NAME).exists, 60, "the file")
    finally:
        first = json.loads((tmp_path / FILE_NAME).read_text())
        waiting.clear()
        file.close()
    last = json.loads((tmp_path / FILE_NAME).read_text())
    assert (first["waiting"], last["waiting"], last["over"]) == ([ROLLBACK], [], True)


def test_the_next_attempt_knows_the_pending_rollbacks(monkeypatch: pytest.MonkeyPatch) -> None:
    """It reads them from its environment; the first attempt has none there."""
    monkeypatch.delenv(WAITING, raising=False)
    assert waited_before() == frozenset()
    monkeypatch.setenv(WAITING, f"{ROLLBACK},b")
    assert waited_before() == {ROLLBACK, "b"}
    assert status_file.WAITING == "TRAINMEDIC_WAITING"


@pytest.mark.parametrize(
    "raw",
    [
        *("[" * 4000, "null", "[]", "9" * 4096, '{"step": 1}', '{"stall": NaN}'),
        '{"step":1,"checkpoint":1,"stall":1e999,"limit":1,"over":false}',
        '{"step":1,"checkpoint":1,"stall":%s,"limit":1,"over":false}' % ("9" * 400),
        '{"step":1,"checkpoint":1,"stall":1,"limit":"nan","over":false}',
    ],
)
def test_an_invalid_status_is_skipped(tmp_path: Path, raw: str) -> None:
    """The job continues and does not count as hanging: its processes may write anything."""
    (tmp_path / FILE_NAME).write_text(raw)
    assert StatusReader(tmp_path).read() is None


@pytest.mark.parametrize("make", [os.mkfifo, Path.mkdir])
def test_a_status_path_that_is_no_file_is_not_waited_for(tmp_path: Path, make: Callable[[Path], None]) -> None:
    """A launcher that waits for a pipe handles no signal and starts no other attempt."""
    make(tmp_path / FILE_NAME)
    assert StatusReader(tmp_path).read() is None


def test_an_unreachable_step_is_ignored(tmp_path: Path) -> None:
    """No progress after it would be recognized."""
    write(tmp_path, step=10**30, checkpoint=-(10**30))
    status = StatusReader(tmp_path).read()
    assert status is not None
    assert (status.reached.step, status.reached.checkpoint) == (-1, -1)
