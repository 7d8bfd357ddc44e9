"""Before a node is drained: have the training jobs on it write a checkpoint.

A job says in its presence where its ranks sit (``placement``); those with a rank on the node are sent
``job.checkpoint``. Who calls it: ``drain``. What comes of it never stops the drain: a job that cannot
write a checkpoint loses the work since its last one whether the node is drained now or dies later.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from datetime import datetime, timedelta
from typing import Any

from trainmedic.wire import envelope
from trainmedic_server.actions.kubernetes.base import node_of
from trainmedic_server.actions.placement import derived_id
from trainmedic_server.errors import BusUnavailable
from trainmedic_server.ports.actions import Call
from trainmedic_server.ports.outside import Clock, CommandBus

ACTION = "job.checkpoint"


async def ask_for(bus: CommandBus, clock: Clock, call: Call, patience: timedelta) -> dict[str, str]:
    """Return what became of each job's checkpoint, by job: ``written``, or why not. Returns when all have
    answered, and at the latest when `patience` is over, counted from when the step began."""
    until = min(call.issued_at + patience, call.deadline)
    try:
        jobs = [job for job in await bus.jobs() if _is_on(job.details, node_of(call))]
    except BusUnavailable:
        return {"*": "Redis is away: nobody could be asked"}
    if clock.now() >= until:
        return {job.name: "not asked: the time for it was over" for job in jobs}
    if jobs and call.report_wait is not None:
        names = ", ".join(sorted(job.name for job in jobs))
        await call.report_wait(f"the drain waits until {until:%H:%M:%S} at most for a checkpoint of {names}")
    outcomes = await asyncio.gather(*(_checkpoint(bus, call, job.name, until) for job in jobs))
    return {job.name: outcome for job, outcome in zip(jobs, outcomes, strict=True)}


async def _checkpoint(bus: CommandBus, call: Call, job: str, until: datetime) -> str:
    command = envelope.Command(
        id=derived_id(call.command_id, job),
        action=ACTION,
        target={"kind": "job", "job": job},
        params={},
        run_id=call.run_id,
        playbook=call.playbook,
        reason=f"{node_of(call)} is about to be drained",
        issued_at=call.issued_at,
        expires_at=until,
    )
    replies = [reply for reply in await bus.request(command) if reply.is_final]
    bus.acknowledge(command.id)
    if not replies:
        return "no answer in time"
    bad = next((reply for reply in replies if reply.status != envelope.APPLIED), None)
    return "written" if bad is None else f"{bad.status}: {bad.output.get('reason', '')}".rstrip(": ")


def _is_on(details: Mapping[str, Any], node: str) -> bool:
    placement = details.get("placement")
    return isinstance(placement, list) and any(
        isinstance(rank, Mapping) and rank.get("node") == node for rank in placement
    )
