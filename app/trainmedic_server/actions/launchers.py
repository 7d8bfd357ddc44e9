"""Commands to launchers (trainmedic-run): of a target job, or of all elastic jobs on a target node, if any."""

from __future__ import annotations

import asyncio
import re
from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from datetime import timedelta
from typing import Any, ClassVar, cast

from msgspec import Struct, field
from pydantic import BaseModel, Field

from trainmedic.wire import envelope, notice
from trainmedic_core.fields import Duration
from trainmedic_core.target import TargetKind
from trainmedic_server.actions import node_checkpoints
from trainmedic_server.actions.base import ActionParams, BasicAction
from trainmedic_server.actions.commands import CommandAction, check_undone, judge
from trainmedic_server.domain.destinations import derived_id
from trainmedic_server.domain.topology import ranks_in
from trainmedic_server.errors import ActionFailure, BusUnavailable, OutcomeUnknown, PermanentFailure, TemporaryFailure
from trainmedic_server.ports.actions import Action, Call, Inverse
from trainmedic_server.ports.outside import Presence

# In a launcher's presence:
_LEFT_OUT = "left_out"  # its state while its own node is excluded, and the member with all nodes that it excludes
_FOR_LOAD = "left_out_for_load"  # the member with those of them that are healthy


class LauncherNodeParams(ActionParams):
    node: str | None = Field(
        None,
        min_length=1,
        max_length=253,
        pattern=r"^[^-\s,/][^\s,/]*$",
        description="Name of the node. By default the target's; required on a job.",
    )


class ExcludeNodeParams(LauncherNodeParams):
    checkpoint: Duration | None = Field(
        None, description="On a node: first wait at most this long for checkpoints of the jobs that leave it."
    )
    unless_heard: bool = Field(
        False, description="On a node: exclude nothing while its agent, or a launcher there, is connected."
    )
    for_load: bool = Field(
        False, description="The node is healthy, and the job needs fewer nodes. `launcher.nodes` then offers it again."
    )


class IncludeNodeParams(LauncherNodeParams):
    for_load: bool = Field(False, description="Only if the node was excluded only for load; otherwise `rejected`.")
    jobs: tuple[str, ...] | None = Field(None, description="Used by an undo: the jobs that excluded the node.")


class _Selection(Struct, frozen=True):
    """By job: the launcher to command, or why there is none."""

    asked: Mapping[str, Presence]
    not_asked: Mapping[str, str] = field(default_factory=dict)


