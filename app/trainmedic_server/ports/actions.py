"""What a step does: an action, one call of it, the action that takes it back, and the registry of all actions.

Most of this is public: authors of actions import it from ``trainmedic_server.extending``.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from datetime import datetime, timedelta
from typing import Any, ClassVar, Literal, Protocol, runtime_checkable

from msgspec import Struct, field
from pydantic import BaseModel

from trainmedic_core.target import Target, TargetKind
from trainmedic_server.domain.alert import Alert
from trainmedic_server.domain.message_routes import MessageRoutes
from trainmedic_server.domain.topology import ClusterTopology
from trainmedic_server.ports.cluster import Cluster
from trainmedic_server.ports.metric_history import MetricHistory
from trainmedic_server.ports.outside import AlertSource, Clock, CommandBus, HttpCaller, Notifier
from trainmedic_server.ports.slurm import Slurm

Clearance = Literal["go_on", "hold", "stop", "resolved"]
"""Answer whether an attempt in progress may make further changes: yes; not while the server is paused; never again,
because a person ended its run; never again, because its alert has resolved."""


class Call(Struct, frozen=True):
    """One attempt of an action."""

    command_id: str
    """The attempt's id, a UUIDv7. Whoever carries it out must take effect once for it, however often it is sent."""
    run_id: str
    playbook: str
    """The playbook's name."""
    target: Target
    params: BaseModel
    """The rendered parameters, an instance of the action's ``Params``."""
    reason: str
    """One sentence on why this is done, for people."""
    issued_at: datetime
    """When the attempt was first made (aware UTC). It stays the same when the attempt is resumed."""
    deadline: datetime
    """When the attempt must have ended (aware UTC)."""
    alert: Alert
    """The alert that the run began with."""
    resumed: bool = False
    """Whether it may already have been done under this ``command_id``: by a server that was killed, or by an
    attempt before this one whose outcome is unknown. Who then cannot find out whether it was raises OutcomeUnknown: a
    failure would say that nothing has to be taken back, and the next attempt would have another id."""
    undo_of: str | None = None
    """For an undo, the command id of what it takes back."""
    undoes_applied: bool = False
    """For an undo, whether it is on record that what it takes back was applied. Where it is not, that is not known."""
    report_wait: Callable[[str], Awaitable[None]] | None = None
    """Puts into the history what the attempt waits for, where that takes long."""
    clearance: Callable[[], Awaitable[Clearance]] | None = None
    """Returns what has happened since the attempt began: operators' orders, and the end of its alert. An attempt that
    makes several changes, or waits before one, calls it before each. None if nothing stops the attempt, as with
    undos."""


ON_RECORD: Mapping[str, Any] = {"on_record": True}
"""The validation context of parameters that a run has on record. A model that bounds what a playbook may ask takes
these as they are: a bound of a newer release, or of the act itself, must not keep an undo from being carried out."""


class Inverse(Struct, frozen=True):
    """The action that takes another back, by its name, and its parameters."""

    action: str
    params: Mapping[str, Any]


class Services(Struct, frozen=True):
    """What actions may use of the outside. An absent one is None; an action that needs it says so."""

    clock: Clock
    bus: CommandBus
    http: HttpCaller
    notifier: Notifier | None = None
    alertmanager: AlertSource | None = None
    cluster: Cluster | None = None
    cluster_topology: Callable[[], ClusterTopology] = ClusterTopology
    """The nodes and pods of the cluster, as far as they are known at this moment; empty without a cluster."""
    slurm: Slurm | None = None
    metrics: MetricHistory | None = None
    """The Prometheus that the server queries."""
    external_url: str = ""
    """Where people reach the server, without a slash at its end; empty where that is not set."""
    routes: MessageRoutes = field(default_factory=MessageRoutes)
    """The channels for messages of playbooks that name none."""


class Action(Protocol):
    """What a step does. Classes with these members are found through the registry."""

    name: ClassVar[str]
    """What a playbook's step writes: lower-case words with dots between them, such as ``acme.page``."""
    summary: ClassVar[str]
    """One sentence for the people who choose an action."""
    targets: ClassVar[frozenset[TargetKind]]
    """The kinds of target it can work on."""
    harmful: ClassVar[bool]
    """Whether it changes anything; pause holds back only what does."""
    default_timeout: ClassVar[timedelta]
    """How long an attempt may take where the step sets no timeout."""
    Params: ClassVar[type[BaseModel]]
    """The model of its parameters, by which playbooks are checked."""

    def __init__(self, services: Services) -> None: ...

    async def perform(self, call: Call) -> Mapping[str, Any]:
        """Do it once; return the output.

        Raises PermanentFailure, TemporaryFailure (worth another attempt under a new id), or
        OutcomeUnknown (another attempt uses the same id). Must end by ``call.deadline`` or soon after.
        An undo (``call.undo_of``) returns only where it is certain that nothing is left to take back; after any
        failure it stays owed and is tried again.
        """
        ...

    def outcome_saved(self, command_id: str) -> None:
        """The outcome of that attempt is durable, so whatever was kept to repeat it can go."""
        ...

    @classmethod
    def inverse(cls, params: BaseModel, output: Mapping[str, Any] | None) -> Inverse | None:
        """Return what would take it back. Asked before the act with `output` None, and after it with the
        output; None where it cannot be taken back, or where only the output will tell how.

        A class whose effect can never be taken back annotates it ``-> None``; a playbook that asks
        for its undo is refused when it is loaded."""
        ...


