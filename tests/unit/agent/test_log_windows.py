"""A window of time has the lines that were written in it, whatever they state of that."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import closing
from datetime import UTC, datetime, timedelta
from itertools import pairwise
from pathlib import Path
from zoneinfo import ZoneInfo

import pytest

from tests.support.timed_log import TimedLog, texts
from trainmedic_agent.journal import Journal
from trainmedic_agent.log_reading.arrivals import ArrivalIndex
from trainmedic_agent.log_search import file_lines
from trainmedic_logs.domain.log_search import FoundLine, LogQuery, TimeKnownBy

BEGAN = datetime(2026, 3, 9, 7, tzinfo=UTC)
SECOND = timedelta(seconds=1)


@pytest.fixture(autouse=True)
def _made_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Files are older than what arrives in them."""
    monkeypatch.setattr(file_lines, "born_at", lambda _: BEGAN)


@pytest.fixture
def index(tmp_path: Path) -> Iterator[ArrivalIndex]:
    with closing(Journal(tmp_path / "state")) as journal:
        yield ArrivalIndex(journal)


@pytest.fixture
def log(tmp_path: Path, index: ArrivalIndex) -> TimedLog:
    return TimedLog(tmp_path / "log", index, BEGAN)


def window(since: float, until: float | None = None, **more: object) -> LogQuery:
    end = BEGAN + until * SECOND if until is not None else None
    return LogQuery("llm-1", BEGAN + since * SECOND, end, **more)  # type: ignore[arg-type]


FORMS: dict[str, Callable[[datetime, str], str]] = {
    "zone": lambda at, word: f"{at.isoformat()} {word}",
    "python": lambda at, word: f"{at:%Y-%m-%d %H:%M:%S},{at.microsecond // 1000:03d} INFO {word}",
    "deepspeed": lambda at, word: f"[{at:%Y-%m-%d %H:%M:%S},{at.microsecond // 1000:03d}] [INFO] [a.py:1:f] {word}",
    "megatron": lambda at, word: f" [{at:%Y-%m-%d %H:%M:%S}] iteration {word}",
    "torchrun": lambda at, word: f"W{at:%m%d %H:%M:%S}.{at.microsecond:06d} 7 run.py:1] {word}",
    "factory": lambda at, word: f"[INFO|a.py:1] {at:%Y-%m-%d %H:%M:%S},{at.microsecond // 1000:03d} >> {word}",
    "bare": lambda at, word: f"step {word}",
}


@pytest.mark.parametrize("form", FORMS)
def test_a_window_in_the_past_returns_exactly_its_lines(form: str, log: TimedLog) -> None:
    """The log has one line in four seconds over an hour, in each form."""
    for number in range(900):
        log.wait(4)
        log.write(FORMS[form](log.now, str(number)))
    assert texts(log.lines(window(3541.5), UTC)) == [str(number) for number in range(885, 900)]
    assert texts(log.lines(window(401, 441), UTC)) == [str(number) for number in range(100, 110)]
    assert log.lines(window(3601), UTC) == []
    (line,) = log.lines(window(403, 405), UTC)
    assert abs(line.at - (BEGAN + 404 * SECOND)) <= SECOND


def test_a_file_that_arrived_at_once_is_not_read_from_its_start(log: TimedLog) -> None:
    """For example, it was copied to the node. A second process, with a clock an hour behind, hides no line."""
    log.wait(7200)
    lines = []
    for number in range(70_000):
        at = log.now - timedelta(seconds=(70_000 - number) / 10)
        behind = timedelta(hours=1) if number % 3 == 0 else timedelta(0)
        lines.append(f"{at - behind:%Y-%m-%d %H:%M:%S.%f} {'padding ' * 10}{number}")
    log.write(*lines)
    found, file = log.answer(window(7190), UTC)
    assert texts(found) == [str(number) for number in range(69_900, 70_000) if number % 3]
    assert file._budget._left > (1 << 32) - file._size // 2


