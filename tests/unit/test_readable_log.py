"""Log lines as a person at a terminal reads them."""

from __future__ import annotations

import io
import logging

from trainmedic_server import telemetry


def test_a_line_for_a_terminal_is_readable_and_cannot_steer_it() -> None:
    """Time of day, level, sentence and values; no JSON, and no escape sequence of whoever chose a value."""
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    stream = io.StringIO()
    telemetry.configure_logging("INFO", stream, readable=True)
    try:
        telemetry.logger("test").warning("an agent is lost", node="node-1\x1b[2J")
    finally:
        root.handlers[:] = handlers
        root.setLevel(level)
    line = stream.getvalue()
    assert line[2] == line[5] == ":"
    assert "an agent is lost" in line
    assert "warning" in line
    assert "\x1b" not in line
    assert "\\x1b[2J" in line
