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
def test_an_effect_reverted_now_or_not_active_is_certain(output: Mapping[str, Any], was_applied: bool) -> None:
    """This holds whatever the server has persisted: an applied cap may have ended with its lease."""
    assert undo_doubt(output, was_applied) is None


def test_a_command_that_was_never_applied_is_certain_unless_recorded_as_applied() -> None:
    """Otherwise one of the two records is wrong, and a user has to check."""
    assert undo_doubt(NEVER, was_applied=False) is None
    assert "which it had reported as applied" in (undo_doubt(NEVER, was_applied=True) or "")


@pytest.mark.parametrize("known", [None, "", "perhaps", True, ["never_applied"], {"never_applied": 1}])
@pytest.mark.parametrize("was_applied", [True, False])
def test_a_receiver_that_does_not_state_how_it_knows_may_have_forgotten(known: Any, was_applied: bool) -> None:
    """Receivers of earlier releases and of the protocol's first version do not state it."""
    output = {**BARE, "known": known} if known is not None else BARE
    assert "may have forgotten" in (undo_doubt(output, was_applied) or "")


async def test_an_undo_with_one_rank_in_doubt_is_retried_under_a_new_id(bus: ScriptedBus) -> None:
    """The failure is temporary: the same id would only return the answers that the ranks remember."""
    answers = {0: {"lr": 0.1}, 1: dict(BARE)}
    bus.answers = tuple(Reply("c1", "test", "applied", rank, output, NOW) for rank, output in answers.items())
    with pytest.raises(TemporaryFailure, match="rank 1 of job 'llm-1' states that there is nothing to undo") as failure:
        await perform(bus, jobs.JobScaleLr, {"factor": 2.0}, undo_of="c0", undoes_applied=True)
    assert failure.value.output["by_rank"]["0"]["lr"] == 0.1


async def test_only_an_undo_must_state_how_it_knows(bus: ScriptedBus) -> None:
    """The output of any other command is the user's own."""
    bus.answers = replies("applied", nothing_to_undo=True)
    assert (await perform(bus, jobs.JobScaleLr, {"factor": 0.5}))["nothing_to_undo"] is True
