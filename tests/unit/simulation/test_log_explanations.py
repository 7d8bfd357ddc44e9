"""What ``trainmedic logs explain`` makes of a file."""

from __future__ import annotations

import io
import tracemalloc
from datetime import UTC, datetime

from trainmedic_logs.lines.rule import RuleSet
from trainmedic_logs.simulation.log_lines import explain


class Endless(io.BufferedIOBase):
    """So many bytes without a line feed, and then a line."""

    def __init__(self, size: int) -> None:
        self._left = size
        self._last = b"\nlast line\n"

    def read1(self, size: int = -1) -> bytes:
        if self._left <= 0:
            last, self._last = self._last, b""
            return last
        self._left -= size
        return b"x" * size


def test_the_end_of_dockers_log_needs_no_line_feed() -> None:
    """It is explained at the line where it begins."""
    parts = [f'{{"log":"{text}","stream":"stderr","time":"2025-01-01T00:00:00Z"}}' for text in ("a\\n", "b", "c")]
    told = explain(io.BytesIO("\n".join(parts).encode()), "training", RuleSet(), datetime.now(UTC))
    assert [(line.number, line.text) for line in told] == [(1, "a"), (2, "bc"), (3, "")]


def test_one_enormous_line_takes_little_memory() -> None:
    """Its beginning is explained, as rules would see it, and the next line has the next number."""
    tracemalloc.start()
    try:
        told = list(explain(Endless(64 * 1024 * 1024), "training", RuleSet(), datetime.now(UTC)))
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert [(line.number, line.text[:9]) for line in told] == [(1, "xxxxxxxxx"), (2, "last line")]
    assert peak < 4 * 1024 * 1024
