"""The published dumps of real hangs: the ranks that are found are those that NVIDIA's own analyser finds."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest

from trainmedic_logs.diagnosis.flight_recorder import missing_ranks
from trainmedic_logs.files import dump_reader

SETS = Path(__file__).with_name("nvidia_dumps")


@pytest.mark.parametrize(
    ("name", "ranks"),
    [("gpu_error_1st", (12,)), ("gpu_error_2nd", (9, 14)), ("lock_gil_1st", (9, 14)), ("lock_gil_2nd", (10, 15))],
)
def test_the_absent_ranks_are_those_of_nvidias_own_analyser(name: str, ranks: tuple[int, ...]) -> None:
    """Of 16 ranks each. In the first set two faults were injected, and NVIDIA's analyser finds one of them, too."""
    dumps, refused = dump_reader.read_files(sorted((SETS / name).glob("_dump_*")))
    reading = missing_ranks.read_together(dumps)
    assert (len(dumps), refused) == (16, {})
    assert (reading.absent, reading.culprits) == (ranks, ranks)
    assert (reading.silent, reading.differing) == ((), ())


@pytest.mark.parametrize("lost", range(16))
def test_a_dump_that_is_missing_makes_nobody_a_culprit_who_is_none(lost: int) -> None:
    """Without one of the sixteen, fewer may be found, and the one without a dump is told; no other is blamed."""
    paths = [path for path in sorted((SETS / "lock_gil_1st").glob("_dump_*")) if dump_reader.rank_of(path.name) != lost]
    dumps, _ = dump_reader.read_files(paths)
    reading = missing_ranks.read_together(dumps)
    assert set(reading.absent) == {9, 14} - {lost}
    assert reading.silent == (lost,)


def test_the_files_are_those_that_were_published() -> None:
    """Each has the hash that it had at its source."""
    listed = [line.split() for line in (SETS / "SHA256SUMS").read_text().splitlines()]
    assert len(listed) == 68
    for expected, name in listed:
        assert hashlib.sha256((SETS / name).read_bytes()).hexdigest() == expected, name
