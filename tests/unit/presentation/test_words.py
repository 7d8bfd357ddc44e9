"""How runs, questions and times read, whichever surface shows them."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from trainmedic_core import words
from trainmedic_server.cli import story
from trainmedic_server.console import formats
from trainmedic_server.presentation import questions, rows, runs, times

AT = datetime(2026, 1, 31, 12, tzinfo=UTC)
RUN = "01a2067f-0e28-7007-b926-e046f06b8a6f"
OTHER_RUN = "01a2067f-0e28-7007-b926-e046f06b8a70"


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (None, "-"),
        (0, "0 ms"),
        (0.85, "850 ms"),
        (0.9996, "1 s"),
        (12.34, "12.3 s"),
        (15, "15 s"),
        (59.96, "1 min"),
        (245, "4 min 5 s"),
        (900, "15 min"),
        (7800, "2 h 10 min"),
        (86_405, "1 d"),
        (-90, "−1 min 30 s"),
    ],
)
def test_a_length_of_time_has_two_units_at_most(seconds: float | None, text: str) -> None:
    """And no unit of which there is none."""
    assert times.span(seconds) == text


@pytest.mark.parametrize(
    ("seconds", "age"), [(0, "0 s"), (59, "59 s"), (119, "119 s"), (120, "2 min"), (7199, "119 min"), (90_000, "1 d")]
)
def test_the_console_and_the_command_line_tell_the_same_age(seconds: int, age: str) -> None:
    """In the largest unit of which there are two, or whole days."""
    then = AT - timedelta(seconds=seconds)
    assert formats.age(then, AT) == age
    assert times.age(then.isoformat(), AT.isoformat()) == ("now" if seconds == 0 else age)


def test_what_is_no_time_is_shown_as_it_is() -> None:
    """As a newer server may write it; nothing of it steers a terminal."""
    assert times.stamp("soon\x1b[0m") == "soon\\x1b[0m"
    assert times.near(None, AT) == "-"


UPCOMING: dict[str, Any] = {
    "now": "wait",
    "waits_for": f"job:llm-7, held by run {RUN}",
    "holder": RUN,
    "held_by": {
        "playbook": "fence",
        "doing": f"waits for node:n1, held by run {OTHER_RUN}",
        "until": None,
        "held_by": {"run_id": OTHER_RUN, "playbook": "cap", "doing": "waits for Hot to resolve", "held_by": None},
    },
    "deadline": "2026-01-31T12:30:00Z",
    "at_deadline": "the run fails",
    "step": "slow",
    "action": "job.scale_lr",
    "params": {"factor": 0.5},
    "note": "only if <b>",
}


def test_what_comes_next_is_one_sentence_on_each_surface() -> None:
    """The command line shortens the run's ID and the console links it. Text from outside is escaped."""
    line = story.next_line(UPCOMING, AT.isoformat())
    assert line == (
        "at wait; waits for job:llm-7, held by run f06b8a6f; "
        "that run of fence waits for node:n1, held by run f06b8a70; that run of cap waits for Hot to resolve; "
        "at the latest 12:30Z (in 30 min): the run fails; next slow: job.scale_lr factor=0.5 (only if <b>)"
    )
    told = runs.next_words(UPCOMING)
    assert told is not None
    assert f'<a href="/medic/runs/{RUN}">f06b8a6f</a>' in formats.sentence(told.now[1], AT, "/medic")
    assert "12:30:00 (<time" in formats.sentence(told.until[0], AT)
    assert formats.sentence(told.then, AT).endswith("(only if &lt;b&gt;)")


@pytest.mark.parametrize(
    ("at_deadline", "text"),
    [
        ("the run fails", "the run fails; otherwise succeeded"),
        ("the run continues", "the run continues; then succeeded"),
    ],
)
def test_the_end_of_a_run_does_not_follow_its_failure(at_deadline: str, text: str) -> None:
    """It is what happens if the deadline is met."""
    upcoming = {"deadline": "2026-01-31T12:30:00Z", "at_deadline": at_deadline, "outcome": "succeeded"}
    assert story.next_line(upcoming, AT.isoformat()).endswith(text)


@pytest.mark.parametrize(
    ("by", "number", "who"),
    [
        ((), 1, "any operator"),
        (None, None, "any operator"),
        (("ann", "hardware"), 1, "ann or hardware"),
        ((), 2, "any operator, 2 different people"),
    ],
)
def test_a_question_says_who_has_to_approve(by: Any, number: Any, who: str) -> None:
    """Also one of an earlier release, which has no terms."""
    assert questions.who_may_answer(by, number) == who


def test_what_an_approval_lets_happen_leaves_no_parameter_out() -> None:
    """An empty list may mean all."""
    assert (
        words.call("node.clean", {"paths": [], "force": False, "note": ""}) == 'node.clean paths=[] force=false note=""'
    )


def test_what_was_done_is_told_once() -> None:
    """A message that names the action stands alone, but of a failure both count."""
    item = {"status": "succeeded", "decision": "started", "action_taken": "notify", "message": "applied notify"}
    assert runs.action_and_message(item) == runs.DoneWords("", "applied notify")
    assert runs.action_and_message({**item, "status": "failed"}) == runs.DoneWords("notify", "applied notify")


def test_a_row_without_a_readable_time_stands_alone() -> None:
    """Nobody knows whether it was within the hour."""
    item = {"playbook": "p", "alert_name": "a", "decision": "cooldown", "status": "not_started"}
    items = [{**item, "at": "2026-01-31T12:00:00Z"}, {**item, "at": "?"}, {**item, "at": "2026-01-31T11:30:00Z"}]
    assert [row.count for row in rows.folded(items, rows.refusal_key, "at")] == [1, 1, 1]
