"""A stream's lines on their way to the rules, over restarts."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

from hypothesis import given
from hypothesis import strategies as st

from trainmedic_agent.log_reading.job_budgets import LineBudget
from trainmedic_agent.log_reading.line_cutter import PlacedLine
from trainmedic_agent.log_reading.streams import LineStream, excerpt_of
from trainmedic_logs.domain.finding import Origin

NOW = datetime(2026, 1, 1, tzinfo=UTC)
ORIGIN = Origin("launcher", "n1", job="llm-1", stream="/x")

TRACEBACK = ["Traceback (most recent call last):", '  File "train.py", line 1, in <module>', "    boom()"]
RANKS = st.lists(
    st.tuples(st.integers(0, 2), st.sampled_from([*TRACEBACK, "ValueError: bad", "step 1", ""])), max_size=30
)


def placed(said: list[tuple[int, str]]) -> list[PlacedLine]:
    """Lines of several ranks in one file."""
    lines, place = [], 0
    for rank, text in said:
        raw = f"[rank{rank}]: {text}".encode()
        lines.append((place, raw))
        place += len(raw) + 1
    return lines


@given(RANKS, st.integers(0, 30), st.none() | st.integers(0, 30))
def test_reading_again_after_a_restart_shows_each_line_once(
    said: list[tuple[int, str]], after: int, between: int | None
) -> None:
    """Blocks of several ranks wait side by side: lines seen between them are not shown again."""
    lines = placed(said)
    whole = LineStream(ORIGIN, None, {})
    wanted = [*whole.feed(lines, NOW), *whole.flush(None)]
    first = LineStream(ORIGIN, None, {})
    shown = first.feed(lines[:after], NOW)
    begin = first.oldest_place
    second = LineStream(ORIGIN, None, first.to_json())
    again = lines[after:] if begin is None else [line for line in lines if line[0] >= begin]
    if between is not None:
        shown += second.feed(again[:between], NOW)
        begin = second.oldest_place
        again = again[between:] if begin is None else [line for line in again if line[0] >= begin]
        second = LineStream(ORIGIN, None, second.to_json())
    shown += [*second.feed(again, NOW), *second.flush(None)]
    assert sorted((line.place, line.text) for line in shown) == sorted((line.place, line.text) for line in wanted)


def test_blocks_that_waited_long_are_returned() -> None:
    """The last line of a traceback never arrived."""
    stream = LineStream(ORIGIN, None, {})
    assert stream.feed(placed([(0, text) for text in TRACEBACK]), NOW) == []
    assert stream.flush(NOW + timedelta(seconds=1)) == []
    (line,) = stream.flush(NOW + timedelta(seconds=10))
    assert line.text == "\n".join(TRACEBACK)


def test_secrets_of_one_line_and_of_several_are_masked() -> None:
    """A key of several lines is replaced as a whole where the lines stay as many, else each line by itself."""
    key = [b"-----BEGIN PRIVATE KEY-----", b"MIIEvQIBADANBgkqh", b"-----END PRIVATE KEY-----"]
    excerpt = excerpt_of([b"token=abcdef123456"], [b"MARK", *key])
    assert excerpt is not None
    assert excerpt.lines[:2] == ("token=***", "MARK")
    assert "PRIVATE" not in "".join(excerpt.lines)
    assert "MIIEvQ" not in "".join(excerpt.lines)


def test_a_budget_saves_ten_seconds_and_samples_the_rest() -> None:
    """Of lines beyond it, every hundredth passes; later there is capacity again."""
    budget = LineBudget(10)
    lines = [(number, b"x") for number in range(300)]
    assert len(budget.within(lines, 0.0)) == 100 + 2
    assert len(budget.within(lines, 0.0)) == 3
    assert len(budget.within(lines[:50], 4.0)) == 40 + 1
    assert LineBudget(None).within(lines, 0.0) == lines
