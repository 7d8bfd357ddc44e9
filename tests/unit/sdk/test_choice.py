"""Which checkpoint a rollback goes to, and what it says of those that it passes over."""

from __future__ import annotations

import threading
from datetime import UTC, datetime, timedelta

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.rank_threads import RankThreads
from trainmedic.errors import Rejected
from trainmedic.job.group import SingleRankGroup
from trainmedic.job.parameters import Rollback
from trainmedic.recovery import choice
from trainmedic.recovery.checkpoints import SavedCheckpoint
from trainmedic.recovery.choice import MARGIN, Choice, choose
from trainmedic.recovery.health import CheckpointHealth, Onset
from trainmedic.recovery.rollback_budget import RollbackCount

START = datetime(2026, 1, 1, tzinfo=UTC)
WELL = CheckpointHealth(1.9, 1.9, 0.05, 1.0, 1.0, 100, True)
ILL = CheckpointHealth(4.13, 1.9, 0.05, 1.0, 1.0, 100, True)


def saved(step: int, health: CheckpointHealth | None = WELL) -> SavedCheckpoint:
    return SavedCheckpoint(step, START + timedelta(seconds=step), f"step-{step}", health=health)


def onset(step: int, is_rise: bool) -> Onset:
    return Onset(step, is_rise, step)


def steps(found: Choice) -> list[int]:
    return [candidate.step for candidate in found.candidates]


ROW = [saved(step) for step in (0, 100, 200, 300)]
BEFORE = Rollback(before=START + timedelta(seconds=305))


def test_one_that_was_saved_after_the_jump_is_passed_over() -> None:
    """The loss jumped at step 290, a checkpoint came at step 300, and the alert began at step 305."""
    found = choose([*ROW[:3], saved(300, ILL)], BEFORE, 320)
    assert steps(found) == [200, 100, 0]
    assert found.passed_over_json() == [
        {
            "checkpoint": "step-300",
            "step": 300,
            "why": "the loss was 4.13 when it was written, against a median of 1.9 (more than 2.375 is unhealthy)",
        }
    ]


def test_one_that_was_saved_in_the_rise_is_passed_over_whatever_it_says_of_itself() -> None:
    """Of a checkpoint without a health, too."""
    found = choose([*ROW[:3], saved(300, None)], BEFORE, 320, onset(290, True))
    assert steps(found) == [200, 100, 0]
    assert found.passed_over[0].why == "the losses had risen when it was written, from step 290 on"


@pytest.mark.parametrize(("first", "best"), [(300 + MARGIN, 300), (300 + MARGIN - 1, 200), (301, 200)])
def test_a_margin_is_left_before_the_trouble(first: int, best: int) -> None:
    """Five steps before the alert."""
    assert choose(ROW, BEFORE, 320, onset(first, False)).best.step == best


def test_where_the_losses_show_the_trouble_the_margin_may_cost_a_few_steps_only() -> None:
    """A checkpoint right before a rise is known to be from before it."""
    assert choose(ROW, BEFORE, 320, onset(302, True)).best.step == 300
    assert choose(ROW, BEFORE, 320, onset(301, True)).best.step == 200
    assert choose([*ROW[:3], saved(294), saved(299)], BEFORE, 320, onset(301, True)).best.step == 294
    assert choose([*ROW[:3], saved(290), saved(299)], BEFORE, 320, onset(301, True)).best.step == 299


def test_what_lies_between_two_reports_is_avoided_and_not_ill() -> None:
    """The loss was usual at step 280 and raised at step 310, and nobody knows where between."""
    began = Onset(281, True, 310)
    assert choose(ROW, BEFORE, 320, began).best.step == 200
    assert choose(ROW[3:], BEFORE, 320, began).best.step == 300


def test_the_margin_is_a_preference() -> None:
    """Where all lie within it, the newest is meant; and they serve where those beyond it cannot be loaded."""
    assert steps(choose([saved(298), saved(299)], BEFORE, 320, onset(301, False))) == [299, 298]
    assert steps(choose([*ROW[:2], saved(299)], BEFORE, 320, onset(301, False))) == [100, 0, 299]


