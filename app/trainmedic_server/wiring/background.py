"""Background tasks of a leader, and the archive that retention uses."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Coroutine
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

from trainmedic_server import telemetry
from trainmedic_server.adapters.gzip_archive import GzipArchive
from trainmedic_server.engine import loops
from trainmedic_server.errors import ArchiveUnavailable
from trainmedic_server.ports.archive import RunArchive
from trainmedic_server.ports.ending import end_tasks
from trainmedic_server.ports.outside import Clock
from trainmedic_server.ports.store import RunStore

PRUNE_EVERY = timedelta(hours=1)
_PRUNE_FIRST_AFTER = timedelta(minutes=1)

log = telemetry.logger(__name__)


_ANSWERS_WITHIN = 10.0
"""Seconds to wait for the file system at the start. A network file system may hang while its server is down."""


async def opened_archive(directory: Path | None) -> GzipArchive | None:
    """Return the configured archive. Raises ConfigurationError if the directory is impossible.

    A temporary failure does not stop the server: retention deletes nothing until the archive works.
    """
    if directory is None:
        return None
    archive = GzipArchive(directory)
    try:
        async with asyncio.timeout(_ANSWERS_WITHIN):
            await asyncio.to_thread(archive.prepare)
    except (ArchiveUnavailable, TimeoutError) as error:
        why = str(error) or f"no answer within {_ANSWERS_WITHIN:g} s"
        log.warning("archive unavailable; deleting nothing until it works", error=why)
    return archive


async def prune_for_ever(
    store: RunStore,
    clock: Clock,
    metrics: telemetry.Metrics,
    older_than: Callable[[], datetime],
    archive: RunArchive | None = None,
) -> None:
    """Delete expired data every hour, after archiving runs. Begins a minute after the start, which is busy.

    Retention counts the time in which a server was running, so a wrong clock deletes nothing.
    """

    async def prune() -> None:
        try:
            gone = await store.prune(older_than(), archive)
        except Exception:
            metrics.retention_failing.set(1)  # nothing else tells that the disk is filling up
            raise
        metrics.retention_failing.set(0)
        if gone:
            log.info("deleted old runs", runs=gone)

    rest = loops.by_clock(clock)
    await rest(_PRUNE_FIRST_AFTER.total_seconds())
    await loops.repeat(prune, PRUNE_EVERY, "retention", metrics, rest=rest)


@contextlib.asynccontextmanager
async def background(work: Coroutine[Any, Any, None], name: str) -> AsyncIterator[None]:
    """Run `work` as a task during the block."""
    task = asyncio.create_task(work, name=name)
    try:
        yield
    finally:
        await end_tasks([task])
