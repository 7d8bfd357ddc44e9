"""The engine stops also where a cancellation is lost on its way."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from tests.unit.engine.world import World

PLAYBOOK = "playbook: cool\non: {alert: Hot}\ntarget: gpu\nsteps:\n  - {action: test.cap}\n"


async def test_a_run_whose_action_loses_the_cancellation_does_not_hold_up_the_stop(
    world: Callable[..., World],
) -> None:
    """redis-py may forget one; the process would stay until it was killed."""
    w = world(PLAYBOOK)
    w.actions["cap"].outcomes.append("deaf")
    await w.post(w.alert(gpu="0", node="n1"))
    await w.pass_time(0)
    assert w.actions["cap"].in_flight == 1
    async with asyncio.timeout(20):
        await w.engine.stop()
    assert w.actions["cap"].in_flight == 0
