"""When the bytes of files arrived: what the agent keeps of its looks at them."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import closing
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from trainmedic_agent.journal import Journal
from trainmedic_agent.log_reading import arrivals
from trainmedic_agent.log_reading.arrivals import ArrivalIndex
from trainmedic_agent.log_reading.scan_units import FoundFile

BEGAN = datetime(2026, 3, 9, 7, tzinfo=UTC)
KEY = (1, 2)


def at(seconds: float) -> datetime:
    return BEGAN + timedelta(seconds=seconds)


def ns(seconds: float) -> int:
    return int(at(seconds).timestamp() * 1000) * 1_000_000


@pytest.fixture
def journal(tmp_path: Path) -> Iterator[Journal]:
    with closing(Journal(tmp_path)) as made:
        yield made


def seconds_of(index: ArrivalIndex, size: int, place: int, now: float = 1e6) -> tuple[float | None, float]:
    """Between which times the byte at `place` came."""
    known = index.of(KEY, size)
    assert known is not None
    arrival = known.of(place, at(now))
    after = (arrival.after - BEGAN).total_seconds() if arrival.after is not None else None
    return after, (arrival.at - BEGAN).total_seconds()


def test_a_byte_arrived_between_two_checks(journal: Journal) -> None:
    """The file's last write is more exact; bytes not yet checked arrived after the last check."""
    index = ArrivalIndex(journal)
    index.record_look(KEY, 0, ns(0), at(0))
    index.record_look(KEY, 100, ns(10.5), at(11))
    for second in range(12, 20):
        index.record_look(KEY, 100, ns(10.5), at(second))
    index.record_look(KEY, 150, ns(19.5), at(20))
    assert seconds_of(index, 150, 0) == (0, 10.5)
    assert seconds_of(index, 150, 99) == (0, 10.5)
    assert seconds_of(index, 150, 100) == (19, 19.5)
    assert seconds_of(index, 400, 150, now=22) == (20, 22)


def test_a_modification_time_set_by_a_user_does_not_override_the_checks(journal: Journal) -> None:
    """This holds for a time in the future and for one long ago."""
    index = ArrivalIndex(journal)
    index.record_look(KEY, 0, ns(0), at(0))
    index.record_look(KEY, 100, ns(-5000), at(10))
    index.record_look(KEY, 200, ns(9999), at(20))
    assert (seconds_of(index, 200, 50), seconds_of(index, 200, 150)) == ((0, 10), (10, 20))


def test_a_clock_set_back_between_two_checks_loses_no_arrival(journal: Journal) -> None:
    """Bytes did not arrive before the check that did not see them."""
    index = ArrivalIndex(journal)
    index.record_look(KEY, 0, ns(0), at(0))
    index.record_look(KEY, 10, ns(-10), at(-10))
    index.record_look(KEY, 20, ns(-8), at(-8))
    index.store_due(0.0, is_last=True)
    again = ArrivalIndex(journal)
    assert (seconds_of(again, 20, 0), seconds_of(again, 20, 15)) == ((0, 0), (0, 0))


def test_checks_within_a_second_count_as_one(journal: Journal) -> None:
    """So a busy file costs no more than one block a second."""
    index = ArrivalIndex(journal)
    for number in range(400):
        index.record_look(KEY, number * 10, ns(number / 4), at(number / 4))
    known = index.of(KEY, 4000)
    assert known is not None
    assert len(known._last) <= 101
    for number in range(1, 400):
        after, until = seconds_of(index, 4000, number * 10 - 5)
        assert after is not None
        assert number / 4 - 1.3 <= after <= number / 4 <= until <= number / 4 + 1.01


def test_arrivals_are_known_after_a_restart(tmp_path: Path) -> None:
    """They are known up to the last stored state; growth during the downtime is as uncertain as the downtime."""
    with closing(Journal(tmp_path)) as journal:
        index = ArrivalIndex(journal)
        for second in range(700):
            index.record_look(KEY, second * 10, ns(second), at(second))
        index.store_due(0.0)
    with closing(Journal(tmp_path)) as journal:
        index = ArrivalIndex(journal)
        index.record_look(KEY, 7000, ns(1000), at(1001))
        index.record_look(KEY, 7000, ns(1000), at(1300))
        index.record_look(KEY, 7100, ns(1300.5), at(1301))
        index.store_due(10.0)
        for second in (5, 300, 690):
            after, until = seconds_of(index, 7100, second * 10 - 5)
            assert after is not None
            assert second - 1.01 <= after < until <= second + 1.01
        assert seconds_of(index, 7100, 6995) == (699, 1000)
        assert seconds_of(index, 7100, 7050) == (1300, 1300.5)


