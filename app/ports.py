"""What the engine needs of the outside, as interfaces. Adapters implement them; wiring hands them in.

A port says what holds, not how. Each has one contract suite in ``tests/contract`` which every
implementation passes, the fakes included.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import Any, ClassVar, Protocol, TypeVar, runtime_checkable

from pydantic import BaseModel

from app.domain.alert import Alert, AlertRecord, Identity
from app.domain.playbook import ActionStep, ApproveStep, Mode, Playbook, WaitStep
from app.domain.run import Controls, Event, Order, Run, StepState
from app.domain.target import Kind, Target, Unresolved
from trainmedic.envelope import Command, Reply

T = TypeVar("T")

# --- time -----------------------------------------------------------------------------------------


class Clock(Protocol):
    """The time of day, and waiting for it."""

    def now(self) -> datetime:
        """Aware, UTC."""
        ...

    async def sleep_until(self, when: datetime) -> None: ...


# --- the run store --------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class LinkedRun:
    """A run (or a decision not to start) that an alert led to, as admission needs to know it."""

    run_id: str
    playbook: str
    target_key: str
    status: str
    decision: str


@dataclass(frozen=True, slots=True)
class GuardFacts:
    """What the guards of one (playbook, target) look at. Observed runs count like started ones.

    ``last_ended_at``: when its last run ended. ``started``: how many runs of the playbook, on any
    target, were created after the asked moment. ``open_runs``: how many of the playbook are open.
    Decisions not to start count for none of them.
    """

    last_ended_at: datetime | None = None
    started: int = 0
    open_runs: int = 0


class Transaction(Protocol):
    """One transaction of the run store. Everything written in it is durable together, or not at all.

    Methods that take many keys exist so that a storm costs few queries.
    """

    # alerts
    def alerts(self, identities: Collection[Identity]) -> dict[Identity, AlertRecord]: ...
    def firing_with(self, fingerprints: Collection[str]) -> list[AlertRecord]:
        """The alerts of these fingerprints, whatever their beginning, that have not resolved."""
        ...

    def save_alerts(self, records: Sequence[AlertRecord]) -> None:
        """Insert or replace, by identity."""
        ...

    def firing_not_heard_since(self, moment: datetime) -> list[AlertRecord]:
        """Unresolved alerts last heard before, that are tied to a run which is open or owes an undo."""
        ...

    # runs
    def linked_runs(self, identities: Collection[Identity]) -> dict[Identity, list[LinkedRun]]:
        """In the order of tying, for those that have any."""
        ...

    def open_runs_for(self, keys: Collection[tuple[str, str]]) -> dict[tuple[str, str], str]:
        """The open run's id for each (playbook, target key) that has one."""
        ...

    def guard_facts(
        self, keys: Collection[tuple[str, str]], started_since: Mapping[str, datetime]
    ) -> dict[tuple[str, str], GuardFacts]:
        """For each (playbook, target key); ``started_since`` is by playbook, those without are not counted."""
        ...

    def nodes_acted_on(self, since: datetime) -> set[str]:
        """Distinct nodes of runs with decision ``started`` that were created after `since`."""
        ...

    def known_nodes(self) -> set[str]: ...
    def note_nodes(self, nodes: Collection[str], at: datetime) -> None:
        """Remember that these nodes exist (seen in an alert, or by their agent), until they are pruned.

        When one was last seen may be remembered to the hour only.
        """
        ...

    def add_runs(self, runs: Sequence[Run]) -> None:
        """Insert new runs with their steps.

        The unit raises Conflict where an id is used again, or where a second run of the same
        playbook and target would be open.
        """
        ...

    def save_runs(self, changes: Sequence[tuple[Run, Run | None]]) -> None:
        """Update runs, each with those of its steps that differ from what was before (all where None).

        What a run was admitted with never changes: its playbook, version, target, mode, alert
        and ``created_at``.
        """
        ...

    def link(self, links: Iterable[tuple[str, Identity]]) -> None:
        """Tie alerts to runs: (run id, alert). What is tied already stays tied.

        The unit raises Conflict where a run or an alert is not kept, once the unit is done.
        """
        ...

    def run(self, run_id: str) -> Run | None: ...
    def runs(self, run_ids: Collection[str]) -> list[Run]:
        """Those that there are, oldest first."""
        ...

    def alerts_of(self, run_ids: Collection[str]) -> dict[str, list[AlertRecord]]:
        """The alerts tied to each run, in the order of tying."""
        ...

    def alert_counts(self, run_ids: Collection[str]) -> dict[str, int]:
        """How many alerts are tied to each run that has any."""
        ...

    def unfinished(self) -> list[Run]:
        """Runs that are open, or closed and still owe an undo; oldest first."""
        ...

    def run_of_command(self, command_id: str) -> str | None:
        """The run whose step or undo has this as its current command."""
        ...

    # orders, events, controls, playbook versions
    def add_order(self, order: Order) -> None: ...
    def orders_of(self, run_ids: Collection[str]) -> dict[str, list[Order]]: ...
    def append(self, events: Sequence[Event]) -> None: ...
    def controls(self) -> Controls: ...
    def save_controls(self, controls: Controls) -> None: ...
    def keep_playbook(self, name: str, version: str, text: str, at: datetime) -> None:
        """Remember the text of a version, so that a run can go on with it. Idempotent."""
        ...

    def playbook_text(self, name: str, version: str) -> str | None: ...