def test_each_answer_states_how_a_time_is_known(log: TimedLog) -> None:
    """The answer also states the possible error."""
    log.wait(10)
    log.write(FORMS["zone"](log.now, "a"), FORMS["python"](log.now, "b"), "  File c")
    log.wait(10)
    log.write("step d")
    lines = log.lines(window(0), UTC)
    assert [(line.known_by, (line.at - BEGAN) / SECOND) for line in lines] == [
        (TimeKnownBy.LINE, 10),
        (TimeKnownBy.NODE_ZONE, 10),
        (TimeKnownBy.NEIGHBOURS, 10),
        (TimeKnownBy.ARRIVAL, 20),
    ]
    assert [line.time_error for line in lines] == [None, None, 0.0, 0.25]
    assert [FoundLine.of_json(line.to_json()) for line in lines] == lines


@pytest.mark.parametrize("seed", range(12))
def test_any_mixture_of_lines_returns_exactly_those_of_the_window(seed: int, log: TimedLog) -> None:
    """Lines with and without a time are written at any times; a model computes the expected answer."""
    choice = random.Random(seed)
    model: list[tuple[float, str]] = []
    forms = list(FORMS)
    for number in range(300):
        log.wait(choice.choice([0.3, 0.7, 2.0, 5.0, 60.0]))
        second = (log.now - BEGAN) / SECOND
        words = [f"{number}-{each}" for each in range(choice.randint(1, 4))]
        model += [(second, word) for word in words]
        log.write(*(FORMS[choice.choice(forms)](log.now, word) for word in words))
    moments = sorted({second for second, _ in model})
    gaps = [(first + second) / 2 for first, second in pairwise(moments) if second - first >= 1.9]
    for _ in range(20):
        since, until = sorted(choice.sample([-1.0, *gaps, moments[-1] + 5], 2))
        expected = [word for second, word in model if since <= second < until]
        assert texts(log.lines(window(since, until), UTC)) == expected, (seed, since, until)


@pytest.mark.parametrize("seed", range(4))
def test_buffered_output_has_the_times_of_its_lines(seed: int, log: TimedLog) -> None:
    """A buffering program writes minutes late; lines without a time lie between those that have one."""
    choice = random.Random(seed)
    waiting: list[str] = []
    model: list[tuple[float, str]] = []
    for number in range(400):
        log.wait(3.0)
        second = (log.now - BEGAN) / SECOND
        waiting.append(FORMS["python"](log.now, f"{number}"))
        model.append((second, f"{number}"))
        for each in range(choice.randint(0, 2)):
            waiting.append(f"  more of it {number}-{each}")
            model.append((second, f"{number}-{each}"))
        if len(waiting) > 80 or number == 399:
            waiting.append(FORMS["python"](log.now, f"{number}-end"))
            model.append((second, f"{number}-end"))
            log.wait(90.0)
            log.write(*waiting)
            waiting = []
    moments = sorted({second for second, _ in model})
    for _ in range(10):
        since, until = (second + 1.5 for second in sorted(choice.sample(moments, 2)))
        expected = [word for second, word in model if since <= second < until]
        assert texts(log.lines(window(since, until), UTC)) == expected


def test_lines_that_arrived_unobserved_are_excluded_unless_the_window_covers_that_time(
    log: TimedLog,
) -> None:
    """The time of their writing is unknown, and the answer reports it."""
    log.wait(10)
    log.write("step a")
    log.now += 600 * SECOND  # the agent was away
    log.write("step b", "step c")
    log.wait(60)
    log.write("step d")
    assert texts(log.lines(window(0), UTC)) == ["a", "b", "c", "d"]
    lines, file = log.answer(window(500), UTC)
    assert texts(lines) == ["d"]
    left_out = file.left_out["time"]
    assert (left_out.lines, left_out.since) == (2, BEGAN + 10 * SECOND)
    assert texts(log.lines(window(10), UTC)) == ["a", "b", "c", "d"]


