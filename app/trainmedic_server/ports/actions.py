"""Interfaces of actions. Mostly public through ``trainmedic_server.extending``."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from datetime import datetime, timedelta
from typing import Any, ClassVar, Literal, Protocol, runtime_checkable

from msgspec import Struct, field
from pydantic import BaseModel

from trainmedic_core.target import Target, TargetKind
from trainmedic_server.domain.alert import Alert
from trainmedic_server.domain.message_routes import MessageRoutes
from trainmedic_server.domain.topology import ClusterTopology, SlurmTopology
from trainmedic_server.ports.cluster import Cluster
from trainmedic_server.ports.metric_history import MetricHistory
from trainmedic_server.ports.outside import AlertSource, Clock, CommandBus, HttpCaller, Notifier
from trainmedic_server.ports.slurm import Slurm

Clearance = Literal["go_on", "hold", "stop", "resolved"]
"""Answer whether an attempt in progress may make further changes:

- ``go_on``: yes
- ``hold``: not while the server is paused
- ``stop``: no, a person ended the run
- ``resolved``: no, the alert resolved
"""


class Call(Struct, frozen=True):
    """One attempt of an action."""

    command_id: str
    """UUIDv7. The receiver must apply it once, however often it is sent."""
    run_id: str
    playbook: str
    target: Target
    params: BaseModel
    reason: str
    issued_at: datetime
    """When the attempt was first made (aware UTC). Unchanged when it is resumed."""
    deadline: datetime
    alert: Alert
    resumed: bool = False
    """True if it may already have been done under this ``command_id``: by a killed server, or with an unknown outcome.

    If that cannot be found out, raise OutcomeUnknown: a failure would mean that nothing needs reverting.
    """
    undo_of: str | None = None
    """For an undo: the command to revert."""
    undoes_applied: bool = False
    """For an undo: True if the command is recorded as applied. False if that is unknown."""
    report_wait: Callable[[str], Awaitable[None]] | None = None
    """Records in the history what a long attempt waits for."""
    clearance: Callable[[], Awaitable[Clearance]] | None = None
    """Returns whether the attempt may continue. Call it before each change of an attempt that makes several or waits
    before one. None if nothing can stop the attempt, as for undos.
    """


ON_RECORD: Mapping[str, Any] = {"on_record": True}
"""Validation context of persisted parameters. Models must accept them without limits: a newer release's limit must not
block an undo.
"""


class Inverse(Struct, frozen=True):
    """Action that reverts another."""

    action: str
    params: Mapping[str, Any]


class Services(Struct, frozen=True):
    """External services, None if not configured."""

    clock: Clock
    bus: CommandBus
    http: HttpCaller
    notifier: Notifier | None = None
    alertmanager: AlertSource | None = None
    cluster: Cluster | None = None
    cluster_topology: Callable[[], ClusterTopology] = ClusterTopology
    """Empty without a cluster."""
    slurm: Slurm | None = None
    slurm_topology: Callable[[], SlurmTopology] = SlurmTopology
    """As last read, perhaps a minute ago."""
    metrics: MetricHistory | None = None
    external_url: str = ""
    """Without a trailing slash. Empty if not set."""
    routes: MessageRoutes = field(default_factory=MessageRoutes)
    may_connect: Callable[[str], bool] = lambda job: True
    """Returns whether the job was connected lately, so that it may connect again. True if unknown."""
    inventory_of: Callable[[str], Mapping[str, str]] = lambda node: {}
    """Returns a node's attributes in the inventory file."""
    slurm_id_of: Callable[[str], str | None] = lambda job: None
    """None if unknown."""


class Action(Protocol):
    name: ClassVar[str]
    summary: ClassVar[str]
    targets: ClassVar[frozenset[TargetKind]]
    harmful: ClassVar[bool]
    """True if it changes anything but checkpoints. A pause blocks only harmful actions."""
    default_timeout: ClassVar[timedelta]
    """For an attempt if the step sets none."""
    Params: ClassVar[type[BaseModel]]

    def __init__(self, services: Services) -> None: ...

    async def perform(self, call: Call) -> Mapping[str, Any]:
        """Perform it once and return the output. Must end by ``call.deadline`` or soon after.

        Raises PermanentFailure, TemporaryFailure (retried under a new ID), OutcomeUnknown (retried under the same
        ID), NotSetUp (skipped), EffectDisproved (applied without effect, not repeated) or NoLongerWanted.

        An undo (``call.undo_of``) must return only if nothing is left to revert. After a failure it stays pending and
        is retried.
        """
        ...

    def outcome_saved(self, command_id: str) -> None:
        """Drop what was retained to repeat this attempt: its outcome is durable."""
        ...

    @classmethod
    def inverse(cls, params: BaseModel, output: Mapping[str, Any] | None) -> Inverse | None:
        """Return the action that reverts it. Called before the attempt with `output` None, and after it with
        the output.

        Return None if it cannot be reverted, or if only the output will show how. Annotate a class that can never be
        reverted with ``-> None``: playbooks that request its undo are rejected when loaded.
        """
        ...


