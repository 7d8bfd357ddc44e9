"""What the tests of the agent share: a search of logs has the time that a busy machine takes."""

from __future__ import annotations

import pytest

from trainmedic_agent.log_search import searcher


@pytest.fixture(autouse=True)
def searches_have_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """A page ends after some seconds and goes on with the next one. Tests of that limit set it themselves."""
    for name in ("MOST_SECONDS", "SCAN_SECONDS", "_JOB_SECONDS", "LISTING_SECONDS"):
        monkeypatch.setattr(searcher, name, 600.0)
