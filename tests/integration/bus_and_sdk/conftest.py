"""Training loops and clients of Redis that are ended after each test."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import pytest
from redis.asyncio import Redis

import trainmedic
from tests.integration.bus_and_sdk.training_loop import TrainingLoop


@pytest.fixture
def start_job() -> Iterator[Callable[..., TrainingLoop]]:
    jobs: list[TrainingLoop] = []

    def start(url: str, act: Callable[[trainmedic.JobCommand], None] | None = None, **options: Any) -> TrainingLoop:
        jobs.append(TrainingLoop(url, act, **options))
        return jobs[-1]

    yield start
    for job in jobs:
        job.end()


@pytest.fixture
async def client(redis_server: Any) -> AsyncIterator[Redis]:
    made: Redis = Redis.from_url(redis_server.url, protocol=2)
    yield made
    await made.aclose()
