"""Whether the batches after a rollback are those that were to come, and what is said where that is not known."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainmedic.recovery import batch_log
from trainmedic.recovery.batch_log import MOST_COMPARED, BatchLog
from trainmedic.recovery.fingerprints import Unread, fingerprint, read


def drawn(*batches: int) -> BatchLog:
    log = BatchLog()
    for batch in batches:
        log.add(batch, 0)
    return log


def draw(log: BatchLog, *batches: int | None, epoch: int = 0) -> BatchLog:
    for batch in batches:
        log.add(batch, epoch)
    return log


def test_the_same_batches_again_agree() -> None:
    """Of those that were drawn since the checkpoint, sixteen at most; what comes afterwards is another matter."""
    log = drawn(*range(100))
    comparison = log.go_back(50, 0)
    assert not comparison.is_complete
    draw(log, *range(50, 50 + MOST_COMPARED))
    assert comparison.is_complete
    draw(log, 999)
    assert comparison.result() == {"compared": 16, "agreed": 16}
    assert log.drawn == 67


def test_other_batches_do_not_agree() -> None:
    """Each is counted."""
    log = drawn(*range(10))
    comparison = log.go_back(4, 0)
    draw(log, 4, 77, 78, 7, 8, 9)
    assert comparison.result() == {"compared": 6, "agreed": 4}


def test_after_a_skip_the_later_ones_come() -> None:
    """In the order from before; beyond what was drawn then, none of those that were to be left out."""
    log = drawn(*range(30))
    comparison = log.go_back(10, 0, skip=12)
    draw(log, *range(22, 38))
    assert comparison.result() == {"compared": 16, "agreed": 16}


@given(st.lists(st.sampled_from(["unread", "known", None, "back"]), max_size=120))
def test_fingerprints_are_worked_out_some_batches_later(kinds: list[str | None]) -> None:
    """None is missed, whatever came between them, and none from before a rollback is held to be of another batch."""
    log, course = BatchLog(), list[int | None]()
    for number, kind in enumerate(kinds):
        if kind == "back":
            course = course[: max(len(course) - 5, 0)]
            log.go_back(len(course), 0)
            continue
        batch = fingerprint(number) if kind == "unread" else number if kind == "known" else None
        log.add(batch, 0)
        course.append(read(batch))
    assert log.state()["fingerprints"] == course


@pytest.mark.parametrize("is_here", [True, False])
def test_a_device_is_asked_seldom(is_here: bool) -> None:
    """Fingerprints whose samples are in main memory are worked out soon; for others it is waited as late as can be."""
    log = BatchLog()
    asked: list[int] = []

    class Sample:
        def cpu(self) -> Sample:
            asked.append(1)
            raise RuntimeError("the device has failed")

    for _ in range(1024):
        log.add(Unread([Sample()], is_here), 0)
    assert bool(asked) == is_here
    log.add(Unread([Sample()], is_here), 0)
    assert asked
    assert log.state()["fingerprints"] == [None] * 512


@pytest.mark.parametrize("skip", [3, 40])
def test_a_skip_that_is_ignored_shows(skip: int) -> None:
    """The very batches come that were to be left out; also where more were to be than had been drawn."""
    log = drawn(*range(30))
    comparison = log.go_back(20, 0, skip=skip)
    draw(log, *range(20, 36))
    told = comparison.result()
    assert told["compared"] == 16
    assert told["agreed"] < 10


def test_in_the_next_epoch_a_batch_may_look_like_one_left_out() -> None:
    """Without shuffling it begins like the last; that is no sign of a skip that was ignored."""
    log = drawn(*range(10))
    comparison = log.go_back(0, 0, skip=10)
    draw(log, *range(10), *range(6), epoch=1)
    why = "none of the present batches was drawn before"
    assert comparison.result() == {"compared": 0, "agreed": 0, "why": why}


def test_a_batch_that_is_made_anew_is_no_proof_that_those_to_be_left_out_are_left_out() -> None:
    """Masked at random it looks like none of them, even if it is one."""
    log = drawn(*range(10))
    comparison = log.go_back(2, 0, skip=20)
    for number in range(16):
        log.add(100 + number, 0, is_random=True)
    assert comparison.result()["compared"] == 0


def test_random_numbers_are_no_reason_where_there_was_nothing_to_compare_with() -> None:
    """A loader draws one at the beginning of each epoch."""
    log = drawn(*range(10))
    comparison = log.go_back(0, 0, skip=12)
    for number in range(16):
        log.add(100 + number, 1, is_random=number == 3)
    why = "none of the present batches was drawn before"
    assert comparison.result() == {"compared": 0, "agreed": 0, "why": why}


def test_an_order_drawn_for_a_whole_epoch_is_no_sign_of_another_source() -> None:
    """An iterable shuffles with the training's random numbers when its epoch begins, which differ after a skip."""
    log = drawn(*range(12))
    comparison = log.go_back(0, 0, skip=3)
    draw(log, 3, 4, 5)
    for number, batch in enumerate((10, 9, 7, 6, 8)):
        log.add(batch, 1, is_random=number == 0)
    draw(log, 12, 13, 14, epoch=2)
    assert comparison.result("the loop ended") == {"compared": 4, "agreed": 3, "why": "the loop ended"}


