"""The rules that the reader has on its disk when it starts."""

from __future__ import annotations

import logging
from datetime import timedelta
from pathlib import Path

import pytest

from tests.unit.agent.log_reading.reading import RULES, Reading, policy_of
from trainmedic_agent.log_reading.rule_runner import RulesInForce


def test_rules_on_disk_are_used(tmp_path: Path) -> None:
    """The same rules of the server change nothing then."""
    reading = Reading(tmp_path, policy_of())
    reading.store.keep_rules(reading.now(), RULES.encode())
    rules = RulesInForce(reading.store, reading.runner)
    rules.restore()
    assert rules._active == (reading.now(), RULES.encode())
    reading.kill()


@pytest.mark.parametrize("kept", [b"not rules", b'{"v": 999}'])
def test_unusable_rules_on_disk_are_not_reported_as_new(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, kept: bytes
) -> None:
    """The log does not claim that others stay active. The server's rules are accepted afterwards."""
    reading = Reading(tmp_path, policy_of())
    reading.store.keep_rules(reading.now(), kept)
    rules = RulesInForce(reading.store, reading.runner)
    with caplog.at_level(logging.INFO):
        rules.restore()
    assert caplog.messages == ["cannot read log rules on disk"]
    rules.take(reading.now(), RULES.encode())
    assert rules._active == (reading.now(), RULES.encode())
    reading.kill()


def test_the_same_rules_with_a_later_time_block_those_in_between(tmp_path: Path) -> None:
    """This holds after a restart too: replaced rules do not return through a late notice."""
    reading = Reading(tmp_path, policy_of())
    rules, now = RulesInForce(reading.store, reading.runner), reading.now()
    current, earlier = RULES.encode(), RULES.encode() + b" "
    rules.take(now, current)
    rules.take(now + timedelta(minutes=2), current)
    rules.take(now + timedelta(minutes=1), earlier)
    assert rules._active == (now + timedelta(minutes=2), current)
    again = RulesInForce(reading.store, reading.runner)
    again.restore()
    again.take(now + timedelta(minutes=1), earlier)
    assert again._active == (now + timedelta(minutes=2), current)
    reading.kill()
