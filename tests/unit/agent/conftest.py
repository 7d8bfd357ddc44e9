"""What the tests of the agent share: a search of logs has the time that a busy machine takes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from tests.driver.driver import Driver
from trainmedic_agent.adapters.nvml_gpus import NvmlGpus
from trainmedic_agent.journal import Journal
from trainmedic_agent.log_search import searcher


@pytest.fixture
def journal(tmp_path: Path) -> Iterator[Journal]:
    with closing(Journal(tmp_path)) as opened:
        yield opened


@pytest.fixture
def gpus(driver: Driver) -> Iterator[NvmlGpus]:
    with closing(NvmlGpus()) as opened:
        yield opened


@pytest.fixture(autouse=True)
def searches_have_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """A page ends after some seconds and goes on with the next one. Tests of that limit set it themselves."""
    for name in ("MOST_SECONDS", "SCAN_SECONDS", "LISTING_SECONDS"):
        monkeypatch.setattr(searcher, name, 600.0)
