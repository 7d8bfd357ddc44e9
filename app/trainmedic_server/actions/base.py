"""What actions are built from: defaults for the members of `ports.actions.Action`, and for their parameters.

Every action here derives from `BasicAction`, as those of other packages may (``trainmedic_server.extending``). An
action need not: the registry asks only for the members.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from datetime import timedelta
from typing import Any, ClassVar

from pydantic import BaseModel, ConfigDict

from trainmedic_core.target import Target, TargetKind
from trainmedic_server.errors import NoLongerWanted, TemporaryFailure
from trainmedic_server.ports.actions import Call, Clearance, Inverse, Services


class ActionParams(BaseModel):
    """Base of an action's parameters: a name that the model does not know is refused when the playbook is loaded."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


class BasicAction:
    """An action that works on every kind of target, changes something, and keeps nothing between its attempts.

    A subclass gives ``name``, ``summary``, ``Params`` and ``perform``, and overrides what is different for it. It
    reaches external systems through ``self.services``.
    """

    name: ClassVar[str]
    summary: ClassVar[str]
    targets: ClassVar[frozenset[TargetKind]] = frozenset(TargetKind)
    harmful: ClassVar[bool] = True
    changes_disks_only: ClassVar[bool] = False
    """True for an action that changes files on the disks of the target's node and nothing else
    (`ports.actions.DiskAction`)."""
    gives_back: ClassVar[bool] = False
    silences: ClassVar[frozenset[TargetKind]] = frozenset()
    is_hold: ClassVar[bool] = False
    default_timeout: ClassVar[timedelta] = timedelta(minutes=1)
    Params: ClassVar[type[BaseModel]]
    outputs: ClassVar[frozenset[str]] = frozenset()
    """The keys that its output can have on a target other than a job, so that a playbook which reads another one is
    refused when it is loaded. Empty where that is not known."""

    def __init__(self, services: Services) -> None:
        self.services = services

    def outcome_saved(self, command_id: str) -> None:
        """Do nothing: a basic action keeps nothing for an attempt."""

    @classmethod
    def inverse(cls, params: BaseModel, output: Mapping[str, Any] | None) -> Inverse | None:
        return None

    @classmethod
    def touches(cls, params: BaseModel, target: Target) -> Collection[str]:
        """Return the nodes, besides the target's, on which an attempt changes something: none."""
        return ()


STOPPED = "stopped, because the run was cancelled"
RESOLVED = "stopped, because the alert resolved"


async def clearance_of(call: Call) -> Clearance:
    """Return whether the attempt may make further changes, by what has happened since it began."""
    return await call.clearance() if call.clearance is not None else "go_on"


def check_wanted(clearance: Clearance, about: str = "", output: Mapping[str, Any] | None = None) -> None:
    """Return if the attempt may make further changes; otherwise raise. The failure says why, and names what it is
    `about`.

    Raises TemporaryFailure after a person has ended the run, NoLongerWanted after its alert has resolved.
    """
    detail = f": {about}" if about else ""
    if clearance == "stop":
        raise TemporaryFailure(f"{STOPPED}{detail}", output)
    if clearance == "resolved":
        raise NoLongerWanted(f"{RESOLVED}{detail}", output)


class Irreversible:
    """Mixed into an action that nothing takes back; a playbook that asks for its undo is refused when it is loaded."""

    @classmethod
    def inverse(cls, params: BaseModel, output: Mapping[str, Any] | None) -> None:
        return None
