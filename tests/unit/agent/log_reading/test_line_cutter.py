"""Cutting a file into lines."""

from __future__ import annotations

import random
import tracemalloc

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainmedic_agent.log_reading.line_cutter import MOST_KEPT, LineCutter

CONTENT = st.lists(
    st.one_of(
        st.binary(max_size=20).map(lambda raw: raw.replace(b"\n", b"")),
        st.integers(MOST_KEPT - 3, MOST_KEPT + 50).map(lambda size: b"x" * size),
    ),
    max_size=12,
).map(b"\n".join)


def pieces(content: bytes, seed: int) -> list[bytes]:
    """The content, cut anywhere."""
    rng = random.Random(seed)
    cuts = sorted(rng.randrange(len(content) + 1) for _ in range(rng.randrange(8)))
    return [content[begin:end] for begin, end in zip([0, *cuts], [*cuts, len(content)], strict=True)]


def expected(content: bytes) -> list[tuple[int, bytes]]:
    """Each whole line, and the beginning of an unfinished one that is too long."""
    *whole, rest = content.split(b"\n")
    lines, place = [], 0
    for line in whole:
        lines.append((place, line[:MOST_KEPT]))
        place += len(line) + 1
    return [*lines, (place, rest[:MOST_KEPT])] if len(rest) >= MOST_KEPT else lines


@given(CONTENT, st.integers(0, 1000))
def test_lines_do_not_depend_on_how_the_file_is_read(content: bytes, seed: int) -> None:
    """The file arrives in pieces of any size: each line is returned once, at its position."""
    cutter = LineCutter()
    assert [line for piece in pieces(content, seed) for line in cutter.feed(piece)] == expected(content)
    assert cutter.offset == len(content)


@given(CONTENT, st.integers(0, 1000), st.integers(0, 8))
def test_a_continued_reader_misses_no_line_and_repeats_none(content: bytes, seed: int, after: int) -> None:
    """A new cutter starts where the old one stopped, with its state of a long line."""
    cut = pieces(content, seed)
    first = LineCutter()
    lines = [line for piece in cut[:after] for line in first.feed(piece)]
    second = LineCutter(first.resume_at, first.is_skipping)
    lines += second.feed(content[first.resume_at :])
    assert lines == expected(content)


@pytest.mark.parametrize("size", [MOST_KEPT - 1, MOST_KEPT, MOST_KEPT + 1, 5 * MOST_KEPT])
def test_a_long_line_is_cut_and_the_next_line_follows(size: int) -> None:
    """The rest is skipped and counted, up to the line feed and no further."""
    cutter = LineCutter()
    lines = cutter.feed(b"a" * size + b"\nnext\n")
    assert lines == [(0, b"a" * min(size, MOST_KEPT)), (size + 1, b"next")]
    assert cutter.left_out == max(size - MOST_KEPT, 0)


def test_a_file_without_line_feeds_takes_no_memory() -> None:
    """The test uses one line of a hundred megabytes."""
    cutter = LineCutter()
    piece = b"x" * (256 * 1024)
    tracemalloc.start()
    lines = [line for _ in range(400) for line in cutter.feed(piece)]
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert [len(line) for _, line in lines] == [MOST_KEPT]
    assert peak < 2 * 1024 * 1024


def test_a_partial_line_can_be_returned_and_its_rest_is_a_separate_line() -> None:
    """A program that was killed has not ended its last line."""
    cutter = LineCutter()
    assert cutter.feed(b"whole\nhalf") == [(0, b"whole")]
    assert cutter.has_unfinished_line
    assert cutter.take_unfinished_line() == [(6, b"half")]
    assert cutter.feed(b" rest\n") == [(10, b" rest")]
