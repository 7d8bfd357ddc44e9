"""Checkpoints of a node's training jobs before work is taken from it. A failed one stops nothing."""

from __future__ import annotations

import asyncio
from collections.abc import Container, Mapping
from datetime import datetime, timedelta
from typing import Any

from trainmedic.wire import envelope
from trainmedic_server.actions.base import check_wanted, clearance_of
from trainmedic_server.domain.destinations import derived_id
from trainmedic_server.errors import BusUnavailable
from trainmedic_server.ports.actions import Call
from trainmedic_server.ports.outside import Clock, CommandBus

ACTION = "job.checkpoint"
LOOK_EVERY = timedelta(seconds=1)


async def request_checkpoints(
    bus: CommandBus,
    clock: Clock,
    call: Call,
    node: str,
    patience: timedelta,
    only: Container[str] | None = None,  # names of jobs; None for all
    *,
    can_stop: bool = True,
) -> dict[str, str]:
    """Return each job's outcome, ``written`` or why not, at most `patience` after the attempt's start.

    ``*`` stands for all jobs if Redis is unavailable.
    With `can_stop`, raises `check_wanted`'s errors within a second.
    """
    until = min(call.issued_at + patience, call.deadline)
    try:
        jobs = [job for job in await bus.jobs() if is_on(job.details, node) and (only is None or job.name in only)]
    except BusUnavailable:
        return {"*": "Redis is unavailable: no job could be asked"}
    if clock.now() >= until:
        return {job.name: "not asked: no time was left" for job in jobs}
    if jobs and call.report_wait is not None:
        names = ", ".join(sorted(job.name for job in jobs))
        await call.report_wait(f"waiting until {until:%H:%M:%S} at most for a checkpoint of {names}")

    async def ask_all() -> list[str]:
        return await asyncio.gather(*(_checkpoint(bus, call, node, job.name, until) for job in jobs))

    asked = asyncio.ensure_future(ask_all())
    try:
        while not asked.done():
            tick = asyncio.ensure_future(clock.sleep_until(clock.now() + LOOK_EVERY))
            waits: set[asyncio.Future[Any]] = {asked, tick}
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
            tick.cancel()
            if can_stop:
                check_wanted(await clearance_of(call))
    finally:
        asked.cancel()
    outcomes = asked.result()
    return {job.name: outcome for job, outcome in zip(jobs, outcomes, strict=True)}


async def _checkpoint(bus: CommandBus, call: Call, node: str, job: str, until: datetime) -> str:
    command = envelope.Command(
        id=derived_id(call.command_id, job),
        action=ACTION,
        target={"kind": "job", "job": job},
        params={},
        run_id=call.run_id,
        playbook=call.playbook,
        reason=f"work is about to be removed from {node}",
        issued_at=call.issued_at,
        expires_at=until,
    )
    replies = [reply for reply in await bus.request(command) if reply.is_final]
    bus.acknowledge(command.id)
    if not replies:
        return "no answer in time"
    bad = next((reply for reply in replies if reply.status != envelope.APPLIED), None)
    return "written" if bad is None else f"{bad.status}: {bad.output.get('reason', '')}".rstrip(": ")


def is_on(details: Mapping[str, Any], node: str) -> bool:
    placement = details.get("placement")
    return isinstance(placement, list) and any(
        isinstance(rank, Mapping) and rank.get("node") == node for rank in placement
    )