def test_random_numbers_of_the_first_batch_do_not_excuse_the_epoch_that_goes_on() -> None:
    """A loader draws a seed when its iterator begins, also in the middle of an epoch."""
    log = drawn(*range(12))
    comparison = log.go_back(0, 0, skip=3)
    for number, batch in enumerate((3, 4, 5, 6, 8)):
        log.add(batch, 0, is_random=number == 0)
    result = comparison.result("the loop ended")
    assert (result["compared"], result["agreed"]) == (5, 4)


def test_of_batches_that_are_all_alike_nothing_is_claimed_that_they_cannot_show() -> None:
    """That the same come again is true of them; that none comes of those to be left out cannot be seen."""
    log = drawn(*[7] * 20)
    again = log.go_back(10, 0)
    draw(log, *[7] * 10)
    assert again.result() == {"compared": 10, "agreed": 10}
    skipped = log.go_back(10, 0, skip=10)
    draw(log, *[7] * 16)
    assert skipped.result()["compared"] == 0


@pytest.mark.parametrize(
    ("log", "position", "why"),
    [
        (drawn(1, 2, 3), 3, "none of the present batches was drawn before"),
        (drawn(1, 2, 3), None, "the checkpoint does not say how many batches had been drawn"),
    ],
)
def test_where_nothing_can_be_compared_the_reason_is_told_at_once(
    log: BatchLog, position: int | None, why: str
) -> None:
    """Nobody waits for it."""
    comparison = log.go_back(position, 0)
    assert comparison.is_complete
    assert comparison.result() == {"compared": 0, "agreed": 0, "why": why}


def test_a_source_that_does_not_repeat_itself_claims_nothing() -> None:
    """What it says of itself is the reason."""
    log = drawn(1, 2, 3)
    comparison = log.go_back(1, 0, why_not="not the same batches: a stream only goes on")
    assert comparison.result() == {"compared": 0, "agreed": 0, "why": "not the same batches: a stream only goes on"}


def test_an_unfinished_comparison_says_why() -> None:
    """And tells what was compared by then."""
    log = drawn(1, 2, 3)
    comparison = log.go_back(0, 0)
    draw(log, 1)
    assert comparison.result("the job ended") == {"compared": 1, "agreed": 1, "why": "the job ended"}


def test_batches_that_cannot_be_looked_at_are_not_compared() -> None:
    """Though they come in time."""
    log = draw(BatchLog(), None, None)
    comparison = log.go_back(0, 0)
    draw(log, None, None)
    assert comparison.result() == {"compared": 0, "agreed": 0, "why": "nothing of these batches can be compared"}


def test_after_a_change_of_the_batches_only_new_ones_are_compared() -> None:
    """A command has made them smaller: the same samples come, in others."""
    log = drawn(1, 2, 3)
    log.forget("the batch size was changed")
    draw(log, 14, 15)
    assert log.go_back(1, 0).result()["why"] == "the batch size was changed"
    draw(log, 12, 13, 14, 15)
    comparison = log.go_back(3, 0)
    draw(log, 14, 15)
    assert comparison.result() == {"compared": 2, "agreed": 2}


def test_a_rollback_after_a_rollback_compares_with_the_new_course() -> None:
    """The batches that were left out stay so."""
    log = drawn(*range(20))
    log.go_back(10, 0, skip=5)
    draw(log, 15, 16, 17, 18)
    comparison = log.go_back(10, 0)
    draw(log, 15, 16, 17, 18)
    assert comparison.result() == {"compared": 4, "agreed": 4}


def test_a_restart_remembers_the_last_batches() -> None:
    """So that one that goes back beyond the checkpoint that it resumed from can be compared, within bounds."""
    state = json.loads(json.dumps(drawn(*range(1000)).state()))
    log = BatchLog()
    log.restore(state)
    draw(log, 1000, 1001)
    comparison = log.go_back(995, 0)
    draw(log, *range(995, 1002))
    assert comparison.result() == {"compared": 7, "agreed": 7}
    log.restore(state)
    assert log.go_back(5, 0).result()["why"] == "these batches were drawn by an earlier process"
    log.restore(None)
    assert log.drawn == 0


def test_memory_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """A checkpoint from before all that is remembered is not compared with."""
    monkeypatch.setattr(batch_log, "_LONGEST", 10)
    log = drawn(*range(50))
    assert log.go_back(30, 0).result()["why"] == "too many were drawn since"
    assert log.drawn == 30


@given(
    course=st.lists(st.integers(0, 5), max_size=40),
    data=st.data(),
    skip=st.integers(0, 20),
)
def test_whatever_comes_no_more_agree_than_do(course: list[int], data: st.DataObject, skip: int) -> None:
    """With few kinds of batches, so that they often look alike."""
    log = drawn(*course)
    position = data.draw(st.integers(0, len(course)))
    after = data.draw(st.lists(st.integers(0, 5), max_size=20))
    comparison = log.go_back(position, 0, skip)
    draw(log, *after)
    told = comparison.result("over")
    expected = course[position + skip :][:MOST_COMPARED]
    alike = sum(one == other for one, other in zip(after, expected, strict=False))
    assert 0 <= told["agreed"] <= told["compared"] <= MOST_COMPARED
    if told["compared"] <= len(expected):
        assert told["agreed"] == alike
    assert ("why" in told) or told["compared"]
    assert log.drawn == position + len(after)
