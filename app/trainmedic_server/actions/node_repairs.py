"""Repairs by a node's agent, within its policy. Playbooks with them ask first unless they name a mode."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import timedelta
from typing import Annotated, ClassVar

from pydantic import BaseModel, Field

from trainmedic_core.target import TargetKind
from trainmedic_server.actions.agent_outputs import GPU_RESET, REBOOT, RESTARTED_CONTAINER, RESTARTED_UNIT
from trainmedic_server.actions.base import ActionParams, Irreversible
from trainmedic_server.actions.commands import CommandAction
from trainmedic_server.domain.value_types import Shape
from trainmedic_server.ports.actions import Action


class _NodeRepair(Irreversible, CommandAction):
    targets: ClassVar[frozenset[TargetKind]] = frozenset({TargetKind.NODE, TargetKind.GPU})
    asks_first: ClassVar[bool] = True
    changes_node: ClassVar[bool] = True
    waits_for_receiver: ClassVar[bool] = False  # A node whose agent is absent needs another repair


class RestartUnitParams(ActionParams):
    unit: Annotated[str, Field(max_length=220, pattern=r"^[A-Za-z0-9:_.\\@][A-Za-z0-9:_.\\@-]*\.service$")] = Field(
        description="Full name of a systemd service that the agent's policy lists."
    )


class RestartUnit(_NodeRepair):
    name: ClassVar[str] = "node.restart_unit"
    summary: ClassVar[str] = "Restart a systemd service that the agent's policy lists."
    default_timeout: ClassVar[timedelta] = timedelta(minutes=2)
    Params: ClassVar[type[BaseModel]] = RestartUnitParams
    outputs: ClassVar[Mapping[str, Shape]] = RESTARTED_UNIT


class RestartContainerParams(ActionParams):
    container: Annotated[str, Field(max_length=200, pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]*$")] = Field(
        description="Name of a container that the agent's policy lists by name or label."
    )


class RestartContainer(_NodeRepair):
    name: ClassVar[str] = "node.restart_container"
    summary: ClassVar[str] = "Restart a container of Docker or Podman that the agent's policy lists."
    default_timeout: ClassVar[timedelta] = timedelta(minutes=2)
    Params: ClassVar[type[BaseModel]] = RestartContainerParams
    outputs: ClassVar[Mapping[str, Shape]] = RESTARTED_CONTAINER


class GpuReset(_NodeRepair):
    name: ClassVar[str] = "gpu.reset"
    summary: ClassVar[str] = "Reset a GPU that no process uses, or all of a node."
    changes_node: ClassVar[bool] = False
    default_timeout: ClassVar[timedelta] = timedelta(minutes=3)
    outputs: ClassVar[Mapping[str, Shape]] = GPU_RESET


class NodeReboot(_NodeRepair):
    name: ClassVar[str] = "node.reboot"
    summary: ClassVar[str] = "Restart a node by its agent, and wait until the agent answers from the new boot."
    default_timeout: ClassVar[timedelta] = timedelta(minutes=30)
    shortest_timeout: ClassVar[timedelta] = timedelta(minutes=2)  # The agent restarts the node after a minute
    outputs: ClassVar[Mapping[str, Shape]] = REBOOT


# After adding one, run tests/unit/actions/test_node_commands.py: it names the places to edit.
ACTIONS: tuple[type[Action], ...] = (RestartUnit, RestartContainer, GpuReset, NodeReboot)
