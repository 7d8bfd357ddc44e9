"""Modules that training scripts import by name stay where they were, wherever the code has moved."""

from __future__ import annotations

from datetime import UTC, datetime

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
    assert trainmedic.checkpoints.newest_first([listed]) == [listed]


def test_budget_and_changes_need_no_torch_and_are_there() -> None:
    """A loop of its own can count its rollbacks, and remember what commands have changed."""
    trainmedic.budget.Budget(None).check(1, 5)
    changes = trainmedic.changes.Changes(None)
    assert changes.scale(trainmedic.changes.LEARNING_RATE) == 1.0


def test_the_wire_format_is_one() -> None:
    """``trainmedic.envelope`` is the module that the server uses."""
    assert trainmedic.envelope.Command is envelope.Command
    assert set(trainmedic.envelope.__all__) <= set(vars(envelope))
