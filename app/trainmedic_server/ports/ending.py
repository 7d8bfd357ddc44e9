"""How tasks end that wait for what is behind a port.

Who calls it: the engine, the adapters and wiring, when they stop.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from typing import Any

_CANCEL_AGAIN_SECONDS = 0.2


async def end_tasks(tasks: Iterable[asyncio.Task[Any]]) -> None:
    """Cancel tasks, and return once they have ended.

    They are cancelled more than once, because redis-py awaits through `asyncio.wait_for`, which up to Python 3.11
    forgets a cancellation that comes in the moment in which what it waits for ends.
    """
    running = set(tasks)
    while running:
        for task in running:
            task.cancel()
        _, running = await asyncio.wait(running, timeout=_CANCEL_AGAIN_SECONDS)
