"""Kinds of Redis: a cluster, which is refused. Sentinels are in ``tests/crash``."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest

import trainmedic
from tests.support.programs import eventually
from trainmedic_server.adapters.redis_room import check_is_no_cluster
from trainmedic_server.errors import ConfigurationError


async def test_a_cluster_is_refused_and_said_to_be_one(
    tmp_path: Path, own_redis: Any, redis_url: str, caplog: pytest.LogCaptureFixture
) -> None:
    """The server does not start with it; a job says why it gets no commands, and trains on."""
    redis = own_redis(tmp_path, "--cluster-enabled", "yes")
    redis.start()
    with pytest.raises(ConfigurationError, match="part of a Redis Cluster"):
        await check_is_no_cluster(redis.url)
    await check_is_no_cluster(redis_url)
    caplog.set_level(logging.WARNING, "trainmedic")
    medic = trainmedic.connect(job="llm", redis_url=redis.url)
    try:
        eventually(lambda: "part of a Redis Cluster" in caplog.text, 20, "it is said")
    finally:
        medic.close()


async def test_a_redis_that_is_away_keeps_no_server_from_starting(tmp_path: Path, own_redis: Any) -> None:
    """It may be there later."""
    await check_is_no_cluster(own_redis(tmp_path).url)