class _LauncherAction(CommandAction, ABC):
    leaves_disks: ClassVar[bool] = True
    targets: ClassVar[frozenset[TargetKind]] = frozenset({TargetKind.JOB, TargetKind.NODE, TargetKind.GPU})
    default_timeout: ClassVar[timedelta] = timedelta(minutes=5)  # The processes of a node save and end.
    Params: ClassVar[type[BaseModel]] = LauncherNodeParams
    # The job's processes restart and report nothing until then. Alerts about a node have other sources.
    silences: ClassVar[frozenset[TargetKind]] = frozenset({TargetKind.JOB})
    nothing_done: ClassVar[str]

    async def perform(self, call: Call) -> Mapping[str, Any]:
        node = cast(LauncherNodeParams, call.params).node or call.target.node
        if node is None:
            raise PermanentFailure(f"{self.name} on a job needs the name of the node")
        try:
            launchers = [launcher for launcher in await self._bus.launchers() if launcher.details]  # has trusted data
            if call.target.kind is not TargetKind.JOB:
                selection = await self.select(call, node, launchers)
        except BusUnavailable as error:
            raise TemporaryFailure("the launchers are unknown, because Redis is unavailable") from error
        if call.target.kind is not TargetKind.JOB:
            return await self._perform_on_node(call, node, selection)
        job = str(call.target.job)
        launchers = [launcher for launcher in launchers if launcher.name == job]
        launcher = _launcher_for(launchers, node)
        if launcher is None:
            where = f" on node {node!r}" if launchers else ""
            raise TemporaryFailure(f"no launcher of job {job!r}{where} is connected: start it by trainmedic-run there")
        if call.undo_of is None:
            self.check_bounds(launchers, node)
        return await self._command_launcher(call, self._command(call), launcher)

    def wire_params(self, call: Call) -> Mapping[str, Any]:
        node = cast(LauncherNodeParams, call.params).node or call.target.node
        # A launcher of an older SDK would ignore this parameter, so send it only if it is set.
        return {"node": node, **({"for_load": True} if getattr(call.params, "for_load", False) else {})}

    async def _command_launcher(self, call: Call, command: envelope.Command, launcher: Presence) -> Mapping[str, Any]:
        name = notice.launcher_name(launcher.name, str(launcher.details.get("node")))
        target = {"kind": "job", "job": launcher.name, "launcher": name}
        replies = await self._bus.request(replace(command, target=target))
        receiver = f"the launcher {name!r}"
        if not any(reply.is_final for reply in replies):
            raise OutcomeUnknown(f"{receiver} did not answer in time")
        output = judge(receiver, replies, "")
        if call.undo_of is not None:
            check_undone(receiver, replies, output, call.undoes_applied)
        return output

    async def _perform_on_node(self, call: Call, node: str, selection: _Selection) -> Mapping[str, Any]:
        jobs = sorted(selection.asked)
        output: dict[str, Any] = {"node": node, "jobs": jobs, "not_asked": dict(selection.not_asked)}
        if not jobs:
            return {**output, "note": self.nothing_done}
        output.update(await self.before_commands(call, node, jobs))
        command = self._command(call)
        parts = [
            replace(
                command,
                id=derived_id(call.command_id, job, "launcher"),
                undo_of=None if call.undo_of is None else derived_id(call.undo_of, job, "launcher"),
            )
            for job in jobs
        ]
        self._sent[call.command_id] = [part.id for part in parts]
        requests = (
            self._command_launcher(call, part, selection.asked[job]) for job, part in zip(jobs, parts, strict=True)
        )
        outcomes = await asyncio.gather(*requests, return_exceptions=True)
        failures = [outcome for outcome in outcomes if isinstance(outcome, BaseException)]
        if not failures:
            return output
        output["jobs"] = [job for job, outcome in zip(jobs, outcomes, strict=True) if isinstance(outcome, Mapping)]
        raise _combined_failure(failures, output, is_undo=call.undo_of is not None)

    @abstractmethod
    async def select(self, call: Call, node: str, launchers: Sequence[Presence]) -> _Selection:
        """Raises BusUnavailable, and as `perform`."""

    async def before_commands(self, call: Call, node: str, jobs: Sequence[str]) -> Mapping[str, Any]:
        return {}

    def check_bounds(self, launchers: Sequence[Presence], node: str) -> None:
        """Raise PermanentFailure for too few or too many nodes."""

    def _within_bounds(
        self, launchers: Sequence[Presence], node: str, chosen: Mapping[str, Presence], not_asked: Mapping[str, str]
    ) -> _Selection:
        asked, refused = {}, dict(not_asked)
        for job, launcher in chosen.items():
            try:
                self.check_bounds([each for each in launchers if each.name == job], node)
                asked[job] = launcher
            except PermanentFailure as failure:
                refused[job] = str(failure)
        return _Selection(asked, refused)


class LauncherExcludeNode(_LauncherAction):
    name: ClassVar[str] = "launcher.exclude_node"
    summary: ClassVar[str] = "Exclude a node from an elastic job, or from all on the node; undo includes it again."
    Params: ClassVar[type[BaseModel]] = ExcludeNodeParams
    nothing_done: ClassVar[str] = (
        "no elastic job that trainmedic-run starts is known to be on the node: nothing was excluded"
    )

    @classmethod
    def inverse(cls, params: BaseModel, output: Mapping[str, Any] | None) -> Inverse | None:
        undo: dict[str, Any] = {"node": cast(LauncherNodeParams, params).node, "jobs": (output or {}).get("jobs")}
        return Inverse(LauncherIncludeNode.name, {name: value for name, value in undo.items() if value is not None})

    async def select(self, call: Call, node: str, launchers: Sequence[Presence]) -> _Selection:
        chosen: dict[str, Presence] = {}
        not_asked: dict[str, str] = {}
        jobs = await self._bus.jobs()
        placed = {job.name for job in jobs if node_checkpoints.is_on(job.details, node)}
        for job in sorted({launcher.name for launcher in launchers}):
            launcher = _launcher_of_job(launchers, job, node)
            if launcher is None:
                continue
            if launcher.details.get("starts_all_nodes") is True:  # It may have no process on this node.
                if job in placed or node in _excluded_nodes(launcher):
                    chosen[job] = launcher
            elif launcher.details.get("max_nodes") is None:
                not_asked[job] = "the job is not elastic: its trainmedic-run has no --max-nodes"
            else:
                chosen[job] = launcher
        if (
            chosen
            and cast(ExcludeNodeParams, call.params).unless_heard
            and (connected := await self._connected_source(node, launchers))
        ):
            return _Selection(
                {}, {**not_asked, **dict.fromkeys(chosen, f"{connected} is connected, so the node is not down")}
            )
        return self._within_bounds(launchers, node, chosen, not_asked)

    async def _connected_source(self, node: str, launchers: Sequence[Presence]) -> str:
        if any(agent.name == node and agent.details for agent in await self._bus.agents()):
            return "its agent"
        return "a launcher there" if any(each.details.get("node") == node for each in launchers) else ""

    async def before_commands(self, call: Call, node: str, jobs: Sequence[str]) -> Mapping[str, Any]:
        patience = cast(ExcludeNodeParams, call.params).checkpoint
        if not patience:
            return {}
        # A resumed attempt is not stopped: only its repeated commands show what was done before the server was killed.
        is_first = not call.resumed
        asked = node_checkpoints.request_checkpoints(
            self._bus, self._clock, call, node, patience, jobs, can_stop=is_first
        )
        return {"checkpoints": await asked}

    def check_bounds(self, launchers: Sequence[Presence], node: str) -> None:
        least = _strictest_bound(launchers, "min_nodes")
        left = [name for name in _working_nodes(launchers) if name != node]
        if least is not None and len(left) < least:
            raise PermanentFailure(f"without {node!r} {len(left)} nodes would be left, and the job needs {least}")


