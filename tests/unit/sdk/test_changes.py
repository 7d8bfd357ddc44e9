"""What commands have changed is kept until it is undone, and leaves no trace then."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from trainmedic.errors import Rejected
from trainmedic.recovery.changes import (
    ACCUMULATION,
    AS_LOADED,
    BATCH_SIZE,
    FILE,
    LEARNING_RATE,
    AppliedChanges,
    check_workers,
    scaled_whole,
)


def scaled(changes: AppliedChanges, command_id: str, factor: float, undo_of: str | None = None) -> float:
    changes.set_factors(LEARNING_RATE, changes.with_factor(LEARNING_RATE, command_id, factor, undo_of))
    return changes.scale(LEARNING_RATE)


def test_an_undone_change_leaves_no_trace() -> None:
    """Exactly 1.0 again, though 0.3 times its reciprocal is not; and in whatever order they are undone."""
    changes = AppliedChanges()
    scaled(changes, "a", 0.3)
    scaled(changes, "b", 0.7)
    assert scaled(changes, "c", 1 / 0.3, undo_of="a") == 0.7
    assert scaled(changes, "d", 1 / 0.7, undo_of="b") == 1.0


def test_an_undo_of_what_is_not_known_is_a_change_like_any_other() -> None:
    """Where the run was resumed, and the file is lost."""
    changes = AppliedChanges()
    changes.recall()
    assert scaled(changes, "b", 2.0, undo_of="a") == 2.0


@pytest.mark.parametrize("says_so", [True, False])
def test_an_undo_of_what_was_done_to_an_earlier_training_changes_nothing(says_so: bool) -> None:
    """The alert resolves when the job has been started anew, under the same name: its own values are right. Whether
    its script looks for checkpoints and finds none, or does not look."""
    changes = AppliedChanges()
    if says_so:
        changes.forget()
    assert scaled(changes, "b", 2.0, undo_of="a") == 1.0
    assert scaled(changes, "c", 0.5) == 0.5
    assert scaled(changes, "d", 2.0, undo_of="c") == 1.0


def test_changes_survive_a_restart(tmp_path: Path) -> None:
    """Another process recalls them from the file; the undo still fits."""
    changes = AppliedChanges(tmp_path)
    scaled(changes, "a", 0.5)
    changes.workers, changes.skipped = 2, [[0, 10, 20]]
    changes.save()
    later = AppliedChanges(tmp_path)
    assert later.scale(LEARNING_RATE) == 1.0
    later.recall()
    assert (later.scale(LEARNING_RATE), later.workers, later.skipped) == (0.5, 2, [[0, 10, 20]])
    assert scaled(later, "b", 2.0, undo_of="a") == 1.0


def test_without_a_file_a_checkpoint_serves(tmp_path: Path) -> None:
    """It holds the same."""
    changes = AppliedChanges()
    scaled(changes, "a", 0.5)
    later = AppliedChanges(tmp_path)
    later.recall(changes.state())
    assert later.scale(LEARNING_RATE) == 0.5


@pytest.mark.parametrize(
    "content",
    [
        *(b"", b"[]", b"{}", b'{"learning_rate": {"a": 0}, "batch_size": {}, "accumulation": {}}', b"\xff"),
        b'{"learning_rate": {"a": 1%s}, "batch_size": {}, "accumulation": {}}' % (b"0" * 400),
    ],
)
def test_a_damaged_file_is_no_change(tmp_path: Path, content: bytes) -> None:
    """Better the script's own values than none."""
    (tmp_path / FILE).write_bytes(content)
    changes = AppliedChanges(tmp_path)
    changes.recall()
    assert changes.scale(LEARNING_RATE) == 1.0


def test_a_run_that_begins_anew_forgets(tmp_path: Path) -> None:
    """The file too."""
    changes = AppliedChanges(tmp_path)
    scaled(changes, "a", 0.5)
    changes.forget()
    assert changes.scale(LEARNING_RATE) == 1.0
    assert not (tmp_path / FILE).exists()


def test_the_first_checkpoint_of_a_run_that_began_anew_ends_what_was_before(tmp_path: Path) -> None:
    """A script that does not look for checkpoints: whoever resumes from its own later gets its own changes."""
    scaled(AppliedChanges(tmp_path), "a", 0.5)
    AppliedChanges(tmp_path).drop_earlier_run()
    later = AppliedChanges(tmp_path)
    later.recall()
    assert later.scale(LEARNING_RATE) == 1.0


