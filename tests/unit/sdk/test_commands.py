"""A command is answered once, with what JSON can carry."""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from tests.support.messages import make_job_command
from trainmedic.job.command import JobCommand, plain
from trainmedic.wire import envelope
from trainmedic.wire.command_book import CommandRecord

NOW = datetime(2026, 1, 31, 12, 0, tzinfo=UTC)


@pytest.fixture
def answers() -> list[tuple[str, Mapping[str, Any]]]:
    return []


@pytest.fixture
def command(answers: list[tuple[str, Mapping[str, Any]]]) -> JobCommand:
    return make_job_command("job.stop", answers, NOW)


def test_each_answer_has_its_status_and_reason(command: JobCommand, answers: list[Any]) -> None:
    """The first one counts, and a second is told in the log."""
    command.rejected("no checkpoint")
    assert answers == [("rejected", {"reason": "no checkpoint"})]
    assert command.is_answered
    assert "rejected" in repr(command)


def test_a_second_answer_is_logged_and_does_not_raise(
    command: JobCommand, answers: list[Any], caplog: pytest.LogCaptureFixture
) -> None:
    """Training goes on."""
    command.applied()
    with caplog.at_level(logging.ERROR, "trainmedic"):
        command.failed("too late")
    assert [status for status, _ in answers] == ["applied"]
    assert "c1" in caplog.text


def test_an_output_may_hold_what_frameworks_have(command: JobCommand, answers: list[Any]) -> None:
    """Paths, tensors of one element, tuples and what is not finite become plain JSON."""

    class Tensor:
        def item(self) -> float:
            return 0.5

    class Matrix:
        def item(self) -> float:
            raise RuntimeError("more than one element")

        def __str__(self) -> str:
            return "a matrix"

    command.applied({"path": Path("/a"), "loss": Tensor(), "all": (1, Matrix())}, lr=math.inf, fine=True)
    (_, output) = answers[0]
    assert output == {"path": "/a", "loss": 0.5, "all": [1, "a matrix"], "lr": "inf", "fine": True}
    json.dumps(output, allow_nan=False)


def test_an_output_that_contains_itself_ends() -> None:
    """Depth is limited, and so is length."""
    endless: dict[str, Any] = {"long": "x" * 100_000}
    endless["self"] = endless
    assert len(json.dumps(plain(endless))) < 100_000


@pytest.mark.parametrize("raw", [b"", b"{", b"[]", b'{"by": "x"}', b'{"by": "x", "status": "fine", "output": {}}'])
def test_a_memory_that_cannot_be_read_counts_as_begun_by_somebody_else(raw: bytes) -> None:
    """Better not applied than applied twice."""
    known = CommandRecord.decode(raw, "p1")
    assert (known.is_ours, known.status) == (False, envelope.ACCEPTED)


def test_a_memory_is_read_as_it_was_written() -> None:
    """Status, output, those of ranks that differ, and whose it is."""
    known = CommandRecord(envelope.APPLIED, {"after": 0.5}, {1: (envelope.FAILED, {"reason": "no"})})
    assert CommandRecord.decode(known.encode("p1"), "p1") == known
    assert not CommandRecord.decode(known.encode("p1"), "p2").is_ours


class Unspeakable:
    """Raises when it is asked what it is."""

    def __str__(self) -> str:
        raise RuntimeError("no")


@pytest.mark.parametrize("output", [{"a": Unspeakable()}, {Unspeakable(): 1}, {"a": [{"b": Unspeakable()}]}])
def test_an_output_that_cannot_be_told_does_not_raise(
    command: JobCommand, answers: list[Any], output: dict[Any, Any], caplog: pytest.LogCaptureFixture
) -> None:
    """What was done is done: the answer says so, and that the rest is not known."""
    command.applied(output)
    assert answers == [("applied", {"reason": "its output cannot be converted: RuntimeError"})]
    assert "cannot convert the output" in caplog.text


def test_a_whole_number_of_any_length_can_be_told(command: JobCommand, answers: list[Any]) -> None:
    """Python refuses to write out those of thousands of digits."""
    command.applied(a=10**5000, b=7)
    assert json.loads(json.dumps(answers[0][1])) == {"a": "a whole number that is too long", "b": 7}