def test_a_file_that_shrank_is_a_different_file(journal: Journal) -> None:
    """Its earlier arrivals are not used for the new content, whether they are stored or not."""
    index = ArrivalIndex(journal)
    for second in range(300):
        index.record_look(KEY, second * 10, ns(second), at(second))
    index.store_due(0.0)
    index.record_look(KEY, 20, ns(400), at(400))
    assert seconds_of(index, 20, 0) == (None, 400)
    index.record_look(KEY, 5000, ns(500), at(500))
    assert seconds_of(index, 5000, 2000) == (400, 500)
    index.store_due(10.0)
    assert seconds_of(index, 5000, 2000) == (400, 500)
    assert index.of(KEY, 4999) is None
    index.forget(KEY)
    assert index.of(KEY, 5000) is None


def test_a_late_scan_result_does_not_revert_a_newer_check(journal: Journal) -> None:
    """Two threads check, and one of them reports late."""
    index = ArrivalIndex(journal)
    index.record_look(KEY, 100, ns(0), at(0))
    index.record_look(KEY, 300, ns(5), at(5))
    index.record_scan([FoundFile("/log", *KEY, 200, ns(4), None)], at(4.2), at(5.5))
    assert seconds_of(index, 300, 250) == (0, 5)


def test_what_a_scan_finds_first_arrived_after_the_previous_scan(journal: Journal) -> None:
    """An older modification time takes precedence; files without writes for a day are forgotten."""
    index = ArrivalIndex(journal)
    index.record_scan([], at(0), at(0.1))
    fresh, moved, old = (
        FoundFile("/new", 1, 5, 50, ns(0.8), None),
        FoundFile("/moved", 1, 6, 50, ns(-60), None),
        FoundFile("/old", 1, 7, 50, ns(-90_000), None),
    )
    index.record_scan([fresh, moved, old], at(1), at(1.1))
    first = index.of((1, 5), 50)
    second = index.of((1, 6), 50)
    assert first is not None
    assert second is not None
    assert first.of(10, at(9))[:2] == (at(0), at(0.8))
    assert second.of(10, at(9)).after is None
    assert index.of((1, 7), 50) is None
    # The old file is written again: its first bytes are not as new as that.
    index.record_scan([FoundFile("/old", 1, 7, 60, ns(2), None)], at(2.5), at(2.6))
    third = index.of((1, 7), 60)
    assert third is not None
    assert third.of(10, at(9)).after is None


def test_the_arrivals_of_a_file_stay_bounded_however_long_it_is_written(
    journal: Journal, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Older arrivals are known less exactly, but never wrongly."""
    monkeypatch.setattr(arrivals, "_BLOCKS_OF_CHUNK", 16)
    monkeypatch.setattr(arrivals, "MOST_CHUNKS", 8)
    index = ArrivalIndex(journal)
    for second in range(3000):
        index.record_look(KEY, second * 10, ns(second), at(second))
        if second % 50 == 0:
            index.store_due(second)
    index.store_due(9999.0)
    ((rows,),) = journal.rows("SELECT COUNT(*) FROM log_arrivals")
    assert rows <= 10
    spans = []
    for second in range(1, 3000, 7):
        after, until = seconds_of(index, 30_000, second * 10 - 5)
        after = 0.0 if after is None else after
        assert after <= second <= until + 0.001
        spans.append(until - after)
    assert max(spans[-10:]) < 20
    assert max(spans) < 400


def test_the_first_position_whose_bytes_can_be_as_new_as_a_time_is_found(journal: Journal) -> None:
    """No byte before it arrived at that time or later."""
    choice = random.Random(5)
    index = ArrivalIndex(journal)
    size, moments = 0, []
    for number in range(1200):
        second = number * 3.0
        size += choice.randint(1, 50)
        moments.append((second, size))
        index.record_look(KEY, size, ns(second), at(second))
    index.store_due(0.0)
    known = index.of(KEY, size)
    assert known is not None
    for wanted in (-10.0, 0.0, 1.0, 1000.5, 2399.0, 3597.0, 3598.0):
        expected = max((each for second, each in moments if second < wanted), default=0)
        assert known.first_offset(at(wanted)) == expected


def test_files_with_large_inode_numbers_are_supported(tmp_path: Path) -> None:
    """FUSE, NFS and CephFS use all 64 bits. One such file must not prevent other files' state from being stored."""
    large, other = (2**64 - 5, 2**63 + 7), (1, 7)
    with closing(Journal(tmp_path)) as journal:
        index = ArrivalIndex(journal)
        for key in (large, other):
            index.record_look(key, 0, ns(0), at(0))
            index.record_look(key, 100, ns(10.5), at(11))
        index.store_due(0.0, is_last=True)
    with closing(Journal(tmp_path)) as journal:
        index = ArrivalIndex(journal)
        for key in (large, other):
            known = index.of(key, 100)
            assert known is not None
            assert known.of(50, at(20)).at == at(10.5)
        index.forget(large)
        index.store_due(10.0, is_last=True)
        assert ArrivalIndex(journal).of(large, 100) is None