def test_whole_numbers_stay_whole() -> None:
    """Thirds and the like come out even; what does not is rejected, or rounded down where that is wanted."""
    assert scaled_whole(6, {"a": 1 / 3}, "it") == 2
    assert scaled_whole(2, {"a": 1 / 3, "b": 3}, "it") == 2
    assert scaled_whole(8, {"a": 0.3}, "it", round_down=True) == 2
    with pytest.raises(Rejected, match=r"it would be 2\.4"):
        scaled_whole(8, {"a": 0.3}, "it")
    with pytest.raises(Rejected, match=r"it would be 0\.5"):
        scaled_whole(1, {"a": 0.5}, "it", round_down=True)


def test_each_kind_of_change_has_its_own_factors() -> None:
    """Scaling the learning rate does not accumulate."""
    changes = AppliedChanges()
    scaled(changes, "a", 0.5)
    assert changes.scale(ACCUMULATION) == 1.0


@pytest.mark.parametrize("factor", [1e300, 1001.0])
def test_what_is_beyond_all_measure_is_rejected(factor: float) -> None:
    """A step of a million batches would end too late for the change to be undone."""
    with pytest.raises(Rejected, match="1000 times"):
        scaled_whole(4, {"a": factor}, "the accumulation")


def test_workers_that_would_choke_the_machine_are_rejected() -> None:
    """The reason says how many may be."""
    check_workers(16)
    with pytest.raises(Rejected, match="at most"):
        check_workers(1_000_000)


@pytest.mark.parametrize(
    ("changed", "at_most", "script", "wanted"),
    [(None, False, 6, 6), (2, True, 6, 2), (2, True, 2, 2), (2, True, 1, 1), (2, True, 0, 0), (2, False, 0, 2)],
)
def test_a_restart_never_raises_workers_that_were_lowered(
    tmp_path: Path, changed: int | None, at_most: bool, script: int, wanted: int
) -> None:
    """A script that is started again with fewer than the bound keeps these; a count is a count."""
    changes = AppliedChanges(tmp_path)
    changes.set_workers(changed, 7, at_most)
    recalled = AppliedChanges(tmp_path)
    recalled.recall()
    assert recalled.workers_for(script) == wanted


def test_workers_that_an_earlier_release_has_recorded_are_a_count(tmp_path: Path) -> None:
    """Its file does not say that they were an upper bound."""
    changes = AppliedChanges(tmp_path)
    changes.set_workers(3, 7, at_most=True)
    state = json.loads((tmp_path / FILE).read_text())
    del state["workers_at_most"]
    (tmp_path / FILE).write_text(json.dumps(state))
    recalled = AppliedChanges(tmp_path)
    recalled.recall()
    assert (recalled.workers_for(1), recalled.workers_for(9)) == (3, 3)


@pytest.mark.parametrize("factor", [50.0, 1e300, 4.1, 1e-4, 1e-300])
def test_a_learning_rate_that_would_end_the_training_is_rejected(factor: float) -> None:
    """50 is easily typed for 0.5. The reason says how far commands may go."""
    with pytest.raises(Rejected, match=r"the learning rate would be .* times the script's own.* 0.001 to 4 times"):
        AppliedChanges().with_factor(LEARNING_RATE, "a", factor)


def test_factors_that_are_fine_alone_are_rejected_together() -> None:
    """It is their product that the training works with. A user may allow more."""
    factors: list[AppliedChanges] = [AppliedChanges(), AppliedChanges(largest_lr_scale=16)]
    for changes in factors:
        scaled(changes, "a", 4.0)
    with pytest.raises(Rejected, match="16 times"):
        scaled(factors[0], "b", 4.0)
    assert scaled(factors[1], "b", 4.0) == 16.0


def test_a_factor_is_bounded_though_the_product_is_fine() -> None:
    """What makes up for an earlier command is its undo."""
    changes = AppliedChanges()
    scaled(changes, "a", 0.01)
    with pytest.raises(Rejected, match="50 times"):
        changes.with_factor(LEARNING_RATE, "b", 50.0)
    changes.recall()
    assert changes.with_factor(LEARNING_RATE, "c", 100.0, undo_of="lost") == {"a": 0.01, "c": 100.0}


