"""Tasks that use Redis end when they are told to, also where a library forgets a cancellation."""

from __future__ import annotations

import asyncio
import contextlib

from trainmedic_server.ports.ending import end_tasks


async def test_a_task_that_loses_its_first_cancellation_ends() -> None:
    """As where redis-py answers in the moment of the cancellation, and the task goes on to its next wait."""
    started = asyncio.Event()

    async def forgetful() -> None:
        with contextlib.suppress(asyncio.CancelledError):
            started.set()
            await asyncio.Event().wait()
        await asyncio.Event().wait()

    tasks = [asyncio.create_task(forgetful()), asyncio.create_task(asyncio.sleep(3600))]
    await started.wait()
    async with asyncio.timeout(60):
        await end_tasks(tasks)
    assert all(task.cancelled() for task in tasks)


async def test_tasks_that_have_ended_are_no_hindrance() -> None:
    """Whatever became of them; and there may be none."""
    task = asyncio.create_task(asyncio.sleep(0))
    await task
    await end_tasks([task])
    await end_tasks([])
