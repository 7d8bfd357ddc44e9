"""Action ``slurm.reboot``. A resumed attempt finds its request by the command's mark in the node's reason."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from datetime import timedelta
from typing import Any, ClassVar

from pydantic import BaseModel

from trainmedic_server.actions.base import ActionParams, Irreversible
from trainmedic_server.actions.slurm import NodeAction, node_state
from trainmedic_server.actions.slurm_marks import marked, owners_of, reboot_mark
from trainmedic_server.errors import TemporaryFailure
from trainmedic_server.ports.actions import Action, Call


class SlurmRebootParams(ActionParams):
    """No parameters."""


class SlurmReboot(Irreversible, NodeAction):
    name: ClassVar[str] = "slurm.reboot"
    asks_first: ClassVar[bool] = True
    leaves_disks: ClassVar[bool] = False
    summary: ClassVar[str] = (
        "Let Slurm reboot the node as soon as no job runs on it. No new job starts, and the node stays down until "
        "slurm.resume. Only through an agent."
    )
    default_timeout: ClassVar[timedelta] = timedelta(minutes=2)
    Params: ClassVar[type[BaseModel]] = SlurmRebootParams

    async def perform(self, call: Call) -> Mapping[str, Any]:
        mark = reboot_mark(hashlib.sha256(call.command_id.encode()).hexdigest()[:8])

        async def attempt() -> Mapping[str, Any]:
            node = await self.find(call)
            if mark in node.reason.split():
                return node_state(node, _describe_progress(node.states))
            owners = owners_of(node.reason) if node.is_out_of_service else ()
            if node.is_out_of_service and not owners:
                raise TemporaryFailure(
                    f"node {node.name} was left as it is: it is {'+'.join(sorted(node.states))} with the reason "
                    f"{node.reason!r}, which a reboot would replace",
                    node_state(node),
                )
            reason = marked(dict.fromkeys((*owners, call.run_id)), f"{mark} {call.reason}")
            await self.slurm.reboot(node.name, reason)
            after = await self.slurm.node(node.name)
            if mark not in after.reason.split():
                raise TemporaryFailure(f"Slurm has not taken the reboot of node {node.name}", node_state(after))
            return node_state(after, _describe_progress(after.states))

        return await self.retry_until_deadline(call, attempt)


def _describe_progress(states: frozenset[str]) -> str:
    if "REBOOT_REQUESTED" in states:
        return "Slurm reboots it as soon as no job runs on it"
    if "REBOOT_ISSUED" in states:
        return "Slurm has ordered its reboot"
    return "Slurm has no reboot of it pending: it has rebooted, or failed to"


ACTIONS: tuple[type[Action], ...] = (SlurmReboot,)
