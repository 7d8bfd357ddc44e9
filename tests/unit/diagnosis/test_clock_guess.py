"""Years of lines that state none."""

from __future__ import annotations

import os
from datetime import UTC, datetime
from pathlib import Path

import pytest

from tests.unit.diagnosis.test_folder import diagnosed, write
from trainmedic_logs.diagnosis import clock_guess


@pytest.mark.parametrize(
    ("line", "written", "year"),
    [
        ("Jul  5 12:00:00 node-1 kernel: x", datetime(2026, 7, 5, 11, tzinfo=UTC), 2026),  # local time is ahead of UTC
        ("Jul  7 12:00:00 node-1 kernel: x", datetime(2026, 7, 5, 11, tzinfo=UTC), 2025),
        ("Dec 31 12:00:00 node-1 kernel: x", datetime(2026, 1, 1, 11, tzinfo=UTC), 2025),
        ("Jan  1 05:00:00 node-1 kernel: x", datetime(2025, 12, 31, 22, tzinfo=UTC), 2026),
        ("Dec 31 12:00:00 node-1 kernel: x", datetime(2025, 12, 31, 22, tzinfo=UTC), 2025),
    ],
)
def test_a_missing_year_is_the_latest_up_to_a_day_after_the_last_write(line: str, written: datetime, year: int) -> None:
    at = clock_guess.of_line(line.encode(), written)
    assert at is not None
    assert at.year == year


@pytest.mark.parametrize("line", ["license valid until 9999-12-31 23:59:59", "finishedAt: 0001-01-01T00:00:00Z"])
def test_a_date_that_means_never_is_not_the_time_of_its_line(line: str) -> None:
    """Otherwise every line after it would be as late, or as early."""
    assert clock_guess.of_line(line.encode(), datetime(2026, 7, 5, tzinfo=UTC)) is None


def test_a_missing_year_is_found_in_a_file_without_modification_time() -> None:
    """Files from archives have none."""
    written = datetime(1970, 1, 1, tzinfo=UTC)
    lines = [b"Nov 30 10:00:00 gpu-01 kernel: a", b"Nov 30 10:00:05 gpu-01 kernel: b"]
    first, second = (clock_guess.of_line(line, written) for line in lines)
    assert first is not None
    assert second is not None
    assert (second - first).total_seconds() == 5


@pytest.mark.parametrize(
    "line",
    [
        b"Sep 17 10:00:00 n1 kernel: NVRM: loading NVIDIA UNIX x86_64 Kernel Module 535.104  Sat Aug 19 01:15:15 2023",
        b"snapshot of the data set: 2019-05-04 10:00:00",
        b"step 10 loss 2.1",
    ],
)
def test_a_date_in_a_text_does_not_set_the_year_of_the_file(line: bytes) -> None:
    assert clock_guess.with_year(line) is None
    assert clock_guess.with_year(b"[rank12]: 2025-09-17T09:40:00Z " + line) is not None


@pytest.mark.parametrize("year", [2024, 2025])
@pytest.mark.parametrize(
    "first", ["[{year}-09-17 09:40:00,101] [INFO] [runner.py:80:main] start", "step 10 loss 2.1, without a time"]
)
def test_a_missing_year_in_files_copied_later_is_taken_from_their_other_lines(
    first: str, year: int, tmp_path: Path
) -> None:
    """So the kernel's GPU line, which states its year, falls into the same hour as the ranks' time-outs."""
    timeout = "ran for 600010 milliseconds before timing out."
    waited = (
        f"[rank0]:[E917 10:10:00.123456 ProcessGroupNCCL.cpp:632] [Rank 0] Watchdog caught collective operation"
        f" timeout: WorkNCCL(SeqNum=51, OpType=ALLREDUCE, NumelIn=1, NumelOut=1, Timeout(ms)=600000) {timeout}"
    )
    xid = f"[Wed Sep 17 09:59:58 {year}] NVRM: Xid (PCI:0000:5e:00): 79, pid=1, GPU has fallen off the bus."
    write(tmp_path, **{"n2__dmesg.log": xid, "n1__train.log": f"{first.format(year=year)}\n{waited}\n"})
    for path in tmp_path.rglob("*.log"):
        os.utime(path, (datetime(2026, 11, 30, tzinfo=UTC).timestamp(),) * 2)
    assert diagnosed(tmp_path).attempts[-1].verdict.cause == "gpu"