class RunStore(Protocol):
    """The truth about alerts, runs, steps, undo duties and events."""

    async def transact(self, work: Callable[[Transaction], T]) -> T:
        """Run `work` in a transaction and return its result once that is durable.

        Concurrent calls may share one transaction; if `work` raises, nothing of it is kept, and
        what others did in the same transaction is. `work` may be run again, so it must not have
        effects outside. Raises StoreUnavailable.
        """
        ...

    async def check(self) -> None:
        """Return if the store answers; else raise StoreUnavailable."""
        ...

    async def prune(self, older_than: datetime) -> int:
        """Delete closed runs that owe no undo and all that is theirs, created before; return how many.

        Also alerts and nodes not heard of since, where no run is left that is tied to the alert,
        and older events that concern no run. Others are served meanwhile.
        """
        ...

    async def close(self) -> None: ...


@dataclass(frozen=True, slots=True)
class HistoryFilter:
    """Which items of the history are meant; None means any. ``since`` is inclusive, ``until`` exclusive."""

    alertname: str | None = None
    playbook: str | None = None
    status: str | None = None
    decision: str | None = None
    node: str | None = None
    gpu: str | None = None
    job: str | None = None
    since: datetime | None = None
    until: datetime | None = None


@dataclass(frozen=True, slots=True)
class RunRecord:
    """A run with everything that the store knows of it."""

    run: Run
    alerts: tuple[AlertRecord, ...]
    events: tuple[Event, ...]
    orders: tuple[Order, ...] = ()


class History(Protocol):
    """Reading what was done. Never waits for a writer."""

    async def page(self, wanted: HistoryFilter, limit: int, cursor: str | None) -> tuple[list[Run], str | None]:
        """Newest first, at most `limit`, and the cursor of the next page or None.

        Runs that arrive in between never shift a page. Raises ValueError on a cursor that is not one.
        """
        ...

    def stream(self, wanted: HistoryFilter) -> AsyncIterator[Run]:
        """All of it, newest first, in bounded memory."""
        ...

    async def record(self, run_id: str) -> RunRecord | None: ...
    async def events_after(self, seq: int, limit: int) -> list[Event]:
        """Events with a larger `seq`, in order."""
        ...

    async def last_seq(self) -> int: ...
    async def playbook_counts(self) -> dict[str, dict[str, int]]:
        """Runs by playbook and status."""
        ...


# --- messages to agents and jobs --------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Presence:
    """Who is connected: a job or an agent, what it said of itself, and when (aware UTC)."""

    name: str
    last_seen: datetime
    details: Mapping[str, Any] = field(default_factory=dict)


