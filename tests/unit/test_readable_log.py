"""Log lines as a person at a terminal reads them."""

from __future__ import annotations

import io
import logging

import pytest

from trainmedic_server import telemetry


@pytest.mark.parametrize("readable", [False, True])
@pytest.mark.parametrize("user", ["half \ud800", "\0", "\u202e", "😀", float("nan"), 2**80, {"a": ["\udfff"]}])
def test_no_value_ends_who_logs_it(user: object, readable: bool) -> None:
    """Presses, labels and names come from outside, and JSON can hold half a surrogate pair."""
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    stream = io.TextIOWrapper(io.BytesIO(), "utf-8", write_through=True)
    telemetry.configure_logging("INFO", stream, readable=readable)
    try:
        telemetry.logger("test").warning("somebody unknown has pressed", user=user)
        logging.getLogger("library").warning("of %s", user)
    finally:
        root.handlers[:] = handlers
        root.setLevel(level)
    stream.seek(0)
    lines = stream.read().splitlines()
    assert len(lines) == 2
    assert "somebody unknown has pressed" in lines[0]


def test_a_line_for_a_terminal_is_readable_and_cannot_steer_it() -> None:
    """Time of day, level, sentence and values; no JSON, and no escape sequence of whoever chose a value."""
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    stream = io.StringIO()
    telemetry.configure_logging("INFO", stream, readable=True)
    try:
        telemetry.logger("test").warning("agent lost", node="node-1\x1b[2J")
    finally:
        root.handlers[:] = handlers
        root.setLevel(level)
    line = stream.getvalue()
    assert line[2] == line[5] == ":"
    assert "agent lost" in line
    assert "warning" in line
    assert "\x1b" not in line
    assert "\\x1b[2J" in line


@pytest.mark.parametrize("readable", [False, True])
def test_values_that_our_modules_give_to_the_standard_logger_are_shown(
    readable: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Modules without the server's packages log that way. What libraries give is for formatters of their own: uvicorn
    repeats its message with colours, and another name could replace the event."""
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    for name in ("uvicorn", "uvicorn.error"):  # a server that another test has run may have silenced them
        for attribute, value in {"disabled": False, "propagate": True, "level": logging.NOTSET}.items():
            monkeypatch.setattr(logging.getLogger(name), attribute, value)
    stream = io.StringIO()
    telemetry.configure_logging("INFO", stream, readable=readable)
    try:
        log = logging.getLogger("trainmedic_server.rules")
        log.warning("cannot load log rule", extra={"problem": "a.yaml:3"})
        colours = {"color_message": "Started [\x1b[36m%d\x1b[0m]", "event": "replaced"}
        logging.getLogger("uvicorn.error").warning("Started", extra=colours)
    finally:
        root.handlers[:] = handlers
        root.setLevel(level)
    ours, theirs = stream.getvalue().splitlines()
    assert "a.yaml:3" in ours
    assert "Started" in theirs
    assert "36m" not in theirs
    assert "replaced" not in theirs
