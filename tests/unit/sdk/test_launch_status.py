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


def test_the_rollbacks_that_wait_are_told(tmp_path: Path) -> None:
    """With how long the job hangs beyond its limit."""
    write(tmp_path, waiting=[ROLLBACK])
    status = StatusReader(tmp_path).read()
    assert status is not None
    assert status.waiting == (ROLLBACK,)
    assert 10.0 <= status.stalled_for < 11.0
    assert (status.reached.step, status.reached.checkpoint) == (30, 20)


def test_a_job_that_never_counts_as_hanging_states_what_it_reached(tmp_path: Path) -> None:
    """By ``connect(hang_floor=math.inf)``."""
    write(tmp_path, limit=float("inf"))
    status = StatusReader(tmp_path).read()
    assert status is not None
    assert (status.stalled_for, status.reached.step) == (0.0, 30)


@pytest.mark.parametrize("waiting", [["a,b", "x" * 36, 7, None, ROLLBACK + "\n"], []])
def test_what_is_no_id_is_passed_over(tmp_path: Path, waiting: list[object]) -> None:
    """It goes into the environment of the next attempt."""
    write(tmp_path, waiting=waiting)
    status = StatusReader(tmp_path).read()
    assert status is not None
    assert status.waiting == ()


def test_an_older_sdk_says_nothing_of_rollbacks(tmp_path: Path) -> None:
    """Job and launcher need not be of one release."""
    write(tmp_path)
    status = StatusReader(tmp_path).read()
    assert status is not None
    assert status.waiting == ()


def test_a_job_writes_what_waits(tmp_path: Path) -> None:
    """At the next look, and no more when it is over."""
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


def test_the_next_attempt_knows_what_waited(monkeypatch: pytest.MonkeyPatch) -> None:
    """From its environment; the first one has nothing there."""
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
def test_what_is_no_status_is_passed_over(tmp_path: Path, raw: str) -> None:
    """The job goes on, and nothing makes a hang of it: its processes write what they like."""
    (tmp_path / FILE_NAME).write_text(raw)
    assert StatusReader(tmp_path).read() is None


@pytest.mark.parametrize("make", [os.mkfifo, Path.mkdir])
def test_what_is_no_file_is_not_waited_for(tmp_path: Path, make: Callable[[Path], None]) -> None:
    """A launcher that waits for a pipe handles no signal, and starts no other attempt."""
    make(tmp_path / FILE_NAME)
    assert StatusReader(tmp_path).read() is None


def test_a_step_that_no_job_reaches_is_none(tmp_path: Path) -> None:
    """Any progress after it would not be seen as any."""
    write(tmp_path, step=10**30, checkpoint=-(10**30))
    status = StatusReader(tmp_path).read()
    assert status is not None
    assert (status.reached.step, status.reached.checkpoint) == (-1, -1)
