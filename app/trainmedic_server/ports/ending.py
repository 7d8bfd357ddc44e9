"""Cancel tasks until they end: up to Python 3.11, `asyncio.wait_for` loses a cancellation during completion."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from typing import Any

_CANCEL_AGAIN_SECONDS = 0.2


async def end_tasks(tasks: Iterable[asyncio.Task[Any]]) -> None:
    running = set(tasks)
    while running:
        for task in running:
            task.cancel()
        _, running = await asyncio.wait(running, timeout=_CANCEL_AGAIN_SECONDS)
