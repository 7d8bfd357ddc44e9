"""When a receiver's answer to an undo makes it certain that nothing is left to take back."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from tests.unit.actions.test_commands import NOW, ScriptedBus, bus, perform, replies
from trainmedic.wire import undoing
from trainmedic.wire.envelope import Reply
from trainmedic_server.actions import jobs
from trainmedic_server.actions.commands import undo_doubt
from trainmedic_server.errors import TemporaryFailure

__all__ = ["bus"]

BARE: Mapping[str, Any] = {"nothing_to_undo": True}
NEVER = undoing.nothing_to_undo(undoing.NEVER_APPLIED)
ENDED = undoing.nothing_to_undo(undoing.NOT_IN_FORCE, note="its lease had run out")


@pytest.mark.parametrize("output", [{}, {"watts": 400}, {"nothing_to_undo": False}, ENDED])
@pytest.mark.parametrize("was_applied", [True, False])
def test_what_was_taken_back_now_or_is_not_in_force_is_certain(output: Mapping[str, Any], was_applied: bool) -> None:
    """Whatever the server has on record: a cap that was applied may have ended with its lease."""
    assert undo_doubt(output, was_applied) is None


def test_a_command_that_was_never_applied_is_certain_unless_it_is_on_record_as_applied() -> None:
    """Then one of the two is wrong, and a person has to look."""
    assert undo_doubt(NEVER, was_applied=False) is None
    assert "which it had reported as applied" in (undo_doubt(NEVER, was_applied=True) or "")


@pytest.mark.parametrize("known", [None, "", "perhaps", True, ["never_applied"], {"never_applied": 1}])
@pytest.mark.parametrize("was_applied", [True, False])
def test_who_does_not_say_how_it_knows_may_have_forgotten(known: Any, was_applied: bool) -> None:
    """So do receivers of earlier releases, and of others who read only the protocol's first version."""
    output = {**BARE, "known": known} if known is not None else BARE
    assert "may have forgotten" in (undo_doubt(output, was_applied) or "")


async def test_an_undo_of_which_one_rank_is_in_doubt_is_tried_again_under_a_new_id(bus: ScriptedBus) -> None:
    """A temporary failure: the same id would only bring back the answers that the ranks remember."""
    answers = {0: {"lr": 0.1}, 1: dict(BARE)}
    bus.answers = tuple(Reply("c1", "test", "applied", rank, output, NOW) for rank, output in answers.items())
    with pytest.raises(TemporaryFailure, match="rank 1 of job 'llm-1' states that there is nothing to undo") as failure:
        await perform(bus, jobs.JobScaleLr, {"factor": 2.0}, undo_of="c0", undoes_applied=True)
    assert failure.value.output["by_rank"]["0"]["lr"] == 0.1


async def test_only_an_undo_is_asked_how_it_knows(bus: ScriptedBus) -> None:
    """The output of any other command is the user's own."""
    bus.answers = replies("applied", nothing_to_undo=True)
    assert (await perform(bus, jobs.JobScaleLr, {"factor": 0.5}))["nothing_to_undo"] is True
