"""The longest time of a run by its playbook's own limits."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import pytest

from tests.unit.engine.books import catalog_of
from tests.unit.engine.world import ScriptedActions
from trainmedic_server.domain.modes import Mode
from trainmedic_server.engine import run_length

START, END = datetime(2026, 1, 1, tzinfo=UTC), datetime(2026, 1, 1, 1, tzinfo=UTC)
PLAYBOOK = """
playbook: p
on: {alert: Hot}
target: node
approval: {timeout: 20m, ask_again: null}
steps:
  - STEP
on_success:
  - {action: test.tell, timeout: 10s}
on_failure:
  - {action: test.tell, timeout: 40s}
"""


@pytest.mark.parametrize(
    ("step", "seconds"),
    [
        ("{action: test.cap}", 30),
        ("{action: test.cap, timeout: 5s, retry: {attempts: 4, delay: 10s, max_delay: 30s}}", 20 + 10 + 20 + 30),
        ("{wait_for: resolved, timeout: 7m}", 420),
        ("{wait_for: resolved}", 3600),
        ("{approve: sure?, timeout: 9m}", 540),
        ("{approve: {message: sure?, escalate: {by: [ann], timeout: 1m}}, timeout: 9m, on_timeout: escalate}", 600),
        ("{approve: {message: sure?, ask_again: 1m}, timeout: 9m}", 3600 + 600),
        ("{approve: sure?}", None),
        ("{action: test.cap, timeout: 999999d, retry: {attempts: 3, delay: 1s}}", None),
    ],
)
def test_the_limits_of_the_steps_add_up(step: str, seconds: int | None) -> None:
    """With the longer of the final phases. A wait without a limit ends with the alert, a question without one never."""
    actions = ScriptedActions()
    (playbook,) = catalog_of([PLAYBOOK.replace("STEP", step)], actions).all()
    longest = run_length.longest(playbook, Mode.ENFORCE, actions, timedelta())
    ends_by = longest.ends_by(START, END)
    assert (None if ends_by is None else (ends_by - START).total_seconds() - 40) == seconds


def test_the_limits_of_many_long_steps_are_none() -> None:
    """Their sum exceeds what Python can hold."""
    actions = ScriptedActions()
    steps = "{action: test.cap, timeout: 999999d, retry: {attempts: 100, delay: 1s}}\n  - " * 11
    (playbook,) = catalog_of([PLAYBOOK.replace("STEP", steps + "{action: test.cap}")], actions).all()
    assert run_length.longest(playbook, Mode.ENFORCE, actions, timedelta()).ends_by(START, END) is None


def test_modes_and_the_wait_before_the_first_act_count() -> None:
    """Mode approve asks first, and mode observe takes no time."""
    actions = ScriptedActions()
    (playbook,) = catalog_of([PLAYBOOK.replace("STEP", "{action: test.cap}")], actions).all()
    first = timedelta(minutes=15)
    asked = run_length.longest(playbook, Mode.APPROVE, actions, first)
    assert asked.span == timedelta(minutes=35, seconds=70)
    assert run_length.longest(playbook, Mode.OBSERVE, actions, first).ends_by(START, None) == START


def test_a_wait_for_an_alert_without_an_end_has_none() -> None:
    """The alert still fires."""
    actions = ScriptedActions()
    (playbook,) = catalog_of([PLAYBOOK.replace("STEP", "{wait_for: resolved}")], actions).all()
    assert run_length.longest(playbook, Mode.ENFORCE, actions, timedelta()).ends_by(START, None) is None
