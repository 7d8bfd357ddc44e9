"""The archive of old runs, as a server begins with it. Who calls it: ``wiring.server``."""

from __future__ import annotations

import asyncio
from pathlib import Path

from trainmedic_server import telemetry
from trainmedic_server.adapters.gzip_archive import GzipArchive
from trainmedic_server.errors import ArchiveUnavailable

_ANSWERS_WITHIN = 10.0
"""Seconds that a start waits for the file system; one of a network may hang for as long as its server is away."""

log = telemetry.logger(__name__)


async def opened_archive(directory: Path | None) -> GzipArchive | None:
    """Return the archive that is set. Raises ConfigurationError where the directory can be none.

    One that only cannot be used now keeps no server from repairing: nothing is deleted until it can be.
    """
    if directory is None:
        return None
    archive = GzipArchive(directory)
    try:
        async with asyncio.timeout(_ANSWERS_WITHIN):
            await asyncio.to_thread(archive.prepare)
    except (ArchiveUnavailable, TimeoutError) as error:
        why = str(error) or f"no answer within {_ANSWERS_WITHIN:g} s"
        log.warning("the archive cannot be used; nothing is deleted until it can be", error=why)
    return archive
