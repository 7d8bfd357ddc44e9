"""Commands to a node's agent, further limited by its policy."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from datetime import datetime, timedelta
from typing import Annotated, Any, ClassVar, Literal

from msgspec.structs import replace
from pydantic import AliasChoices, BaseModel, ConfigDict, Field, ValidationInfo, field_validator, model_validator

from trainmedic.wire import envelope
from trainmedic_core import words
from trainmedic_core.target import Target, TargetKind
from trainmedic_server.actions.agent_outputs import NODE_FACTS, NODE_HEALTH, POWER_LIMIT
from trainmedic_server.actions.base import ActionParams, Irreversible
from trainmedic_server.actions.commands import CommandAction
from trainmedic_server.actions.placement import PlacedAction, PlacedParams
from trainmedic_server.domain.destinations import command_id_for
from trainmedic_server.domain.value_types import Shape
from trainmedic_server.errors import PermanentFailure, TemporaryFailure
from trainmedic_server.ports.actions import ON_RECORD, Action, Call, Inverse, LeasedEffect, Renewal
from trainmedic_server.ports.outside import final_replies, own_command

LEASE = timedelta(minutes=5)
"""Lifetime of a power cap after its last renewal. It outlasts a restart of the server or Redis, but soon ends
without a server.
"""
RENEW = "gpu.renew_lease"  # A command that playbooks cannot use


def percentage(value: float | None, info: ValidationInfo) -> float | None:
    """Reject a share such as 0.8 by ValueError, except in stored values."""
    if info.context is not ON_RECORD and value is not None and value < 1:
        raise ValueError(f"{value:g} means {value:g} %; write {value * 100:g}")
    return value


class PowerLimitParams(PlacedParams):
    """Exactly one of ``watts``, ``percent`` and ``restore``."""

    watts: float | None = Field(None, gt=0, le=10_000, description="The limit, in watts.")
    percent: float | None = Field(
        None,
        gt=0,
        le=100,
        description="The limit, in percent of the card's default.",
        json_schema_extra={"minimum": 1},
    )
    restore: Literal[True] | None = Field(None, description="Back to the limit from before the cap.")

    _is_a_percentage = field_validator("percent")(percentage)

    @model_validator(mode="after")
    def _says_one_limit(self) -> PowerLimitParams:
        if sum(value is not None for value in (self.watts, self.percent, self.restore)) != 1:
            raise ValueError("give exactly one of watts and percent")
        return self


class GpuPowerLimit(PlacedAction):
    name: ClassVar[str] = "gpu.power_limit"
    summary: ClassVar[str] = "Limit the power of a GPU, or of all GPUs of a job, within the agents' policies."
    targets: ClassVar[frozenset[TargetKind]] = frozenset({TargetKind.GPU, TargetKind.JOB})
    default_timeout: ClassVar[timedelta] = timedelta(seconds=30)
    Params: ClassVar[type[BaseModel]] = PowerLimitParams
    outputs: ClassVar[Mapping[str, Shape]] = POWER_LIMIT
    per_gpu: ClassVar[bool] = True
    lease: ClassVar[timedelta] = LEASE

    @classmethod
    def inverse(cls, params: BaseModel, output: Mapping[str, Any] | None) -> Inverse | None:
        """Return the end of this cap. The agent knows the previous limit and other caps."""
        assert isinstance(params, PowerLimitParams)
        if params.restore:
            return None
        nodes = {"nodes": params.model_dump(mode="json")["nodes"]} if params.nodes is not None else {}
        return Inverse(cls.name, {"restore": True, **nodes})

    def wire_params(self, call: Call) -> Mapping[str, Any]:
        wire = dict(super().wire_params(call))
        return wire if "restore" in wire else {**wire, "lease_seconds": self.lease.total_seconds()}

    @classmethod
    def granted(cls, output: Mapping[str, Any]) -> timedelta:
        lowest = output.get("lowest")  # only of a job: each number's lowest value of its GPUs
        seconds = (lowest if isinstance(lowest, Mapping) else output).get("lease_seconds")
        if isinstance(seconds, int | float) and 0 < seconds < cls.lease.total_seconds():
            return timedelta(seconds=seconds)
        return cls.lease

    async def renew(self, effects: Sequence[LeasedEffect], until: datetime) -> Sequence[Renewal]:
        by_node: dict[str, dict[str, LeasedEffect]] = {}
        for cap in effects:
            if cap.params.get("restore"):
                continue
            if cap.target.kind is TargetKind.JOB:
                for destination in self.places(cap.params):
                    by_node.setdefault(destination.node or "", {})[command_id_for(cap.command_id, destination)] = cap
            else:
                by_node.setdefault(cap.target.node or "", {})[cap.command_id] = cap
        renewals = await asyncio.gather(*(self._renew_on(node, caps, until) for node, caps in by_node.items()))
        return [renewal for node_renewals in renewals for renewal in node_renewals]

    async def _renew_on(self, node: str, caps: Mapping[str, LeasedEffect], until: datetime) -> list[Renewal]:
        target, params = Target(TargetKind.NODE, node=node), _renewal_params(caps, self.lease)
        reason = "these power limits are still needed"
        command = own_command(RENEW, target, params, reason, self._clock.now(), until)
        reply = next(iter(await final_replies(self._bus, command)), None)
        if reply is None:
            return [Renewal(cap, node, "unanswered", f"the agent on {node} did not answer") for cap in caps.values()]
        if reply.status != envelope.APPLIED:
            why = f"the agent on {node} answered {reply.status}: {reply.output.get('reason', 'no reason given')}"
            return [Renewal(cap, node, "refused", why) for cap in caps.values()]
        return [_renewal_of(command_id, cap, node, reply.output) for command_id, cap in caps.items()]


def _renewal_params(caps: Mapping[str, LeasedEffect], lease: timedelta) -> Mapping[str, Any]:
    reapplied = [command_id for command_id, cap in caps.items() if cap.again]
    params = {"holds": list(caps), "lease_seconds": lease.total_seconds()}
    return {**params, "again": reapplied} if reapplied else params


def _renewal_of(command_id: str, cap: LeasedEffect, node: str, output: Mapping[str, Any]) -> Renewal:
    # Caps not in effect; those whose lease expired; by cap, why it ended, or GPUs on which it was reapplied.
    unknown, expired = output.get("unknown"), output.get("lapsed")
    reasons, reapplied = output.get("ended"), output.get("again")
    if not isinstance(unknown, list) or command_id not in unknown:
        gpus = reapplied.get(command_id) if isinstance(reapplied, Mapping) else None
        return Renewal(cap, node, "renewed", output={"gpus": gpus} if gpus else {})
    why = reasons.get(command_id) if isinstance(reasons, Mapping) else None
    return Renewal(
        cap,
        node,
        "lost",
        f"the agent on {node} no longer holds it: {why or 'there is no such cap'}",
        has_expired=isinstance(expired, list) and command_id in expired,
    )


MOST_FILESYSTEMS = 100  # limit of the agents; omitting file systems only deletes less


class AlertFilesystem(BaseModel):
    model_config = ConfigDict(frozen=True, extra="ignore")

    mountpoint: str = Field(
        "",
        max_length=4096,
        validation_alias=AliasChoices("mountpoint", "exported_mountpoint", "mount_point"),
        description="Empty if it is not known. Then no file system is excluded.",
    )
    device: str = Field(
        "",
        max_length=4096,
        validation_alias=AliasChoices("device", "exported_device"),
        description="The mounted device, such as /dev/sda1.",
    )


class CleanParams(ActionParams):
    rules: tuple[Annotated[str, Field(min_length=1, max_length=128)], ...] = Field(
        min_length=1, description="Names of cleaning rules in the agent's policy, in this order."
    )
    until_free_percent: float | None = Field(
        None, gt=0, lt=100, description="Stop once this much is free.", json_schema_extra={"minimum": 1}
    )
    dry_run: bool = Field(False, description="Only report what would be deleted.")
    filesystems: tuple[AlertFilesystem, ...] = Field(
        (),
        max_length=10_000,
        description="File systems that need space. The agent does not clean roots on other file systems. Labels of "
        "alerts will do.",
    )

    _is_a_percentage = field_validator("until_free_percent")(percentage)


class _DiskAction(Irreversible, CommandAction):
    targets: ClassVar[frozenset[TargetKind]] = frozenset({TargetKind.NODE, TargetKind.GPU})
    default_timeout: ClassVar[timedelta] = timedelta(minutes=10)
    waits_for_receiver: ClassVar[bool] = False
    changes_disks_only: ClassVar[bool] = True

    def wire_params(self, call: Call) -> Mapping[str, Any]:
        return with_known_filesystems(super().wire_params(call))


class DiskClean(_DiskAction):
    name: ClassVar[str] = "disk.clean"
    summary: ClassVar[str] = "Free disk space by the named rules of the agent's policy."
    Params: ClassVar[type[BaseModel]] = CleanParams


def with_known_filesystems(params: Mapping[str, Any]) -> Mapping[str, Any]:
    """Keep each file system once. Omit the list, which limits the agent, if one is unknown: it would not be cleaned."""
    wire = dict(params)
    by_name = {(entry["mountpoint"], entry["device"]): entry for entry in wire.pop("filesystems")}
    is_known = by_name and all(mountpoint for mountpoint, _ in by_name)
    return {**wire, "filesystems": list(by_name.values())[:MOST_FILESYSTEMS]} if is_known else wire


class PruneContainersParams(ActionParams):
    dry_run: bool = Field(False, description="Only report what would be removed.")
    filesystems: tuple[AlertFilesystem, ...] = Field(
        (),
        max_length=10_000,
        description="File systems that need space. If the engine's storage is on none of them, the agent refuses. "
        "Labels of alerts can be used.",
    )


class DiskPruneContainers(_DiskAction):
    name: ClassVar[str] = "disk.prune_containers"
    summary: ClassVar[str] = (
        "Remove unused images, stopped containers and build cache of a node's container engine, by its agent's policy."
    )
    Params: ClassVar[type[BaseModel]] = PruneContainersParams


class NodeFacts(Irreversible, PlacedAction):
    name: ClassVar[str] = "node.facts"
    summary: ClassVar[str] = (
        "Read CPU, memory, disk and GPUs of a node, or of all nodes of a job, as the step's output."
    )
    targets: ClassVar[frozenset[TargetKind]] = frozenset({TargetKind.NODE, TargetKind.GPU, TargetKind.JOB})
    harmful: ClassVar[bool] = False
    default_timeout: ClassVar[timedelta] = timedelta(seconds=15)
    outputs: ClassVar[Mapping[str, Shape]] = NODE_FACTS


# Longest time of a check, by level.
HEALTH_LIMITS: Mapping[str, timedelta] = {"quick": timedelta(minutes=2), "burn": timedelta(minutes=10)}
_SHOWN_FAULTS = 4


class HealthParams(ActionParams):
    level: Literal["quick", "burn"] = Field(
        "quick",
        description="quick reads counters and states. burn also loads the GPUs, which the agent's policy must allow.",
    )
    gpus: int = Field(1, ge=0, le=1024, description="Minimum number of responding GPUs.")
    min_gbps: float | None = Field(
        None, gt=0, le=100_000, description="Minimum rate of each RDMA port that is up, Gbit/s."
    )


class NodeHealth(Irreversible, CommandAction):
    """Succeeds if the verdict is ``ok`` or ``degraded``."""

    name: ClassVar[str] = "node.health"
    summary: ClassVar[str] = "Check GPUs, links, network, disks and file systems of a node."
    targets: ClassVar[frozenset[TargetKind]] = frozenset({TargetKind.NODE, TargetKind.GPU})
    harmful: ClassVar[bool] = False
    default_timeout: ClassVar[timedelta] = HEALTH_LIMITS["burn"]
    Params: ClassVar[type[BaseModel]] = HealthParams
    waits_for_receiver: ClassVar[bool] = False
    outputs: ClassVar[Mapping[str, Shape]] = NODE_HEALTH

    async def perform(self, call: Call) -> Mapping[str, Any]:
        assert isinstance(call.params, HealthParams)
        until = call.issued_at + HEALTH_LIMITS[call.params.level]
        output = await super().perform(replace(call, deadline=min(call.deadline, until)))
        if call.params.min_gbps is not None and not _has_check(output, "min_gbps"):
            raise PermanentFailure(f"the agent of {call.target.node!r} did not check min_gbps: update it", output)
        if output.get("verdict") in ("ok", "degraded"):
            return output
        listed = output.get("faults")
        faults = [str(fault) for fault in listed] if isinstance(listed, list) else []
        reason = words.some(faults, _SHOWN_FAULTS) or "the agent's answer has no verdict"
        raise TemporaryFailure(f"node {call.target.node!r} is not healthy: {reason}", output)


def _has_check(output: Mapping[str, Any], name: str) -> bool:
    checks = output.get("checks")
    return isinstance(checks, list) and any(isinstance(each, Mapping) and each.get("name") == name for each in checks)


# After adding one, run tests/unit/actions/test_node_commands.py: it names the places to edit.
ACTIONS: tuple[type[Action], ...] = (GpuPowerLimit, DiskClean, DiskPruneContainers, NodeFacts, NodeHealth)