class ActionTraits(Protocol):
    """Optional attributes of an action class. Default: False, or none."""

    gives_back: ClassVar[bool]
    """True if it only reverts an earlier step, as ``k8s.uncordon`` does. It may start after the alert has resolved."""
    changes_elsewhere: ClassVar[bool]
    """True if it only calls another service, so that its run locks nothing of the cluster."""
    silences: ClassVar[frozenset[TargetKind]]
    """Target kinds whose alerts it can end without a repair, by stopping what reports them, as ``job.stop`` does."""
    is_hold: ClassVar[bool]
    """True if it stops work until a person decides, as ``job.pause`` does. Once a later step has asked, its undo is due
    if the run ends without success, whatever its trigger.
    """
    leaves_results: ClassVar[bool]
    """True if each attempt leaves something, such as a message. ``wait_for`` rejects it."""
    asks_first: ClassVar[bool]
    """True for an act that a person should approve: a playbook with it has mode ``approve`` unless it names a mode."""
    changes_node: ClassVar[bool]
    """True if a run on a GPU locks the GPU's node."""
    changes_disks_only: ClassVar[bool]
    """True if it changes only files on the target node's disks. A run without other changes locks only these."""
    leaves_disks: ClassVar[bool]
    """True if it changes no files of the target node."""

    @classmethod
    def reaches_disks(cls, params: Mapping[str, Any]) -> bool:
        """Return True if an attempt may change files although `leaves_disks`. Then it waits for cleanings in flight."""
        ...

    shortest_timeout: ClassVar[timedelta]
    """Playbooks with a shorter timeout are rejected on load. Default: 0."""
    promql: ClassVar[frozenset[str]]
    """Parameters that are PromQL. Templates in them stand within quotes, and values are escaped."""


@runtime_checkable
class MultiNodeAction(Protocol):
    async def locate(self, call: Call) -> BaseModel:
        """Return the parameters with missing destinations added. Changes nothing. Raises like `perform`.

        Called before each attempt; the result is persisted first.
        """
        ...

    @classmethod
    def places(cls, params: BaseModel | Mapping[str, Any]) -> Sequence[Target]:
        """Return the destinations of an attempt, excluding the run's target. `params` may be plain values."""
        ...


@runtime_checkable
class NodeTouchingAction(Protocol):
    """An action class that may change something on nodes other than the target's. The breaker counts them."""

    @classmethod
    def touches(cls, params: BaseModel, target: Target) -> Collection[str]:
        """Return the other nodes that an attempt changes. Called before each attempt; changes nothing."""
        ...


class LeasedEffect(Struct, frozen=True):
    """Effect of a command, which ends unless renewed."""

    command_id: str
    run_id: str
    step_id: str
    target: Target
    params: Mapping[str, Any]
    is_certain: bool
    """False if the command may not have been applied."""
    again: bool = False
    """True to reapply it if `Renewal.has_expired`."""
    applied_at: datetime | None = None
    """End of its attempt."""
    output: Mapping[str, Any] = field(default_factory=dict)


class Renewal(Struct, frozen=True):
    effect: LeasedEffect
    node: str  # or a job
    outcome: str
    """``renewed``, ``lost`` (no such effect on the node), ``refused`` or ``unanswered``."""
    why: str = ""
    has_expired: bool = False
    """True for an effect that an outage seems to have ended, such as by an expired lease. It can be reapplied."""
    output: Mapping[str, Any] = field(default_factory=dict)  # The receiver's answer.


@runtime_checkable
class LeasedAction(Protocol):
    """An action whose effect ends unless renewed. The server renews it in each third of its lease."""

    lease: ClassVar[timedelta]

    @classmethod
    def granted(cls, output: Mapping[str, Any]) -> timedelta:
        """Return the granted lease from a step's output, at most ``lease``. Zero: it made nothing to renew."""
        ...

    async def renew(self, effects: Sequence[LeasedEffect], until: datetime) -> Sequence[Renewal]:
        """Extend these effects from now by their lease. Returns by `until` or soon after.

        A silent receiver is an outcome; nothing is raised. The result omits effects that need nothing.
        """
        ...


@runtime_checkable
class TemplateChecked(Protocol):
    @classmethod
    def check_template(cls, raw: Mapping[str, Any]) -> None:
        """Check a step's unrendered ``with`` when a playbook is loaded. Raises ValueError."""
        ...


class Actions(Protocol):
    def names(self) -> Sequence[str]: ...
    def action_class(self, name: str) -> type[Action] | None: ...

    def get(self, name: str) -> Action:
        """Raises PermanentFailure if the name is unknown."""
        ...