@pytest.mark.parametrize("name", [LEARNING_RATE, BATCH_SIZE, ACCUMULATION])
def test_a_factor_out_of_bounds_that_an_older_release_has_recorded_is_dropped(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, name: str
) -> None:
    """Else every restart would die of it. What else is recorded counts, and the log says what does not."""
    recorded = {LEARNING_RATE: {}, BATCH_SIZE: {}, ACCUMULATION: {}, "workers": 2, "left_out": []}
    recorded[name] = {"a": 0.5, "b": 1e300, "c": 0.5, "d": 1e-300}
    (tmp_path / FILE).write_text(json.dumps(recorded))
    changes = AppliedChanges(tmp_path)
    changes.recall()
    assert (changes.factors(name), changes.workers) == ({"a": 0.5, "c": 0.5}, 2)
    assert [word in caplog.text for word in ("1e+300, by command b", "1e-300, by command d")] == [True, True]


def started(directory: Path) -> AppliedChanges:
    changes = AppliedChanges(directory)
    changes.recall()
    return changes


def test_a_change_that_kills_its_job_is_dropped(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A batch that the memory does not hold, workers that choke the machine: after two starts that came to no
    checkpoint, the job begins with what it had before. What had come to one stays."""
    first = started(tmp_path)
    first.set_factors(LEARNING_RATE, {"a": 0.5}, step=10)
    first.checkpoint_written(10)  # of the same step: training has not gone on yet
    first.checkpoint_written(20)
    first.set_factors(BATCH_SIZE, {"b": 2.0}, step=20)
    first.set_workers(16, step=20)
    assert started(tmp_path).factors(BATCH_SIZE) == {"b": 2.0}
    last = started(tmp_path)
    assert (last.factors(BATCH_SIZE), last.workers, last.factors(LEARNING_RATE)) == ({}, None, {"a": 0.5})
    assert "2 times without reaching a checkpoint after the changes at step 20" in caplog.text
    assert [started(tmp_path).factors(name) for name in (BATCH_SIZE, LEARNING_RATE)] == [{}, {"a": 0.5}]


def test_a_change_that_came_to_a_checkpoint_stays_whatever_happens_later(tmp_path: Path) -> None:
    """Also to one of an earlier step, after a rollback."""
    started(tmp_path).set_factors(BATCH_SIZE, {"b": 2.0}, step=50)
    started(tmp_path).checkpoint_written(40)
    for _ in range(3):
        assert started(tmp_path).factors(BATCH_SIZE) == {"b": 2.0}


def test_a_start_from_a_later_checkpoint_ends_the_trial(tmp_path: Path) -> None:
    """However that was written: in the background, or to memory. One that was gone back to is not later."""
    first = started(tmp_path)
    first.set_factors(BATCH_SIZE, {"b": 2.0}, step=50)
    first.went_back(30)
    for step in (30, 40, 40, 40):
        changes = AppliedChanges(tmp_path)
        changes.recall(step=step)
        assert changes.factors(BATCH_SIZE) == {"b": 2.0}
    died = tmp_path / "died"
    started(died).set_factors(BATCH_SIZE, {"b": 2.0}, step=50)
    for factors in ({"b": 2.0}, {}):
        changes = AppliedChanges(died)
        changes.recall(step=50)
        assert changes.factors(BATCH_SIZE) == factors


def test_a_record_without_a_readable_trial_is_one_without(tmp_path: Path) -> None:
    """As older releases have written it, or somebody else."""
    for trial in ({}, {"on_trial": 3}, {"on_trial": {"changes": 1, "step": "x", "starts": []}}):
        recorded = {LEARNING_RATE: {"a": 0.5}, BATCH_SIZE: {}, ACCUMULATION: {}, "workers": None, "left_out": []}
        (tmp_path / FILE).write_text(json.dumps({**recorded, **trial}))
        for _ in range(3):
            assert started(tmp_path).scale(LEARNING_RATE) == 0.5


def test_what_is_recorded_is_what_is_in_force(tmp_path: Path) -> None:
    """Known once training has begun, however it began; not where the commands behind a factor are lost."""
    changes = AppliedChanges(tmp_path)
    assert changes.is_in_force(LEARNING_RATE, "a") is None
    changes.training_begins()
    assert changes.is_in_force(LEARNING_RATE, "a") is False
    scaled(changes, "a", 0.5)
    assert changes.is_in_force(LEARNING_RATE, "a") is True
    assert changes.is_in_force(ACCUMULATION, "a") is False
    later = AppliedChanges(tmp_path)
    assert later.is_in_force(LEARNING_RATE, "a") is None
    later.recall()
    assert [later.is_in_force(LEARNING_RATE, name) for name in ("a", "b")] == [True, False]
    later.set_factors(LEARNING_RATE, {AS_LOADED: 0.5})
    assert later.is_in_force(LEARNING_RATE, "a") is None
    later.forget()
    assert later.is_in_force(LEARNING_RATE, "a") is False
