"""The commands to a job's launcher (trainmedic-run): ``launcher.*``.

A launcher leaves a node out of an elastic job, or takes it back. Where each node has a launcher of its own, that of
the node is meant; where one starts the processes of all nodes, as above srun, it is that one. Not here: what a launcher
does (``trainmedic.launch``), or the sequence of checkpoint, change and resume, which is a playbook's.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from datetime import timedelta
from typing import Any, ClassVar, cast

from pydantic import BaseModel, Field

from trainmedic.wire import notice
from trainmedic_server.actions.base import ActionParams
from trainmedic_server.actions.commands import CommandAction, check_undone, judge
from trainmedic_server.domain.target import TargetKind
from trainmedic_server.errors import BusUnavailable, OutcomeUnknown, PermanentFailure, TemporaryFailure
from trainmedic_server.ports.actions import Action, Call, Inverse
from trainmedic_server.ports.outside import Presence

_LEFT_OUT = "left_out"


class LauncherNodeParams(ActionParams):
    node: str = Field(min_length=1, max_length=253, pattern=r"^[^-\s,/][^\s,/]*$", description="The node's name.")


class _LauncherAction(CommandAction):
    targets: ClassVar[frozenset[TargetKind]] = frozenset({TargetKind.JOB})
    default_timeout: ClassVar[timedelta] = timedelta(minutes=5)  # the processes of a node save, and end
    Params: ClassVar[type[BaseModel]] = LauncherNodeParams

    async def perform(self, call: Call) -> Mapping[str, Any]:
        job, node = str(call.target.job), cast(LauncherNodeParams, call.params).node
        try:
            launchers = [launcher for launcher in await self._bus.launchers() if _is_of(launcher, job)]
        except BusUnavailable as error:
            raise TemporaryFailure(f"the launchers of job {job!r} are not known, because Redis is away") from error
        launcher = _launcher_for(launchers, node)
        if launcher is None:
            where = f" on node {node!r}" if launchers else ""
            raise TemporaryFailure(f"no launcher of job {job!r}{where} is connected: start it by trainmedic-run there")
        if call.undo_of is None:
            self.check_bounds(launchers, node)
        name = notice.launcher_name(job, str(launcher.details.get("node")))
        command = self._command(call)
        replies = await self._bus.request(replace(command, target={**command.target, "launcher": name}))
        receiver = f"the launcher {name!r}"
        if not any(reply.is_final for reply in replies):
            raise OutcomeUnknown(f"{receiver} did not answer in time")
        output = judge(receiver, replies, "")
        if call.undo_of is not None:
            check_undone(receiver, replies, output, call.undoes_applied)
        return output

    def check_bounds(self, launchers: Sequence[Presence], node: str) -> None:
        """Raise PermanentFailure where the job would have fewer nodes than it needs, or more than it may have."""


class LauncherExcludeNode(_LauncherAction):
    name: ClassVar[str] = "launcher.exclude_node"
    summary: ClassVar[str] = "Have an elastic job go on without a node; its undo takes the node back."

    @classmethod
    def inverse(cls, params: BaseModel, output: Mapping[str, Any] | None) -> Inverse | None:
        return Inverse(LauncherIncludeNode.name, params.model_dump())

    def check_bounds(self, launchers: Sequence[Presence], node: str) -> None:
        least = _bound(launchers, "min_nodes")
        left = [name for name in _working(launchers) if name != node]
        if least is not None and len(left) < least:
            raise PermanentFailure(f"without {node!r} {len(left)} nodes would be left, and the job needs {least}")


class LauncherIncludeNode(_LauncherAction):
    name: ClassVar[str] = "launcher.include_node"
    summary: ClassVar[str] = "Have an elastic job take a node back that was left out."

    @classmethod
    def inverse(cls, params: BaseModel, output: Mapping[str, Any] | None) -> Inverse | None:
        return Inverse(LauncherExcludeNode.name, params.model_dump())

    def check_bounds(self, launchers: Sequence[Presence], node: str) -> None:
        most = _bound(launchers, "max_nodes")
        then = {*_working(launchers), node}
        if most is not None and len(then) > most:
            raise PermanentFailure(f"with {node!r} there would be {len(then)} nodes, and the job may have {most}")


def _is_of(launcher: Presence, job: str) -> bool:
    """Whether a presence is that of a launcher of the job, and believed."""
    return launcher.name == job and bool(launcher.details)


def _launcher_for(launchers: Sequence[Presence], node: str) -> Presence | None:
    for launcher in launchers:
        if launcher.details.get("node") == node and launcher.details.get("starts_all_nodes") is not True:
            return launcher
    return next((launcher for launcher in launchers if launcher.details.get("starts_all_nodes") is True), None)


def _working(launchers: Sequence[Presence]) -> list[str]:
    """The nodes that the job has now, where each has a launcher of its own."""
    return [str(each.details.get("node")) for each in launchers if each.details.get("state") != _LEFT_OUT]


def _bound(launchers: Sequence[Presence], name: str) -> int | None:
    bounds = [each.details.get(name) for each in launchers]
    numbers = [bound for bound in bounds if isinstance(bound, int) and not isinstance(bound, bool)]
    return max(numbers, default=None) if name == "min_nodes" else min(numbers, default=None)


ACTIONS: tuple[type[Action], ...] = (LauncherExcludeNode, LauncherIncludeNode)
