"""Which checkpoint a rollback means, and which may go."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from trainmedic.errors import Rejected
from trainmedic.job.parameters import Rollback
from trainmedic.recovery import checkpoints
from trainmedic.recovery.checkpoints import SavedCheckpoint
from trainmedic.recovery.health import CheckpointHealth

START = datetime(2026, 1, 1, tzinfo=UTC)


def at(minute: int) -> datetime:
    return START + timedelta(minutes=minute)


def saved(step: int, minute: int, complete: bool = True, health: CheckpointHealth | None = None) -> SavedCheckpoint:
    return SavedCheckpoint(step, at(minute), f"step-{step}", complete, health)


FOUND = [saved(200, 20), saved(100, 10), saved(300, 30, complete=False), saved(0, 0)]


@pytest.mark.parametrize(
    ("wanted", "step"),
    [
        (Rollback(), 200),
        (Rollback(before=at(15)), 100),
        (Rollback(before=at(10)), 0),
        (Rollback(step=199), 100),
        (Rollback(step=200), 200),
        (Rollback(steps_back=100), 200),
        (Rollback(steps_back=101), 100),
    ],
)
def test_the_newest_complete_one_that_fits_is_chosen(wanted: Rollback, step: int) -> None:
    """From before a time, at or before a step, or so many steps back from step 300; half-written ones never."""
    assert checkpoints.choose(FOUND, wanted, step=300).step == step


def test_the_next_best_ones_are_there_to_fall_back_on() -> None:
    """All that fit, the newest first."""
    assert [one.step for one in checkpoints.candidates(FOUND, Rollback(before=at(25)), step=300)] == [200, 100, 0]


@pytest.mark.parametrize(
    ("found", "wanted", "words"),
    [
        (FOUND, Rollback(before=at(0)), "from before 2026-01-01T00:00:00.000000Z; the oldest of 3 is of step 0"),
        (FOUND[:2], Rollback(step=50), "of step 50 or before; the oldest of 2 is of step 100"),
        (FOUND[2:3], Rollback(), "there is no complete checkpoint; 1 are incomplete"),
        ([], Rollback(), "there are none at all"),
    ],
)
def test_where_none_fits_the_reason_says_what_there_is(
    found: list[SavedCheckpoint], wanted: Rollback, words: str
) -> None:
    """So that who reads the history knows whether to keep more, or save more often."""
    with pytest.raises(Rejected, match=words):
        checkpoints.choose(found, wanted, step=300)


def test_after_a_rollback_the_newest_is_not_the_one_of_the_highest_step() -> None:
    """What counts is when it was written."""
    assert checkpoints.choose([saved(500, 10), saved(400, 20)], Rollback(), step=510).step == 400


def test_a_rollback_never_goes_forward() -> None:
    """A later step is of another course, such as an earlier training in the same directory."""
    assert checkpoints.choose([saved(40, 10), saved(500, 20)], Rollback(), step=45).step == 40
    with pytest.raises(Rejected, match="all existing ones are of later steps"):
        checkpoints.choose([saved(500, 10)], Rollback(), step=5)


def test_the_newest_two_complete_ones_always_stay() -> None:
    """However few are to be kept, and whatever half-written ones there are beside."""
    assert [one.step for one in checkpoints.surplus(FOUND, keep=1)] == [0]
    assert checkpoints.surplus(FOUND, keep=3) == []


def test_a_pinned_one_stays_however_old() -> None:
    """The target of the last rollback may be needed again."""
    found = [saved(step, step) for step in (1, 2, 3, 4)]
    assert [one.step for one in checkpoints.surplus(found, keep=2, kept=["step-1"])] == [2]


def test_ill_ones_do_not_count_towards_those_that_are_kept() -> None:
    """They go first, but for the newest two, from which a restart may have to go on."""
    ill = CheckpointHealth(loss=math.nan)
    found = [saved(step, step, health=ill if step > 5 else None) for step in range(1, 10)]
    assert [one.step for one in checkpoints.surplus(found, keep=3)] == [7, 6, 2, 1]
    assert [one.step for one in checkpoints.healthy_first(found)] == [5, 4, 3, 2, 1, 9, 8, 7, 6]


def test_one_beyond_that_which_was_gone_back_to_stays() -> None:
    """Should the trouble come back, the next rollback goes further."""
    found = [saved(step, step) for step in range(1, 8)]
    assert [one.step for one in checkpoints.surplus(found, keep=2, kept=["step-4"], back_to=4)] == [5, 2, 1]


def test_marks_are_files_that_others_can_see(tmp_path: Path) -> None:
    """Completeness with its facts, and the pin, which can be taken away."""
    assert checkpoints.completion(tmp_path) is None
    checkpoints.mark_complete(tmp_path, {"step": 3})
    assert checkpoints.completion(tmp_path) == {"step": 3}
    checkpoints.pin(tmp_path, {"why": "a test"})
    assert checkpoints.is_pinned(tmp_path)
    checkpoints.unpin(tmp_path)
    assert not checkpoints.is_pinned(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == [".trainmedic-complete"]


@pytest.mark.parametrize("content", [b"", b'{"step": ', b"[1]", b"\xff\xfe", b"[" * 100_000])
def test_a_damaged_mark_counts_as_none(tmp_path: Path, content: bytes) -> None:
    """A machine can stop in the middle of writing it."""
    (tmp_path / checkpoints.COMPLETE).write_bytes(content)
    assert checkpoints.completion(tmp_path) is None


def test_a_mark_that_cannot_be_written_leaves_nothing_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A full disk: what was there stays, and no half of another lies beside it."""
    path = tmp_path / "mark"
    checkpoints.write_durably(path, b"before")

    def full(_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(OSError, match="No space"):
        checkpoints.write_durably(path, b"after")
    assert [one.read_bytes() for one in tmp_path.iterdir()] == [b"before"]


def test_ranks_see_what_rank_0_knows_of_a_checkpoint() -> None:
    """Also that it is incomplete, and its health."""
    health = CheckpointHealth(loss=float("nan"), loss_median=2.5, reports=40)
    for found in (
        SavedCheckpoint(7, at(1), Path("step-7"), complete=False),
        SavedCheckpoint(8, at(2), "s3://bucket/step-8", health=health),
    ):
        seen = checkpoints.from_json(json.loads(json.dumps(checkpoints.to_json(found))))
        assert replace(seen, health=None) == replace(found, health=None)
        assert (seen.health and seen.health.to_json()) == (found.health and found.health.to_json())