def test_where_all_are_ill_the_rollback_is_rejected() -> None:
    """With the reasons: a person has to look."""
    with pytest.raises(Rejected, match=r"is healthy: step-300: the loss was 4.13 .*; step-200: the losses had risen"):
        choose([saved(200), saved(300, ILL)], BEFORE, 320, onset(150, True))


def test_a_trouble_that_comes_back_is_gone_back_further_for() -> None:
    """As long as there is something older; a rollback for another trouble is not concerned."""
    first = RollbackCount().after(200, 310)
    again = choose(ROW, BEFORE, 305, spent=first)
    assert steps(again) == [100, 0, 300, 200]
    assert [each.why for each in again.passed_over] == ["the fault returned after a rollback to step 200"] * 2
    second = first.after(100, 305)
    assert choose(ROW, BEFORE, 305, spent=second).best.step == 0
    assert choose(ROW, BEFORE, 305, spent=second.after(0, 305)).best.step == 300
    assert choose([*ROW, saved(320)], Rollback(), 330, spent=first).best.step == 320


def test_a_rollback_to_a_named_step_goes_there_again() -> None:
    """Who names the step, or asks for the newest, says how far; so many steps back are from where the trouble is."""
    spent = RollbackCount().after(200, 310)
    assert choose(ROW, Rollback(step=200), 305, spent=spent).best.step == 200
    assert choose(ROW, Rollback(), 305, spent=spent).best.step == 300
    assert choose(ROW, Rollback(steps_back=5), 305, spent=spent).best.step == 100


def test_a_user_may_know_a_checkpoint_by_anything() -> None:
    """A path need not be hashable."""
    own = SavedCheckpoint(100, START, {"bucket": "a"})
    assert choose([own, saved(200, ILL)], Rollback(), 300).best == own


healths = st.sampled_from([WELL, ILL, None])


@given(
    st.dictionaries(st.integers(0, 50), healths, min_size=1),
    st.none() | st.builds(onset, st.integers(0, 60), st.booleans()),
    st.none() | st.builds(RollbackCount, st.integers(0, 50), st.integers(0, 60), st.integers(0, 3)),
)
def test_whatever_there_is_the_choice_is_sound(
    present: dict[int, CheckpointHealth | None], began: Onset | None, spent: RollbackCount | None
) -> None:
    """No candidate is ill or of the rise, each that could serve is one, and every newer one is told of with why."""
    row = [saved(step, health) for step, health in present.items()]
    could = {
        each.step
        for each in row
        if each.health is not ILL and not (began and began.is_rise and each.step >= began.shown_at)
    }
    try:
        found = choose(row, Rollback(steps_back=0), 60, began, spent)
    except Rejected:
        assert not could
        return
    assert set(steps(found)) == could
    assert [each.step for each in found.passed_over] == sorted(
        (s for s in present if s > found.best.step), reverse=True
    )[:20]
    assert all(each.why for each in found.passed_over)


def test_all_ranks_make_the_choice_of_rank_0() -> None:
    """With what it has passed over; a refusal is one on every rank."""
    present = [*ROW[:3], saved(300, ILL)]
    mine = choose(present, BEFORE, 320)
    assert choice.agree(SingleRankGroup(), lambda: mine) == mine
    found: dict[int, Choice] = {}
    refused: dict[int, str] = {}

    def decide(rank: int, rollback: Rollback) -> Choice:
        assert rank == 0
        return choose(present, rollback, 320)

    with RankThreads(2, every=1) as ranks:

        def run(rank: int) -> None:
            share = ranks.members[rank].share
            found[rank] = choice.agree(share.group("choice"), lambda: decide(rank, BEFORE))
            try:
                choice.agree(share.group("none"), lambda: decide(rank, Rollback(before=START)))
            except Rejected as error:
                refused[rank] = str(error)

        threads = [threading.Thread(daemon=True, target=run, args=(rank,)) for rank in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(30)
    assert [steps(found[rank]) for rank in range(2)] == [[200, 100, 0]] * 2
    assert found[1].passed_over_json() == mine.passed_over_json()
    assert refused[0] == refused[1]
