"""The lines around what is told only once it has lasted."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import pytest
from msgspec.structs import replace

from tests.unit.agent.log_reading.reading import RULES, Reading, policy_of
from trainmedic_logs.lines.rule import RuleSet

LASTING = RuleSet(tuple(replace(rule, lasting=timedelta(minutes=1)) for rule in RULES.rules))


@pytest.fixture
def reading(tmp_path: Path) -> Iterator[Reading]:
    reading = Reading(tmp_path / "state", policy_of(files=[f"{tmp_path}/*.log"]), LASTING)
    reading.step()
    yield reading
    reading.kill()


def test_lines_before_a_finding_are_kept_until_the_excerpt_is_sent(tmp_path: Path, reading: Reading) -> None:
    """This holds even if the file is emptied by then."""
    (tmp_path / "a.log").write_text("before\nMARK 1\nafter\n")
    reading.step()
    reading.step(4.0)
    assert reading.updates() == []
    (tmp_path / "a.log").write_text("")
    reading.step(60.0)
    (update,) = reading.updates()
    assert update.excerpt is not None
    assert (update.excerpt.lines, update.excerpt.at) == (("before", "MARK 1", "after"), 1)


def test_lines_before_a_finding_are_read_again_after_a_kill(tmp_path: Path, reading: Reading) -> None:
    """They had not been read before the kill."""
    (tmp_path / "a.log").write_text("before\nMARK 1\nafter\n")
    reading.step()
    reading.step(1.0)
    reading.runner.store_due(is_last=True)
    reading.kill()
    reading.start()
    reading.step()
    reading.step(60.0)
    (update,) = reading.updates()
    assert update.excerpt is not None
    assert update.excerpt.lines == ("before", "MARK 1", "after")
