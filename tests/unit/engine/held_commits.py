"""Commits that a test holds up, so that something else can happen meanwhile."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from tests.unit.engine.world import World
from trainmedic_server.ports.store import Transaction


class HeldCommit:
    """A commit that is durable, and whose caller does not know it before the test says so."""

    def __init__(self) -> None:
        self.is_durable = asyncio.Event()
        self.is_known = asyncio.Event()


def hold_next(world: World, monkeypatch: pytest.MonkeyPatch, count: int = 1) -> list[HeldCommit]:
    """Hold up the next `count` commits of the world's store; those after them are not."""
    transact, commits = world.store.transact, [HeldCommit() for _ in range(count)]
    coming = iter(commits)

    async def held(work: Callable[[Transaction], Any]) -> Any:
        commit = next(coming, None)
        done = await transact(work)
        if commit is not None:
            commit.is_durable.set()
            await commit.is_known.wait()
        return done

    monkeypatch.setattr(world.store, "transact", held)
    return commits
