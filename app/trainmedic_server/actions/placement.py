"""Node actions on a job: a command for each place where the job runs, and one outcome of all the replies.

Where a job runs is what its presence reports; where it reports nothing, what the cluster and the agents know of
its pods (``pods``). It is looked up once per step and put on record before anything is sent, so that a restarted
server goes on with the same places, and an undo finds them when the job has long gone.
The id of each place's command follows from the attempt's, so that a command which is sent again is known
where it was applied.
"""

from __future__ import annotations

import asyncio
import hashlib
import uuid
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any, ClassVar

from pydantic import BaseModel, Field
from pydantic.json_schema import SkipJsonSchema

from trainmedic_server.actions import pods
from trainmedic_server.actions.base import ActionParams
from trainmedic_server.actions.commands import CommandAction
from trainmedic_server.domain.target import Target, TargetKind
from trainmedic_server.domain.topology import AgentTopology, ranks_in
from trainmedic_server.errors import ActionFailure, BusUnavailable, OutcomeUnknown, PermanentFailure, TemporaryFailure
from trainmedic_server.ports.actions import Call, Services
from trainmedic_server.ports.outside import Presence

Nodes = Mapping[str, tuple[str, ...]]
"""The GPUs of a job by the node that they are in; of nodes alone the GPUs are empty."""

_SHOWN = 4
_DROPPED: Any = object()


class PlacedParams(ActionParams):
    """Parameters of an action that works on every node of a job."""

    nodes: Annotated[
        SkipJsonSchema[Nodes | None],
        Field(description="Put in by the server: the nodes of the job, and its GPUs there."),
    ] = None

    def of_command(self) -> dict[str, Any]:
        """The parameters that go to the receiver."""
        return self.model_dump(mode="json", by_alias=True, exclude_none=True, exclude={"nodes"})


class PlacedAction(CommandAction):
    """A command to a node's agent; where the target is a job, to each of its nodes, or GPUs (``per_gpu``).

    Applied everywhere is success. The output has, for each number, the highest of all places; the
    lowest under ``lowest``; and each place's own under ``by_node``. Done nowhere is a failure. Done
    here and not there, or perhaps, is unknown, as with the ranks of a job. An undo that failed in
    some places only has failed: it is tried again, for taking back twice changes nothing.
    """

    Params: ClassVar[type[BaseModel]] = PlacedParams
    per_gpu: ClassVar[bool] = False
    waits_for_receiver: ClassVar[bool] = False
    """False: the agent is a service of its node, so where it is away somebody has to look, and learns it soon."""

    def __init__(self, services: Services) -> None:
        super().__init__(services)
        self._cluster_topology = services.cluster_topology
        self._sent: dict[str, list[str]] = {}

    @classmethod
    def check_template(cls, raw: Mapping[str, Any]) -> None:
        if "nodes" in raw:
            raise ValueError("nodes is put in by the server; the nodes are those on which the target job runs")

    async def locate(self, call: Call) -> BaseModel:
        params = call.params
        if call.target.kind is not TargetKind.JOB or not isinstance(params, PlacedParams) or params.nodes is not None:
            return params
        try:
            nodes = await self._located(call.target)
        except BusUnavailable as error:
            raise TemporaryFailure("nobody knows where the job runs while Redis is away") from error
        return params.model_copy(update={"nodes": nodes})

    async def _located(self, job: Target) -> Nodes:
        """The places that the job reports, else those of its pods. Raises BusUnavailable, and as `locate` does."""
        presence = await self._presence(job)
        name = job.job or ""
        has_reported = presence is not None and presence.details.get("placement")
        job_pods = () if has_reported else self._cluster_topology().pods_by_job.get(name, ())
        if not job_pods:
            return placement_of(job, presence, with_gpus=self.per_gpu)
        if not self.per_gpu:
            return dict.fromkeys(pods.nodes_of(name, job_pods), ())
        agents = AgentTopology.of({agent.name: agent.details for agent in await self._bus.agents()})
        return pods.gpus_of(name, job_pods, agents)

    @classmethod
    def places(cls, params: BaseModel | Mapping[str, Any]) -> Sequence[Target]:
        nodes: Nodes = (params.get("nodes") if isinstance(params, Mapping) else getattr(params, "nodes", None)) or {}
        if not cls.per_gpu:
            return [Target(TargetKind.NODE, node=node) for node in nodes]
        return [Target(TargetKind.GPU, node=node, gpu=gpu) for node, gpus in nodes.items() for gpu in gpus]

    async def perform(self, call: Call) -> Mapping[str, Any]:
        if call.target.kind is not TargetKind.JOB:
            return await super().perform(call)
        parts = [part_of(call, place) for place in self.places(call.params)]
        self._sent[call.command_id] = [part.command_id for part in parts]
        outcomes = await asyncio.gather(*(self._part(part) for part in parts))
        return combine(outcomes, is_undo=call.undo_of is not None)

    def outcome_saved(self, command_id: str) -> None:
        for sent_id in self._sent.pop(command_id, [command_id]):
            super().outcome_saved(sent_id)

    def wire_params(self, call: Call) -> Mapping[str, Any]:
        assert isinstance(call.params, PlacedParams)
        return call.params.of_command()

    async def _part(self, part: Call) -> PlaceOutcome:
        try:
            return PlaceOutcome(part.target, await super().perform(part))
        except ActionFailure as failure:
            return PlaceOutcome(part.target, failure.output, failure)