class LauncherIncludeNode(_LauncherAction):
    name: ClassVar[str] = "launcher.include_node"
    summary: ClassVar[str] = "Include an excluded node again in an elastic job, or in all on the node."
    Params: ClassVar[type[BaseModel]] = IncludeNodeParams
    gives_back: ClassVar[bool] = True
    nothing_done: ClassVar[str] = "no connected launcher excludes the node: nothing was included"

    @classmethod
    def inverse(cls, params: BaseModel, output: Mapping[str, Any] | None) -> Inverse | None:
        given = cast(IncludeNodeParams, params)
        undo = {"node": given.node, "for_load": given.for_load or None}
        return Inverse(LauncherExcludeNode.name, {name: value for name, value in undo.items() if value is not None})

    async def select(self, call: Call, node: str, launchers: Sequence[Presence]) -> _Selection:
        chosen = {launcher.name: launcher for launcher in launchers if node in _excluded_nodes(launcher)}
        if call.undo_of is None:
            return self._within_bounds(launchers, node, chosen, {})
        expected = cast(IncludeNodeParams, call.params).jobs
        if expected is None:  # The command to revert had an unknown outcome.
            expected = tuple(sorted({each.name for each in launchers if _launcher_of_job(launchers, each.name, node)}))
            if not expected:
                raise TemporaryFailure(
                    f"no launcher on {node!r} is connected; it is unknown whether the node is excluded"
                )
        chosen = {job: found for job in expected if (found := _launcher_of_job(launchers, job, node)) is not None}
        silent = [job for job in expected if job not in chosen]
        if silent:
            raise TemporaryFailure(f"the launcher on {node!r} of {', '.join(map(repr, silent))} is not connected")
        return _Selection(chosen)

    def check_bounds(self, launchers: Sequence[Presence], node: str) -> None:
        most = _strictest_bound(launchers, "max_nodes")
        then = {*_working_nodes(launchers), node}
        if most is not None and len(then) > most:
            raise PermanentFailure(f"with {node!r} there would be {len(then)} nodes, and the job may have {most}")


class LauncherNodesParams(ActionParams):
    keep: tuple[str, ...] = Field((), description="Nodes that are never offered to leave, such as the rendezvous's.")


class LauncherNodes(BasicAction):
    name: ClassVar[str] = "launcher.nodes"
    summary: ClassVar[str] = "Look up the nodes of an elastic job, and which one could leave it or come back."
    targets: ClassVar[frozenset[TargetKind]] = frozenset({TargetKind.JOB})
    harmful: ClassVar[bool] = False
    default_timeout: ClassVar[timedelta] = timedelta(seconds=30)
    Params: ClassVar[type[BaseModel]] = LauncherNodesParams

    async def perform(self, call: Call) -> Mapping[str, Any]:
        bus, job = self.services.bus, str(call.target.job)
        try:
            launchers = [each for each in await bus.launchers() if each.name == job and each.details]
            jobs = [each for each in await bus.jobs() if each.name == job]
        except BusUnavailable as error:
            raise TemporaryFailure("the launchers are unknown, because Redis is unavailable") from error
        nodes = sorted(_working_nodes(launchers), key=_by_number)
        for_load = {
            node for each in launchers for node in _only_texts(each.details.get(_FOR_LOAD)) if node not in nodes
        }
        least, most = _strictest_bound(launchers, "min_nodes"), _strictest_bound(launchers, "max_nodes")
        output: dict[str, Any] = {
            "nodes": nodes, "waiting": sorted(for_load, key=_by_number), "min_nodes": least, "max_nodes": most,
            "can_leave": None, "can_return": None,
        }  # fmt: skip
        refused = _why_fixed(launchers, most)
        if refused:
            return {**output, "why_none_leaves": refused, "why_none_returns": refused}
        first = next((rank.node for each in jobs for rank in ranks_in(job, each.details) if rank.rank == 0), None)
        keep = {*cast(LauncherNodesParams, call.params).keep, *([first] if first else [])}
        output.update(_node_that_can_leave(nodes, keep, least or 1, is_first_known=first is not None))
        output.update(_node_that_can_return(nodes, output["waiting"], cast(int, most)))
        return output


