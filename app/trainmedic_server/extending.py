"""Everything that a package with actions of its own may import from the server, and what is promised about it.

The promise: each name in ``__all__`` stays, with the members that its documentation names and what they mean, for
as long as the major version of Trainmedic stays the same. A minor version may add to them: a field or an argument
with a default, a method that `BasicAction` already has, a service that may be None. Any other module of
``trainmedic_server`` may change in any version. Of `Services`, ``bus`` and ``cluster_topology`` are not promised: to
have a training job or an agent carry something out, derive from `CommandAction`.

An action is a class, found by an entry point of the group ``trainmedic.actions``. The least that it has::

    from trainmedic_server import extending


    class BlinkParams(extending.ActionParams):
        colour: str = "red"


    class Blink(extending.Irreversible, extending.BasicAction):
        name = "acme.blink"
        summary = "Blink the lamp of the machine room."
        Params = BlinkParams

        async def perform(self, call: extending.Call) -> dict[str, object]:
            await blink(call.params.colour, until=call.deadline)
            return {}

``docs/how-to/write-an-action.md`` has a complete one. Nothing in the server imports this module.
"""

from __future__ import annotations

from trainmedic_core.fields import Duration
from trainmedic_core.target import Target, TargetKind
from trainmedic_server.actions.base import ActionParams, BasicAction, Irreversible
from trainmedic_server.actions.commands import CommandAction
from trainmedic_server.domain.alert import Alert
from trainmedic_server.errors import ActionFailure, NoLongerWanted, OutcomeUnknown, PermanentFailure, TemporaryFailure
from trainmedic_server.ports.actions import (
    Action,
    Call,
    Clearance,
    Inverse,
    NodeTouchingAction,
    Services,
    TemplateChecked,
)
from trainmedic_server.ports.cluster import Cluster, Object, Ref, Resource
from trainmedic_server.ports.outside import AlertSource, Clock, HttpCaller, HttpReply, Notifier

__all__ = [
    "Action",
    "ActionFailure",
    "ActionParams",
    "Alert",
    "AlertSource",
    "BasicAction",
    "Call",
    "Clearance",
    "Clock",
    "Cluster",
    "CommandAction",
    "Duration",
    "HttpCaller",
    "HttpReply",
    "Inverse",
    "Irreversible",
    "NoLongerWanted",
    "NodeTouchingAction",
    "Notifier",
    "Object",
    "OutcomeUnknown",
    "PermanentFailure",
    "Ref",
    "Resource",
    "Services",
    "Target",
    "TargetKind",
    "TemplateChecked",
    "TemporaryFailure",
]
