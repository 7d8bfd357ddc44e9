"""When a job counts as gone, and when it does not."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import pytest

from trainmedic.wire import envelope, notice
from trainmedic.wire.notice import Notice
from trainmedic_server.domain import job_life
from trainmedic_server.domain.event_kinds import JobGone, JobReturned
from trainmedic_server.domain.job_life import GONE_AFTER, OLDEST_NOTICE, JobLife, LifeState

NOW = datetime(2026, 1, 31, 12, 0, tzinfo=UTC)
FIRST, SECOND = (envelope.new_id(now_ms=number) for number in (1, 2))
PRESENT = JobLife("llm-1", LifeState.PRESENT, NOW - timedelta(hours=1), FIRST)


def told(kind: str, instance: str = FIRST, number: int = 1, attempt: int | None = None, at: datetime = NOW) -> Notice:
    return Notice("llm-1", kind, instance, number, at, attempt, "why")


def state_after(life: JobLife, *happened: Notice) -> JobLife:
    for message in happened:
        change = job_life.after_notice(life, message, message.attempt is not None, NOW)
        life = change.life if change is not None else life
    return life


def test_a_job_that_is_missed_without_a_word_is_gone() -> None:
    """And the history says so, once."""
    change = job_life.after_silence(PRESENT, NOW)
    assert change is not None
    assert (change.life.state, change.event) == (
        LifeState.GONE,
        JobGone("llm-1", change.life.reason),
    )
    assert job_life.after_silence(change.life, NOW) is None


def test_a_job_that_said_that_it_ended_is_not_missed() -> None:
    """However long it is away."""
    ended = state_after(PRESENT, told(notice.ENDED))
    assert ended.state is LifeState.ENDED
    assert job_life.after_silence(ended, NOW) is None


def test_a_presence_that_is_read_after_the_end_is_no_return() -> None:
    """The key lives for some seconds more; another process is one."""
    ended = state_after(PRESENT, told(notice.ENDED))
    assert job_life.after_report(ended, "llm-1", FIRST, NOW) is None
    back = job_life.after_report(ended, "llm-1", SECOND, NOW)
    assert back is not None
    assert (back.life.state, back.life.instance) == (LifeState.PRESENT, SECOND)


def test_the_goodbye_of_an_earlier_process_ends_nothing() -> None:
    """Somebody has recorded it and puts it back, so that a death goes unnoticed."""
    restarted = JobLife("llm-1", LifeState.PRESENT, NOW, SECOND)
    assert state_after(restarted, told(notice.ENDED, FIRST)) == restarted


def test_a_job_that_said_that_it_failed_is_gone_by_that_reason() -> None:
    """When it does not come back."""
    change = job_life.after_silence(state_after(PRESENT, told(notice.FAILED)), NOW)
    assert change is not None
    assert (change.life.state, change.life.reason, change.life.failures) == (LifeState.GONE, "why", 1)


def test_a_job_that_is_back_is_not_gone() -> None:
    """Its process again, or another."""
    gone = job_life.after_silence(PRESENT, NOW)
    assert gone is not None
    for instance in (FIRST, SECOND):
        back = job_life.after_report(gone.life, "llm-1", instance, NOW)
        assert back is not None
        assert (back.life.state, back.event) == (LifeState.PRESENT, JobReturned("llm-1"))


def test_what_a_launcher_tells_counts_once() -> None:
    """Redis may deliver it twice, and somebody may put it back after any time."""
    messages = [
        told(notice.FAILED, SECOND, 1, 1),
        told(notice.RESTARTED, SECOND, 2, 2),
        told(notice.FAILED, SECOND, 3, 2),
    ]
    life = state_after(PRESENT, *messages, *messages, messages[1])
    assert (life.failures, life.restarts, life.numbers) == (2, 1, {SECOND: 3})


def test_a_restarted_job_is_not_gone_for_its_earlier_failure() -> None:
    life = state_after(PRESENT, told(notice.FAILED, SECOND, 1, 1))
    assert life.reason == "why"
    gone = job_life.after_silence(state_after(life, told(notice.RESTARTED, SECOND, 2, 2)), NOW)
    assert gone is not None
    assert gone.life.reason == "nothing has been heard of it, and it did not say that it ended"


def test_a_launcher_that_gives_up_leaves_its_job_gone_at_once() -> None:
    """Also one of which nothing else was ever heard."""
    change = job_life.after_notice(None, told(notice.GONE, SECOND, 1, 3), True, NOW)
    assert change is not None
    assert (change.life.state, change.event) == (LifeState.GONE, JobGone("llm-1", "why", attempt=3))


def test_many_launchers_keep_their_numbers_within_bounds() -> None:
    """The oldest are dropped, and nothing of theirs counts again."""
    instances = [envelope.new_id(now_ms=number) for number in range(1, 101)]
    life = state_after(PRESENT, *(told(notice.FAILED, instance, 1, 1) for instance in instances))
    assert (len(life.numbers), life.failures) == (64, 100)
    assert state_after(life, told(notice.FAILED, instances[0], 1, 1)) == life


@pytest.mark.parametrize("by", [OLDEST_NOTICE, -OLDEST_NOTICE])
def test_a_notice_from_another_time_counts_for_nothing(by: timedelta) -> None:
    """Its job may be forgotten by now, and everything about it would be new."""
    late = told(notice.GONE, SECOND, 1, 1, NOW + by + by / 100)
    assert job_life.after_notice(None, late, True, NOW) is None


def test_a_launcher_that_stays_long_after_the_end_makes_the_job_present() -> None:
    """One that is only about to end does not."""
    ended = state_after(PRESENT, told(notice.ENDED))
    assert job_life.after_report(ended, "llm-1", "", NOW + GONE_AFTER) is None
    assert job_life.after_report(ended, "llm-1", "", NOW + 2 * GONE_AFTER) is not None


def test_the_ended_make_room_before_others() -> None:
    """And of the others those of the oldest change."""
    ended = JobLife("ended", LifeState.ENDED, NOW)
    older = JobLife("older", LifeState.GONE, NOW - timedelta(hours=2))
    lives = [PRESENT, older, ended]
    assert job_life.overcrowding(lives, 3) == []
    assert job_life.overcrowding(lives, 1) == [ended, older]