@dataclass(frozen=True, slots=True)
class PlaceOutcome:
    """What became of the command to one place."""

    place: Target
    output: Mapping[str, Any]
    failure: ActionFailure | None = None
    """None where the command was applied."""


def placement_of(job: Target, presence: Presence | None, *, with_gpus: bool) -> Nodes:
    """The nodes on which every rank of the job runs. Raises TemporaryFailure or PermanentFailure."""
    if presence is None:
        raise TemporaryFailure(f"no job named {job.job!r} is connected, so nobody knows where it runs")
    placed = ranks_in(job.job or "", presence.details)
    nodes: dict[str, set[str]] = {rank.node: set() for rank in placed}
    for rank in placed:
        if rank.gpu is not None:
            nodes[rank.node].add(rank.gpu)
    without_gpu = [rank.rank for rank in placed if rank.gpu is None]
    if not nodes:
        raise PermanentFailure(
            f"job {job.job!r} does not say on which nodes it runs: its presence has no placement, which "
            "trainmedic.distributed.share announces"
        )
    ranks = presence.details.get("ranks")
    missing = sorted(set(ranks) - {rank.rank for rank in placed}) if isinstance(ranks, list) else []
    if missing:
        raise PermanentFailure(f"job {job.job!r} does not say where {_named(missing)} of it runs")
    if with_gpus and without_gpu:
        raise PermanentFailure(f"{_named(without_gpu)} of job {job.job!r} names no GPU")
    return {node: tuple(sorted(nodes[node])) for node in sorted(nodes)}


def derived_id(command_id: str, *parts: str) -> str:
    """A UUIDv7 made from another and some text: it has the moment of the other, and the rest from a hash of both."""
    digest = hashlib.sha256("\0".join((command_id, *parts)).encode()).digest()
    moment = uuid.UUID(command_id).int >> 80
    value = moment << 80 | int.from_bytes(digest[:10], "big")
    # The version and the variant of a UUIDv7 (RFC 9562, section 5.7).
    value = value & ~(0xF << 76) | 0x7 << 76
    value = value & ~(0x3 << 62) | 0x2 << 62
    return str(uuid.UUID(int=value))


def id_at(command_id: str, place: Target) -> str:
    """The id of the command to one place, of an attempt with this id."""
    return derived_id(command_id, place.node or "", place.gpu or "")


def part_of(call: Call, place: Target) -> Call:
    """The call for one place of a job."""
    undo_of = id_at(call.undo_of, place) if call.undo_of is not None else None
    return replace(call, command_id=id_at(call.command_id, place), target=place, undo_of=undo_of, report_wait=None)


def combine(outcomes: Sequence[PlaceOutcome], *, is_undo: bool) -> Mapping[str, Any]:
    """The output of all places, where each has applied the command; else raises the failure of the whole."""
    failures = [outcome.failure for outcome in outcomes if outcome.failure is not None]
    output = merged_output(outcomes)
    if not failures:
        return output
    message = "; ".join(str(failure) for failure in failures[:_SHOWN])
    if len(failures) > _SHOWN:
        message += f"; and {len(failures) - _SHOWN} more alike"
    applied = len(outcomes) - len(failures)
    if applied:
        message = f"applied in {applied} of {len(outcomes)} places, but {message}"
    if any(isinstance(failure, OutcomeUnknown) for failure in failures) or (applied and not is_undo):
        raise OutcomeUnknown(message, output)
    refused = [failure for failure in failures if isinstance(failure, PermanentFailure)]
    if refused and (not is_undo or len(refused) == len(failures)):
        raise PermanentFailure(message, output)
    raise TemporaryFailure(message, output)


def merged_output(outcomes: Iterable[PlaceOutcome]) -> dict[str, Any]:
    """The highest of each number, ``lowest``, and each place's own output."""
    by_node: dict[str, Any] = {}
    for outcome in outcomes:
        node, gpu = outcome.place.node or "", outcome.place.gpu
        if not outcome.output:
            continue
        if gpu is None:
            by_node[node] = dict(outcome.output)
        else:
            by_node.setdefault(node, {})[gpu] = dict(outcome.output)
    outputs = [outcome.output for outcome in outcomes if outcome.output and outcome.failure is None]
    highest, lowest = _merged(outputs, max), _merged(outputs, min)
    return {**(highest or {}), "lowest": lowest or {}, "nodes": len(by_node), "by_node": by_node}


def _merged(values: Collection[Any], pick: Callable[[Iterable[Any]], Any]) -> Any:
    """Values of the same meaning as one: numbers by `pick`, mappings member by member, others where all agree."""
    present = [value for value in values if value is not None]
    if not present:
        return None
    if all(isinstance(value, Mapping) for value in present):
        names = dict.fromkeys(name for value in present for name in value)
        members = {name: _merged([value.get(name) for value in present], pick) for name in names}
        return {name: member for name, member in members.items() if member is not _DROPPED}
    if all(isinstance(value, int | float) for value in present):
        return pick(present)
    return present[0] if all(value == present[0] for value in present) else _DROPPED


def _named(ranks: Sequence[Any]) -> str:
    shown = ", ".join(str(rank) for rank in ranks[:_SHOWN])
    more = f" and {len(ranks) - _SHOWN} more" if len(ranks) > _SHOWN else ""
    return f"{'rank' if len(ranks) == 1 else 'ranks'} {shown}{more}"
