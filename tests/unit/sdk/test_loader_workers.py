"""An upper bound of the loaders' workers reaches only who knows it, and all ranks decide alike."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from trainmedic.errors import Rejected
from trainmedic.job import parameters
from trainmedic.job.command import JobCommand
from trainmedic.job.handlers import NO_UPPER_BOUND, HandlerRegistry
from trainmedic.recovery.changes import agreed_workers
from trainmedic.wire import envelope

ACTION = "job.dataloader_workers"
NOW = datetime(2026, 3, 5, tzinfo=UTC)
Answers = list[tuple[str, Mapping[str, Any]]]


def command(answers: Answers, **params: int) -> JobCommand:
    sent = envelope.Command(
        id="0195f0c0-0000-7000-8000-000000000007", action=ACTION, target={"kind": "job", "job": "bert"}, params=params,
        run_id="r", playbook="p", reason="", issued_at=NOW, expires_at=NOW + timedelta(minutes=1),
    )  # fmt: skip
    typed = parameters.parse(ACTION, params)
    return JobCommand(sent, typed, None, lambda _, status, output: answers.append((status, output)))


def registry() -> HandlerRegistry:
    return HandlerRegistry("bert", {}, contextlib.nullcontext)


def test_a_loop_that_takes_commands_itself_gets_no_bound_it_may_not_know() -> None:
    """It would look for a count in the parameters and end the training if there is none."""
    answers: Answers = []
    returned = registry().carry_out([command(answers, at_most=4), command(answers, count=4)])
    assert [one.params for one in returned] == [{"count": 4}]
    assert answers == [("unsupported", {"reason": NO_UPPER_BOUND})]


def test_a_registered_handler_receives_the_bound() -> None:
    """An exception that it raises is an answer, and does not end the training."""
    answers: Answers = []
    handlers = registry()
    handlers.register(ACTION, lambda one: {"previous": 9, "count": agreed_workers(one, 9)}, "live")
    assert handlers.carry_out([command(answers, at_most=4)]) == []
    assert answers == [("applied", {"previous": 9, "count": 4})]


class Ranks:
    """The group of this rank and others that have these numbers of workers."""

    rank, world_size = 1, 3

    def __init__(self, *counts: int) -> None:
        self._counts = counts

    def choose(self, make: Any, patience: float = 0) -> Any:
        raise NotImplementedError

    def poll(self, value: Any = None, patience: float = 0) -> Mapping[int, Any]:
        return dict(enumerate((*self._counts, value)))


@pytest.mark.parametrize(
    ("others", "own", "said"),
    [
        ((6, 6), 6, None),
        ((2, 2), 2, "nothing to lower"),
        ((6, 1), 1, r"different numbers of workers \(1, 6\)"),
        ((1, 1), 6, r"different numbers of workers \(1, 6\)"),
    ],
)
def test_all_ranks_lower_their_workers_or_none_does(others: tuple[int, ...], own: int, said: str | None) -> None:
    """The undo gives every rank the number that rank 0 had."""
    asked = command([], at_most=2)
    asked.group = Ranks(*others)
    if said is None:
        assert agreed_workers(asked, own) == 2
    else:
        with pytest.raises(Rejected, match=said):
            agreed_workers(asked, own)
