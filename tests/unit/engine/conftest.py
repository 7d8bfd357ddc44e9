"""Every async test of the engine runs in virtual time, on the store in memory."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping
from typing import Any

import pytest

from tests.unit.engine.world import World
from trainmedic_server.simulation import virtual_time


def pytest_asyncio_loop_factories(config: pytest.Config, item: pytest.Item) -> Mapping[str, Any]:
    return {"virtual": virtual_time.VirtualLoop}


@pytest.fixture
async def world() -> AsyncIterator[Callable[..., World]]:
    """Makes worlds, each with the playbooks that it is given; stops their engines at the end."""
    made: list[World] = []

    def make(*playbooks: str, **settings: Any) -> World:
        made.append(World(*playbooks, **settings))
        return made[-1]

    yield make
    for one in made:
        await one.engine.stop()
    await asyncio.sleep(0)
