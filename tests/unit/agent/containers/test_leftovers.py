"""Ages of leftovers, as an engine is asked for them."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import cast

import pytest

from trainmedic_agent.containers.engine_api import ContainerEngine
from trainmedic_agent.containers.leftovers import LeftoverRemover
from trainmedic_agent.containers.policy import ContainersPolicy, Leftover


class _Engine:
    def __init__(self) -> None:
        self.hours: list[int] = []

    def prune_build_cache(self, min_age_hours: int, seconds: float) -> int:
        self.hours.append(min_age_hours)
        return 0


@pytest.mark.parametrize(("age", "hours"), [("1:00", 1), ("1:30", 2), ("1:59", 2), ("168:00", 168)])
def test_no_build_cache_goes_that_is_younger_than_the_policy_says(age: str, hours: int) -> None:
    """It is asked for in whole hours."""
    engine = _Engine()
    of_hours, minutes = map(int, age.split(":"))
    policy = ContainersPolicy(frozenset({Leftover.BUILD_CACHE}), timedelta(hours=of_hours, minutes=minutes))
    now = datetime.now(UTC)
    LeftoverRemover(cast(ContainerEngine, engine), policy, now, False, lambda: 9.0, lambda: True).remove()
    assert engine.hours == [hours]
