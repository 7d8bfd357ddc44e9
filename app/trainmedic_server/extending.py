"""The server's public interface for packages with their own actions.

Names in ``__all__`` and their documented members are stable within a major version. Minor versions may add optional
fields and arguments, methods with a default in `BasicAction`, and services that may be None. Other modules of
``trainmedic_server``, and ``bus`` and ``cluster_topology`` of `Services`, are not stable.

An action is a class with an entry point in the group ``trainmedic.actions``. One that a job or an agent performs
derives from `CommandAction`. ``docs/how-to/write-an-action.md`` has an example.
"""

from __future__ import annotations

from trainmedic_core.fields import Duration
from trainmedic_core.target import Target, TargetKind
from trainmedic_server.actions.base import ActionParams, BasicAction, Irreversible
from trainmedic_server.actions.commands import CommandAction
from trainmedic_server.domain.alert import Alert
from trainmedic_server.domain.value_types import Each, ValueType
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
    "Each",
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
    "ValueType",
]
