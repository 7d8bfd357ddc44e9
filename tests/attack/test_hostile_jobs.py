"""Two hostile users of a node, beside normal jobs of others: what they see, and what they hide."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.attack.effort import random_source, trials
from tests.support.hostile.scene import OTHERS, Attack, remove

SECONDS = trials(45, 3600)
SHARE = trials(1, 10) / 10
"""Of the whole load, which has 100,000 empty files of an attacker."""
MOST_GROWTH = 10.0
"""MiB. What the acting process may take more than before the attack."""


@pytest.fixture
def top() -> Iterator[Path]:
    """A directory that every user may enter."""
    made = Path(tempfile.mkdtemp(prefix="hostile-jobs-", dir="/tmp"))
    made.chmod(0o755)
    yield made
    remove(made)


def test_hostile_users_see_no_other_users_data_and_hide_nothing(top: Path, redis_url: str) -> None:
    """No byte of a private file leaks, each failing line of another user's job becomes a finding, commands are
    carried out, and the acting process stays as large as it was."""
    seed = random_source().randrange(2**32)
    with Attack(top, redis_url, seed, SHARE) as attack:
        outcome = attack.run(SECONDS)
    assert outcome.breaches == []
    assert outcome.hidden == 0
    assert outcome.unanswered == []
    assert outcome.commands
    assert outcome.growth < MOST_GROWTH, outcome.memory
    assert outcome.waits.keys() & set(OTHERS)
    assert outcome.answers["push to the store"] > 0
    assert all(sum(counts.values()) > 10 for counts in outcome.tactics.values()), outcome.tactics