def test_another_time_at_the_start_of_a_line_is_not_its_own(log: TimedLog) -> None:
    """A program that prints times of its data at the beginning of lines arrives now."""
    for number in range(30):
        log.wait(10)
        log.write(f"2019-07-{number + 1:02d} 12:00:00 price {number}", f"2041-01-01 00:00:00 forecast x{number}")
    assert texts(log.lines(window(245), UTC)) == [
        "24",
        "x24",
        "25",
        "x25",
        "26",
        "x26",
        "27",
        "x27",
        "28",
        "x28",
        "29",
        "x29",
    ]
    (line, _) = log.lines(window(155, 165), UTC)
    assert (line.known_by, texts([line])) == (TimeKnownBy.ARRIVAL, ["15"])


@pytest.mark.parametrize("zone", ["America/Los_Angeles", "Asia/Shanghai"])
def test_a_container_in_another_time_zone_than_its_node_is_detected(zone: str, log: TimedLog) -> None:
    """The arrival of its lines shows it."""
    for number in range(60):
        log.wait(10)
        log.write(FORMS["python"](log.now, str(number)))
    lines = log.lines(window(305, 335), ZoneInfo(zone))
    assert texts(lines) == ["30", "31", "32"]
    assert {line.known_by for line in lines} == {TimeKnownBy.ARRIVAL_ZONE}


def test_the_end_of_summer_time_puts_no_line_into_another_hour(
    tmp_path: Path, index: ArrivalIndex, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The clock shows one hour twice; the test runs with arrivals and without."""
    zone, began = ZoneInfo("Europe/Berlin"), datetime(2026, 10, 24, 23, 30, tzinfo=UTC)
    monkeypatch.setattr(file_lines, "born_at", lambda _: began)
    for log in (TimedLog(tmp_path / "known", index, began), TimedLog(tmp_path / "unknown", None, began)):
        for number in range(150):
            log.wait(60)
            log.write(FORMS["python"](log.now.astimezone(zone), str(number)))
        query = LogQuery("llm-1", began + 44.5 * 60 * SECOND, began + 74.5 * 60 * SECOND)
        assert texts(log.lines(query, zone)) == [str(number) for number in range(44, 74)]


def test_a_new_year_is_not_a_clock_jump(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The times have no year, and the file was never checked before."""
    began = datetime(2025, 12, 31, 23, 50, tzinfo=UTC)
    monkeypatch.setattr(file_lines, "born_at", lambda _: began)
    log = TimedLog(tmp_path / "log", None, began)
    for number in range(120):
        log.wait(10)
        log.write(FORMS["torchrun"](log.now, str(number)))
    lines, file = log.answer(LogQuery("llm-1", began + 575 * SECOND, began + 625 * SECOND), UTC)
    assert texts(lines) == ["57", "58", "59", "60", "61"]
    assert not file.clock.goes_back


def test_a_finished_file_that_was_never_checked_is_shown_whole_or_not_at_all(tmp_path: Path) -> None:
    """Its lines came between its beginning and when it was last written."""
    log = TimedLog(tmp_path / "log", None, BEGAN)
    log.wait(600)
    log.write("step a", "step b")
    lines, file = log.answer(window(300, 900), UTC)
    assert (lines, file.left_out["time"].lines) == ([], 2)
    lines, _ = log.answer(window(-10, 900), UTC)
    assert [(line.known_by, line.time_error) for line in lines] == [(TimeKnownBy.FILE, 600.0)] * 2
    assert log.lines(window(700), UTC) == []


def test_a_clock_that_was_set_back_is_detected(log: TimedLog) -> None:
    """The order is that of the file, and the answer reports it."""
    for number in range(20):
        log.wait(10)
        shift = timedelta(minutes=5) if number >= 10 else timedelta()
        log.write(FORMS["zone"](log.now - shift, str(number)))
    lines, file = log.answer(window(-1000), UTC)
    assert texts(lines) == [str(number) for number in range(20)]
    assert file.clock.goes_back


def test_arrivals_of_an_earlier_file_with_the_same_inode_number_are_not_used(
    log: TimedLog, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file system gives the number of a deleted file to the next one."""
    log.wait(10)
    log.write("step a")
    log.wait(3600)
    log.write("step b")
    monkeypatch.setattr(file_lines, "born_at", lambda _: BEGAN + 3000 * SECOND)
    assert {line.known_by for line in log.lines(window(0), UTC)} == {TimeKnownBy.FILE}
