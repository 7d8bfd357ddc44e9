"""Base classes of actions. See `ports.actions` for their members."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from datetime import timedelta
from typing import Any, ClassVar

from pydantic import BaseModel, ConfigDict

from trainmedic_core.expressions.evaluation import is_template
from trainmedic_core.target import Target, TargetKind
from trainmedic_server.errors import NoLongerWanted, TemporaryFailure
from trainmedic_server.ports.actions import Call, Clearance, Inverse, Services


class ActionParams(BaseModel):
    """Unknown names are rejected when the playbook is loaded."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


class NoParams(ActionParams):
    """No parameters."""


class BasicAction:
    """Defaults: every kind of target except groups, harmful, no state between attempts."""

    name: ClassVar[str]
    summary: ClassVar[str]
    targets: ClassVar[frozenset[TargetKind]] = frozenset(TargetKind) - {TargetKind.GROUP}
    harmful: ClassVar[bool] = True
    changes_disks_only: ClassVar[bool] = False
    """See `ports.actions.ActionTraits`."""
    leaves_disks: ClassVar[bool] = False
    changes_elsewhere: ClassVar[bool] = False
    gives_back: ClassVar[bool] = False
    silences: ClassVar[frozenset[TargetKind]] = frozenset()
    is_hold: ClassVar[bool] = False
    leaves_results: ClassVar[bool] = False
    asks_first: ClassVar[bool] = False
    changes_node: ClassVar[bool] = False
    promql: ClassVar[frozenset[str]] = frozenset()
    default_timeout: ClassVar[timedelta] = timedelta(minutes=1)
    shortest_timeout: ClassVar[timedelta] = timedelta(0)
    Params: ClassVar[type[BaseModel]]
    outputs: ClassVar[Collection[str]] = frozenset()
    """Output keys, or a mapping of them to types, against which playbooks are checked. Empty: unknown."""

    def __init__(self, services: Services) -> None:
        self.services = services

    def outcome_saved(self, command_id: str) -> None:
        """There is no state to release."""

    @classmethod
    def inverse(cls, params: BaseModel, output: Mapping[str, Any] | None) -> Inverse | None:
        return None

    @classmethod
    def touches(cls, params: BaseModel, target: Target) -> Collection[str]:
        return ()


def refuse_templates(raw: Mapping[str, Any], *names: str) -> None:
    """Raise ValueError if one of these is a template, which an alert could fill."""
    for name in names:
        if is_template(str(raw.get(name, ""))):
            raise ValueError(f"{name} cannot be a template")


STOPPED = "stopped, because the run was cancelled"
RESOLVED = "stopped, because the alert resolved"


async def clearance_of(call: Call) -> Clearance:
    return await call.clearance() if call.clearance is not None else "go_on"


def check_wanted(clearance: Clearance, about: str = "", output: Mapping[str, Any] | None = None) -> None:
    """Raise TemporaryFailure if the run was ended, NoLongerWanted if its alert has resolved. Ignore ``hold``."""
    detail = f": {about}" if about else ""
    if clearance == "stop":
        raise TemporaryFailure(f"{STOPPED}{detail}", output)
    if clearance == "resolved":
        raise NoLongerWanted(f"{RESOLVED}{detail}", output)


class Irreversible:
    """Playbooks that request an undo are rejected on load."""

    @classmethod
    def inverse(cls, params: BaseModel, output: Mapping[str, Any] | None) -> None:
        return None