def _why_fixed(launchers: Sequence[Presence], most: int | None) -> str | None:
    if not launchers:
        return "no launcher of the job is connected; start the job with trainmedic-run"
    if any(each.details.get("starts_all_nodes") is True for each in launchers):
        return "one launcher starts all nodes of the job, so their number is unknown"
    if most is None:
        return "the job is not elastic: its trainmedic-run has no --max-nodes"
    for each in launchers:
        if each.details.get("state") not in ("running", _LEFT_OUT):
            return (
                f"the job is being started: its launcher on {each.details.get('node')} is {each.details.get('state')}"
            )
    return None


def _node_that_can_leave(
    nodes: Sequence[str], keep: Collection[str], least: int, *, is_first_known: bool
) -> dict[str, Any]:
    if len(nodes) - 1 < least:
        return {"why_none_leaves": f"the job has {len(nodes)} nodes and needs {least}"}
    if not is_first_known:
        return {"why_none_leaves": "the node of rank 0, which must stay, is unknown"}
    others = [node for node in nodes if node not in keep]
    if not others:
        return {"why_none_leaves": "all of its nodes must stay"}
    return {"can_leave": others[-1]}


def _node_that_can_return(nodes: Sequence[str], waiting: Sequence[str], most: int) -> dict[str, Any]:
    if len(nodes) + 1 > most:
        return {"why_none_returns": f"the job has {len(nodes)} nodes and may have {most}"}
    if not waiting:
        return {"why_none_returns": "no node that was excluded for load is waiting"}
    return {"can_return": waiting[0]}


def _by_number(node: str) -> list[tuple[int, str]]:
    """Return a sort key: n2 comes before n10."""
    # Longer numbers are split, which bounds the work of `int`.
    return [
        (int(part), "") if part.isascii() and part.isdigit() else (-1, part)
        for part in re.split(r"([0-9]{1,18})", node)
    ]


def _only_texts(reported: object) -> Sequence[str]:
    return [node for node in reported if isinstance(node, str)] if isinstance(reported, list) else []


def _combined_failure(failures: Sequence[BaseException], output: Mapping[str, Any], *, is_undo: bool) -> BaseException:
    other = next((failure for failure in failures if not isinstance(failure, ActionFailure)), None)
    if other is not None:
        return other
    message = "; ".join(map(str, failures))
    # With some jobs changed, a plain failure would mean that nothing needs an undo. A failed undo is repeated anyway.
    if any(isinstance(failure, OutcomeUnknown) for failure in failures) or (output["jobs"] and not is_undo):
        return OutcomeUnknown(message, output)
    is_final = all(isinstance(failure, PermanentFailure) for failure in failures)
    return PermanentFailure(message, output) if is_final else TemporaryFailure(message, output)


def _excluded_nodes(launcher: Presence) -> Sequence[str]:
    """Launchers of older SDKs state only their own node."""
    excluded = launcher.details.get(_LEFT_OUT)
    if isinstance(excluded, list):
        return _only_texts(excluded)
    return [str(launcher.details.get("node"))] if launcher.details.get("state") == _LEFT_OUT else []


def _launcher_of_job(launchers: Sequence[Presence], job: str, node: str) -> Presence | None:
    return _launcher_for([launcher for launcher in launchers if launcher.name == job], node)


def _launcher_for(launchers: Sequence[Presence], node: str) -> Presence | None:
    """Return the launcher on the node, otherwise the one that starts all nodes."""
    for launcher in launchers:
        if launcher.details.get("node") == node and launcher.details.get("starts_all_nodes") is not True:
            return launcher
    return next((launcher for launcher in launchers if launcher.details.get("starts_all_nodes") is True), None)


def _working_nodes(launchers: Sequence[Presence]) -> list[str]:
    return [str(each.details.get("node")) for each in launchers if each.details.get("state") != _LEFT_OUT]


def _strictest_bound(launchers: Sequence[Presence], name: str) -> int | None:
    """Return None if no launcher has it."""
    bounds = [each.details.get(name) for each in launchers]
    numbers = [bound for bound in bounds if isinstance(bound, int) and not isinstance(bound, bool)]
    return max(numbers, default=None) if name == "min_nodes" else min(numbers, default=None)


ACTIONS: tuple[type[Action], ...] = (LauncherExcludeNode, LauncherIncludeNode, LauncherNodes)