class ActionTraits(Protocol):
    """Optional members of an action class, in addition to those of `Action`. Without one of them its default holds."""

    gives_back: ClassVar[bool]
    """True if it only reverts what an earlier step did, as ``k8s.uncordon`` does. It may begin after the run's alert
    has resolved. Default: False."""
    silences: ClassVar[frozenset[TargetKind]]
    """Kinds of targets whose alerts it can end without a repair, because it stops or restarts what reports, as
    ``job.stop`` does. Default: none."""
    is_hold: ClassVar[bool]
    """True if it stops work until a person has decided, as ``job.pause`` does. Its undo is then due as soon as the run
    ends without success, whatever its trigger. Default: False."""


@runtime_checkable
class MultiNodeAction(Protocol):
    """An action that may work elsewhere than on the run's target: on the nodes of a job."""

    async def locate(self, call: Call) -> BaseModel:
        """Return the parameters, with the destinations added if they are not there yet.

        Called before each attempt; the result is stored before the attempt starts. Changes nothing; raises as
        `perform` does.
        """
        ...

    @classmethod
    def places(cls, params: BaseModel | Mapping[str, Any]) -> Sequence[Target]:
        """Return the destinations of an attempt with these parameters, or with these as plain values, besides the run's
        target."""
        ...


@runtime_checkable
class NodeTouchingAction(Protocol):
    """An action class that may change something on other nodes than the target's. Only with these does the breaker
    count all that a run touches."""

    @classmethod
    def touches(cls, params: BaseModel, target: Target) -> Collection[str]:
        """Return the names of the nodes, besides the target's, on which an attempt with these parameters changes
        something. Asked before each attempt; changes nothing."""
        ...


class DiskAction(Protocol):
    """Action class that changes files on the disks of the target's node, and nothing else.

    A run on a node whose changing actions are all of this kind locks the disks of the node instead of the whole node.
    """

    changes_disks_only: ClassVar[bool]


class LeasedEffect(Struct, frozen=True):
    """The effect of a run's command that ends by itself unless it is renewed in time."""

    command_id: str
    run_id: str
    step_id: str
    target: Target
    params: Mapping[str, Any]
    """The parameters of the step."""
    is_certain: bool
    """False where the command may not have been applied."""
    again: bool = False
    """Whether the effect is to be set again if its lease has expired."""


class Renewal(Struct, frozen=True):
    """The outcome of renewing a leased effect on one node."""

    effect: LeasedEffect
    node: str
    """The name of the node."""
    outcome: str
    """``renewed``; ``lost`` (there is no such effect on that node); ``refused``; or ``unanswered``."""
    why: str = ""
    has_expired: bool = False
    """For a lost effect: nothing but its lease has ended it, so it can be set again."""
    output: Mapping[str, Any] = field(default_factory=dict)
    """The output of an effect that was set again."""


@runtime_checkable
class LeasedAction(Protocol):
    """An action whose effect ends unless it is renewed. It is renewed in each third of its lease while needed."""

    lease: ClassVar[timedelta]
    """How long the effect lasts without a renewal."""

    @classmethod
    def granted(cls, output: Mapping[str, Any]) -> timedelta:
        """How long the effect of a step with this output lasts: at most ``lease``, for a receiver may grant less."""
        ...

    async def renew(self, effects: Sequence[LeasedEffect], until: datetime) -> Sequence[Renewal]:
        """Have these effects last for ``lease`` from now on. Returns by `until` or soon after; a receiver that does
        not answer is an outcome, never an exception."""
        ...


@runtime_checkable
class TemplateChecked(Protocol):
    """An action class that also checks its parameters as the playbook's author wrote them."""

    @classmethod
    def check_template(cls, raw: Mapping[str, Any]) -> None:
        """Asked when a playbook is loaded, with ``with`` before rendering. Raises ValueError."""
        ...


class Actions(Protocol):
    """The registry of actions."""

    def names(self) -> Sequence[str]: ...
    def action_class(self, name: str) -> type[Action] | None:
        """Return the class, for checking; None where there is none of that name."""
        ...

    def get(self, name: str) -> Action:
        """Return the instance, for acting. Raises PermanentFailure where there is none."""
        ...
