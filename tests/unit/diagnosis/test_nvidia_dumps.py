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
    """Each set has 16 ranks. In the first, two faults were injected, of which NVIDIA's analyser finds one, too."""
    dumps, refused = dump_reader.read_files(sorted((SETS / name).glob("_dump_*")))
    reading = missing_ranks.read_together(dumps)
    assert (len(dumps), refused) == (16, {})
    assert (reading.absent, reading.culprits) == (ranks, ranks)
    assert (reading.silent, reading.differing) == ((), ())


@pytest.mark.parametrize("lost", range(16))
def test_a_missing_dump_does_not_make_an_innocent_rank_a_culprit(lost: int) -> None:
    """Without one of 16, fewer may be found; the rank without a dump is reported, and no other is blamed."""
    paths = [path for path in sorted((SETS / "lock_gil_1st").glob("_dump_*")) if dump_reader.rank_of(path.name) != lost]
    dumps, _ = dump_reader.read_files(paths)
    reading = missing_ranks.read_together(dumps)
    assert set(reading.absent) == {9, 14} - {lost}
    assert reading.silent == (lost,)


def test_the_files_are_the_published_ones() -> None:
    """Each has the hash that it had at its source."""
    listed = [line.split() for line in (SETS / "SHA256SUMS").read_text().splitlines()]
    assert len(listed) == 68
    for expected, name in listed:
        assert hashlib.sha256((SETS / name).read_bytes()).hexdigest() == expected, name
