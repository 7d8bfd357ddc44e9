"""The commands to a node's agent: ``gpu.*``, ``disk.*`` and ``node.*``.

The agent's own policy limits what even a valid command may do: the floor of a power limit, the
cleaning rules that exist, the actions that are allowed.
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import timedelta
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, Field, model_validator

from app import ports
from app.actions.commands import CommandAction, CommandParams, Irreversible
from app.domain.target import Kind


class _NodeAction(CommandAction):
    """The agent is a service of its node. Where it is away somebody has to look, so that is told soon."""

    waits_for_receiver: ClassVar[bool] = False


class PowerLimitParams(CommandParams):
    """Exactly one of the three."""

    watts: float | None = Field(None, gt=0, le=10_000, description="The limit, in watts.")
    percent: float | None = Field(None, gt=0, le=100, description="The limit, in percent of the card's default.")
    restore: Literal[True] | None = Field(None, description="Back to the limit from before the first cap.")

    @model_validator(mode="after")
    def _says_one_limit(self) -> PowerLimitParams:
        if sum(value is not None for value in (self.watts, self.percent, self.restore)) != 1:
            raise ValueError("give exactly one of watts and percent")
        return self


class PowerLimit(_NodeAction):
    name: ClassVar[str] = "gpu.power_limit"
    summary: ClassVar[str] = "Limit the power of a GPU, within the card's constraints and the agent's floor."
    targets: ClassVar[frozenset[Kind]] = frozenset({Kind.GPU})
    default_timeout: ClassVar[timedelta] = timedelta(seconds=30)
    Params: ClassVar[type[BaseModel]] = PowerLimitParams

    @classmethod
    def inverse(cls, params: BaseModel, output: Mapping[str, Any] | None) -> ports.Inverse | None:
        """The agent remembers the limit from before the first cap: what this step replaced may itself be a cap."""
        return ports.Inverse(cls.name, {"restore": True})


class CleanParams(CommandParams):
    rules: tuple[Annotated[str, Field(min_length=1, max_length=128)], ...] = Field(
        min_length=1, description="Names of cleaning rules in the agent's policy, in this order."
    )
    until_free_percent: float | None = Field(None, gt=0, lt=100, description="Stop once this much is free.")
    dry_run: bool = Field(False, description="Only say what would be deleted.")


class Clean(Irreversible, _NodeAction):
    name: ClassVar[str] = "disk.clean"
    summary: ClassVar[str] = "Free disk space by the named rules of the agent's policy."
    targets: ClassVar[frozenset[Kind]] = frozenset({Kind.NODE, Kind.GPU})
    default_timeout: ClassVar[timedelta] = timedelta(minutes=10)
    Params: ClassVar[type[BaseModel]] = CleanParams


class Facts(Irreversible, _NodeAction):
    name: ClassVar[str] = "node.facts"
    summary: ClassVar[str] = "Read CPU, memory, disk and GPUs, as the step's output."
    targets: ClassVar[frozenset[Kind]] = frozenset({Kind.NODE, Kind.GPU})
    harmful: ClassVar[bool] = False
    default_timeout: ClassVar[timedelta] = timedelta(seconds=15)


ACTIONS: tuple[type[ports.Action], ...] = (PowerLimit, Clean, Facts)
