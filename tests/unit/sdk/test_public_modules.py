"""Modules that training scripts import by name stay where they were, wherever the code has moved."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path

import trainmedic.budget
import trainmedic.changes
import trainmedic.checkpoints
import trainmedic.envelope
from trainmedic.recovery.checkpoints import SavedCheckpoint
from trainmedic.wire import envelope


def test_own_checkpoints_are_listed_as_found() -> None:
    """``trainmedic.checkpoints.Found(step, at, path)`` is what ``OwnCheckpoints`` is given."""
    at = datetime(2026, 1, 31, 12, 0, tzinfo=UTC)
    listed = trainmedic.checkpoints.Found(3, at, "mine-3")
    assert listed == SavedCheckpoint(3, at, "mine-3")
    assert trainmedic.checkpoints.newest_first(found=[listed]) == [listed]
    assert trainmedic.checkpoints.surplus(found=[listed], keep=2) == []


def test_a_checkpoint_is_pinned_for_a_reason(tmp_path: Path) -> None:
    """By the names of functions and arguments that scripts may use."""
    trainmedic.checkpoints.pin(tmp_path, why={"why": "a test"})
    assert trainmedic.checkpoints.pinned_for(tmp_path) == {"why": "a test"}


def test_budget_and_changes_need_no_torch_and_are_there() -> None:
    """A loop of its own can count its rollbacks, and remember what commands have changed."""
    budget = trainmedic.budget.Budget(None, limit=1)
    budget.check(1, 5)
    budget.spend(1, 5)
    budget.renew()
    assert budget.spent == trainmedic.budget.Spent()
    changes = trainmedic.changes.Changes(None)
    changes.note(trainmedic.changes.LEARNING_RATE, {"c1": 0.5})
    changes.settle()
    assert changes.scale(trainmedic.changes.LEARNING_RATE) == 0.5
    assert changes.left_out == []
    assert trainmedic.changes.whole(8, {"c1": 0.5}, "the batch size") == 4


def test_the_wire_format_is_one() -> None:
    """``trainmedic.envelope`` is the module that the server uses."""
    assert trainmedic.envelope.Command is envelope.Command
    assert set(trainmedic.envelope.__all__) - {"verify"} <= set(vars(envelope))
