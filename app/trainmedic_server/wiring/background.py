"""Background tasks of a leader, and the archive that retention uses."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Coroutine
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
_PRUNE_FIRST_AFTER = timedelta(minutes=1)  # the start is busy
_ANSWERS_WITHIN = 10.0  # Seconds to wait at the start. A network file system may hang while its server is down.

Loop = tuple[Coroutine[Any, Any, None], str]  # with the name of its task

log = telemetry.logger(__name__)


async def opened_archive(directory: Path | None) -> GzipArchive | None:
    """Raise ConfigurationError for an impossible directory. A temporary failure only delays retention."""
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
    older_than: Callable[[], datetime],  # start of the period that is retained
    archive: RunArchive | None = None,
) -> None:
    """Archive and delete expired data every hour.

    A wrong clock deletes nothing: retention counts running time.
    """

    async def prune() -> None:
        try:
            gone = await store.prune(older_than(), archive)
        except Exception:
            metrics.retention_failing.set(1)  # no other metric shows that the disk is filling up
            raise
        metrics.retention_failing.set(0)
        if gone:
            log.info("deleted old runs", runs=gone)

    sleep = loops.sleeping_by(clock)
    await sleep(_PRUNE_FIRST_AFTER.total_seconds())
    await loops.repeat(prune, PRUNE_EVERY, "retention", metrics, sleep=sleep)


def run_in_background(stack: contextlib.AsyncExitStack, *loops: Loop) -> None:
    """Start these loops; end them together when the stack unwinds."""
    stack.push_async_callback(end_tasks, [asyncio.create_task(work, name=name) for work, name in loops])
