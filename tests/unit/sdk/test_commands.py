"""A command is answered once, with what JSON can carry."""

from __future__ import annotations

import contextlib
import json
import logging
import math
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest

from tests.support.messages import make_command, make_job_command
from trainmedic.job.command import JobCommand, plain
from trainmedic.job.handlers import HandlerRegistry
from trainmedic.job.queue import CommandQueue
from trainmedic.wire import envelope, undoing
from trainmedic.wire.command_book import CommandRecord
from trainmedic.wire.command_memory import CommandMemory

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


def queue() -> CommandQueue:
    handlers = HandlerRegistry("llm-1", {}, contextlib.nullcontext)
    memory = CommandMemory("job:llm-1", "p1")
    return CommandQueue("llm-1", "node-1", memory, handlers, lambda replies: None, lambda *_: None)


def closed(sent: envelope.Command, status: str, output: Mapping[str, Any]) -> None:
    queue().close(JobCommand(sent, None, b"1-0", lambda *_: None), status, output)


def test_each_change_has_a_line_in_the_jobs_own_log(caplog: pytest.LogCaptureFixture) -> None:
    """With its numbers and its run, and none of the alert's text, which rules would take for the job's."""
    sent = make_command(params={"factor": 0.5, "note": "CUDA out of memory"})
    closed(sent, envelope.APPLIED, {"step": 40, "learning_rate": 0.0005, "reason": "NCCL error"})
    closed(make_command(undo_of=sent.id, params={"factor": 2.0}), envelope.APPLIED, {"step": 90})
    assert [record.getMessage() for record in caplog.records] == [
        'llm-1: applied job.scale_lr {"factor": 0.5}: {"step": 40, "learning_rate": 0.0005}, run run-1 of loss-spike',
        'llm-1: reverted job.scale_lr {"factor": 2.0}: {"step": 90}, run run-1 of loss-spike',
    ]


def test_what_changed_nothing_has_no_line(caplog: pytest.LogCaptureFixture) -> None:
    """A refusal, a failure, and the undo of a command that never was."""
    for status in (envelope.REJECTED, envelope.FAILED, envelope.UNSUPPORTED):
        closed(make_command(), status, {"reason": "no"})
    closed(make_command(undo_of="c0"), envelope.APPLIED, undoing.nothing_to_undo(undoing.NEVER_APPLIED))
    assert caplog.records == []


def test_a_change_to_several_ranks_has_one_line(caplog: pytest.LogCaptureFixture) -> None:
    """Rank 0 writes it."""
    command = JobCommand(make_command(), None, b"1-0", lambda *_: None)
    command.outcomes = {0: (envelope.APPLIED, {"step": 7}), 1: (envelope.APPLIED, {"step": 7})}
    queue().close_ranks(command, [])
    assert len(caplog.records) == 1


def test_an_answer_at_the_end_that_fails_prevents_no_other(
    command: JobCommand, answers: list[Any], caplog: pytest.LogCaptureFixture
) -> None:
    """The job closes, and answers the rest."""
    command.later(lambda: 1 // 0)  # type: ignore[arg-type, return-value]
    with caplog.at_level(logging.ERROR, "trainmedic"):
        command.end("the job ended")
    assert answers == [("failed", {"reason": "the job ended"})]
    assert "ZeroDivisionError" in caplog.text


def test_a_handler_returns_any_mapping(command: JobCommand, answers: list[Any]) -> None:
    """As its type says, not only a dict."""
    registry = HandlerRegistry("llm", {}, contextlib.nullcontext)
    registry.register("job.stop", lambda _: MappingProxyType({"before": 0.1}), "live")
    assert registry.carry_out([command]) == []
    assert answers == [("applied", {"before": 0.1})]
