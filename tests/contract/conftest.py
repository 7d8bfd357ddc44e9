"""The stores that the run store's contract is held against."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from app.adapters.memory_store import MemoryStore
from app.adapters.sql_store.store import SqlStore


@pytest.fixture(params=["memory", "sqlite", "sqlite, as if others wrote too"])
async def store(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[MemoryStore | SqlStore]:
    if request.param == "memory":
        yield MemoryStore()
        return
    opened = SqlStore.open(f"sqlite:///{tmp_path}/state/trainmedic.db")
    # a writer that is not alone remembers nothing between transactions, and asks the tables each time
    opened._writer._exclusive = request.param == "sqlite"
    yield opened
    await opened.close()