class CommandBus(Protocol):
    """Commands out, replies in, at least once each."""

    async def request(
        self, command: Command, unheard: Callable[[], Awaitable[bool]] | None = None
    ) -> tuple[Reply, ...]:
        """Send `command` and wait for the final reply of everyone who must answer.

        The stream follows from ``command.target``: a job's, else its node's. Who must answer is
        what the receiver's presence says (``ranks``), else one reply is enough. Returns what came
        by ``command.expires_at`` plus a second of grace, possibly nothing. While the bus is away it
        keeps trying until then; it never raises BusUnavailable. Sending a command id again is safe.

        ``unheard`` is asked once, when the command has been sent for some seconds, nobody has
        answered, and nobody of that name is connected: True ends the wait.
        """
        ...

    def settle(self, command_id: str) -> None:
        """The outcome is durable: its replies need not be delivered again after a restart."""
        ...

    async def agents(self) -> list[Presence]: ...
    async def jobs(self) -> list[Presence]: ...
    async def check(self) -> None:
        """Return if the bus answers; else raise BusUnavailable."""
        ...


class Notifier(Protocol):
    """Messages to people."""

    async def notify(self, title: str, message: str, to: str | None) -> None:
        """Send to the channel named `to`, or to all. Raises TemporaryFailure or PermanentFailure."""
        ...


@dataclass(frozen=True, slots=True)
class HttpReply:
    status: int
    headers: Mapping[str, str]
    body: str


class HttpCaller(Protocol):
    """One HTTP call, no redirects followed, the body cut at 64 KiB."""

    async def call(
        self,
        method: str,
        url: str,
        headers: Mapping[str, str],
        body: bytes | None,
        timeout: timedelta,
        bearer: str | None = None,
    ) -> HttpReply:
        """Raises TemporaryFailure where nothing was sent, OutcomeUnknown where a reply is missing.

        `bearer` is the name of the secret to send as a bearer token; PermanentFailure where there is
        none of that name. Header names in the reply are in lower case, and a secret that the reply
        repeats is blotted out.
        """
        ...


class AlertSource(Protocol):
    """The Alertmanager's own API, where its URL is configured."""

    async def is_firing(self, identity: Identity) -> bool:
        """Raises TemporaryFailure where it cannot tell."""
        ...

    async def silence(self, matchers: Mapping[str, str], ends_at: datetime, comment: str) -> str:
        """Create a silence, or find the one with exactly this comment; return its id."""
        ...

    async def find_silence(self, comment: str) -> str | None:
        """The id of the silence with exactly this comment that has not ended."""
        ...

    async def expire_silence(self, silence_id: str) -> None:
        """Idempotent."""
        ...


# --- actions --------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Call:
    """One attempt of an action. ``deadline`` is absolute; ``resumed`` says that it may
    already have been done under the same ``command_id``: by a server that was killed, or by an
    attempt before this one whose outcome is unknown. ``tell`` puts into the history what the attempt
    waits for, where that takes long."""

    command_id: str
    run_id: str
    playbook: str
    target: Target
    params: BaseModel
    reason: str
    issued_at: datetime
    deadline: datetime
    alert: Alert
    resumed: bool = False
    undo_of: str | None = None
    tell: Callable[[str], Awaitable[None]] | None = None


@dataclass(frozen=True, slots=True)
class Inverse:
    """The action that takes another back."""

    action: str
    params: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Services:
    """What actions may use of the outside. An absent one is None; an action that needs it says so."""

    clock: Clock
    bus: CommandBus
    http: HttpCaller
    notifier: Notifier | None = None
    alertmanager: AlertSource | None = None


class Action(Protocol):
    """What a step does. Classes with these members are found through the registry."""

    name: ClassVar[str]
    summary: ClassVar[str]
    targets: ClassVar[frozenset[Kind]]
    """The kinds of target it can work on."""
    harmful: ClassVar[bool]
    """Whether it changes anything; pause holds back only what does."""
    default_timeout: ClassVar[timedelta]
    Params: ClassVar[type[BaseModel]]

    def __init__(self, services: Services) -> None: ...

    async def perform(self, call: Call) -> Mapping[str, Any]:
        """Do it once; return the output.

        Raises PermanentFailure, TemporaryFailure (worth another attempt under a new id), or
        OutcomeUnknown (another attempt uses the same id). Must end by ``call.deadline`` or soon after.
        """
        ...

    def settled(self, command_id: str) -> None:
        """The outcome of that attempt is durable."""
        ...

    @classmethod
    def inverse(cls, params: BaseModel, output: Mapping[str, Any] | None) -> Inverse | None:
        """What would take it back. Asked before the act with `output` None, and after it with the
        output; None where it cannot be taken back (or not told before the act).

        A class whose effect can never be taken back annotates it ``-> None``; a playbook that asks
        for its undo is refused when it is loaded."""
        ...


