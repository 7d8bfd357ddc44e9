"""A rollback that does not help is not ordered for ever."""

from __future__ import annotations

from pathlib import Path

import pytest

from trainmedic.errors import Rejected
from trainmedic.recovery.rollback_budget import FILE, RollbackBudget


def test_rollbacks_to_the_same_root_are_limited(tmp_path: Path) -> None:
    """The one after the last is rejected, and the reason says since when training has not got further."""
    budget = RollbackBudget(tmp_path, limit=2)
    budget.check(100, 150)
    assert budget.spend(100, 150) == {"rollback_number": 1, "rollback_budget": 2, "root_step": 100}
    assert budget.spend(100, 160)["rollback_number"] == 2
    with pytest.raises(
        Rejected, match=r"2 rollbacks since the checkpoint of step 100 .* past step 160; the budget is 2"
    ):
        budget.check(100, 155)


def test_a_newer_checkpoint_on_the_way_to_the_trouble_is_the_same_root(tmp_path: Path) -> None:
    """It was written after the first rollback, and before the point where things went wrong."""
    budget = RollbackBudget(tmp_path, limit=2)
    budget.spend(100, 190)
    assert budget.spend(150, 180) == {"rollback_number": 2, "rollback_budget": 2, "root_step": 100}
    with pytest.raises(Rejected):
        budget.check(190, 200)


def test_getting_past_the_trouble_begins_a_new_count(tmp_path: Path) -> None:
    """The checkpoint that is gone back to lies beyond the point from which the last rollback came."""
    budget = RollbackBudget(tmp_path, limit=1)
    budget.spend(100, 150)
    budget.check(200, 250)
    assert budget.spend(200, 250) == {"rollback_number": 1, "rollback_budget": 1, "root_step": 200}


def test_the_count_survives_a_restart(tmp_path: Path) -> None:
    """Another process finds it beside the checkpoints; a rank that does not keep it leaves it alone."""
    RollbackBudget(tmp_path, limit=1).spend(100, 150)
    RollbackBudget(tmp_path, limit=9, writes=False).spend(100, 150)
    with pytest.raises(Rejected):
        RollbackBudget(tmp_path, limit=1).check(100, 150)
    assert RollbackBudget(tmp_path).spent.rollbacks == 1


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b'{"rollbacks": "many"}', b"\xff"])
def test_a_damaged_file_does_not_keep_a_job_from_being_repaired(tmp_path: Path, content: bytes) -> None:
    """It counts as none, and is replaced."""
    (tmp_path / FILE).write_bytes(content)
    budget = RollbackBudget(tmp_path, limit=1)
    budget.check(100, 150)
    budget.spend(100, 150)
    assert RollbackBudget(tmp_path).spent.rollbacks == 1


def test_a_directory_that_cannot_be_written_only_forgets(tmp_path: Path) -> None:
    """The rollback that was carried out stays carried out."""
    budget = RollbackBudget(tmp_path / "not" / "there", limit=1)
    assert budget.spend(100, 150)["rollback_number"] == 1
    with pytest.raises(Rejected):
        budget.check(100, 150)


def test_without_a_limit_anything_goes_and_none_at_all_can_be_asked_for() -> None:
    """None is no limit; 0 allows no rollback."""
    free = RollbackBudget(limit=None)
    for _ in range(20):
        free.check(1, 2)
        free.spend(1, 2)
    with pytest.raises(Rejected):
        RollbackBudget(limit=0).check(1, 2)
    with pytest.raises(ValueError, match="0 or more"):
        RollbackBudget(limit=-1)


def test_a_person_can_renew_it(tmp_path: Path) -> None:
    """Counting begins from nothing, in the file too."""
    budget = RollbackBudget(tmp_path, limit=1)
    budget.spend(100, 150)
    budget.reset()
    budget.check(100, 150)
    RollbackBudget(tmp_path, limit=1).check(100, 150)


def test_a_run_that_begins_needs_no_directory_yet(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """There is nothing to renew, and nothing to complain of."""
    RollbackBudget(tmp_path / "not there").reset()
    assert not caplog.records


def test_a_budget_of_none_is_named() -> None:
    with pytest.raises(Rejected, match=r"^the budget of rollbacks is 0$"):
        RollbackBudget(limit=0).check(100, 150)
