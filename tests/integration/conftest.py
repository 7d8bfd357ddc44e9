"""A job of several processes, the server's bus to it, and who sends commands by hand, for the tests that have one."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.command_sender import Commander
from tests.support.messages import KEY
from tests.support.rank_processes import RankProcesses
from trainmedic.wire.signing import Signer
from trainmedic_server import telemetry
from trainmedic_server.adapters.redis_bus import RedisBus
from trainmedic_server.adapters.system_clock import SystemClock


@pytest.fixture
def job(tmp_path: Path, redis_server: Any) -> Iterator[RankProcesses]:
    made = RankProcesses(tmp_path, redis_server.url)
    yield made
    made.end()


@pytest.fixture
async def bus(redis_server: Any) -> AsyncIterator[RedisBus]:
    made = RedisBus(redis_server.url, SystemClock(), telemetry.Metrics(), Signer.of(KEY.encode()))
    await made.start()
    yield made
    await made.close()


@pytest.fixture
def commander(redis_url: str) -> Iterator[Commander]:
    made = Commander(redis_url)
    yield made
    made.close()