@runtime_checkable
class TemplateChecked(Protocol):
    """An action class that also wants to see its parameters as the playbook's author wrote them."""

    @classmethod
    def check_template(cls, raw: Mapping[str, Any]) -> None:
        """Asked when a playbook is loaded, with ``with`` before rendering. Raises ValueError."""
        ...


class Actions(Protocol):
    """The registry of actions."""

    def names(self) -> Sequence[str]: ...
    def spec(self, name: str) -> type[Action] | None:
        """The class, for checking; None where there is none of that name."""
        ...

    def get(self, name: str) -> Action:
        """The instance, for acting. Raises PermanentFailure where there is none."""
        ...


# --- playbooks ------------------------------------------------------------------------------------

Step = ActionStep | WaitStep | ApproveStep
Scope = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Match:
    """Whether a playbook reacts to an alert, and why not where it does not.

    ``failed`` marks a condition that could not be evaluated, which counts as not matching.
    """

    matched: bool
    why: str = ""
    failed: bool = False


class Book(Protocol):
    """A playbook that is checked and compiled. Immutable."""

    @property
    def spec(self) -> Playbook: ...
    @property
    def version(self) -> str:
        """Hash of its text."""
        ...

    @property
    def text(self) -> str: ...
    @property
    def source(self) -> str:
        """The file it came from."""
        ...

    def match(self, alert: Alert) -> Match:
        """Whether it reacts to this alert: alertname, matchers, ``when``."""
        ...

    def target_of(self, alert: Alert, inventory: Mapping[str, str]) -> Target | Unresolved: ...

    def when(self, phase: str, index: int, scope: Scope) -> bool:
        """Whether the step is to run. Raises ExpressionError."""
        ...

    def params(self, phase: str, index: int, scope: Scope) -> BaseModel:
        """The action step's rendered and checked parameters. Raises ExpressionError."""
        ...

    def message(self, phase: str, index: int, scope: Scope) -> str:
        """What an approve step asks. Raises ExpressionError."""
        ...


class Catalog(Protocol):
    """The playbooks that are loaded."""

    def for_alert(self, alertname: str) -> Sequence[Book]: ...
    def get(self, name: str) -> Book | None: ...
    def all(self) -> Sequence[Book]: ...
    def compile(self, text: str, source: str) -> Book:
        """Compile the text of an earlier version. Raises PlaybookError."""
        ...


# --- limits that are settings ---------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Limits:
    """What the engine is told by its settings.

    ``max_age``: older alerts are stale. ``breaker_share`` of the known nodes may be acted on within
    ``breaker_window`` before the breaker opens, and it never opens for fewer than ``breaker_min_nodes``.
    ``queue``: deliveries that may wait for admission before more are refused.
    """

    mode: Mode = Mode.OBSERVE
    max_age: timedelta = timedelta(minutes=15)
    assume_resolved_after: timedelta = timedelta(hours=12)
    breaker_window: timedelta = timedelta(minutes=10)
    breaker_share: float = 0.5
    breaker_min_nodes: int = 10
    queue: int = 1000


__all__ = [
    "Action",
    "Actions",
    "AlertSource",
    "Book",
    "Call",
    "Catalog",
    "Clock",
    "CommandBus",
    "GuardFacts",
    "History",
    "HistoryFilter",
    "HttpCaller",
    "HttpReply",
    "Inverse",
    "Limits",
    "LinkedRun",
    "Match",
    "Notifier",
    "Presence",
    "RunRecord",
    "RunStore",
    "Scope",
    "Services",
    "Step",
    "StepState",
    "TemplateChecked",
    "Transaction",
]
