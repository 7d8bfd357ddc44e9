"""The run store: the truth about alerts, runs, steps, undo duties and events; and reading its history."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Collection, Iterable, Mapping, Sequence
from datetime import datetime
from typing import Protocol, TypeAlias, TypeVar

from msgspec import Struct

from trainmedic_server.domain.alert import AlertRecord, Identity
from trainmedic_server.domain.effect import Effect
from trainmedic_server.domain.job_life import JobLife
from trainmedic_server.domain.run import Controls, Event, OperatorOrder, Run
from trainmedic_server.domain.time_gaps import TimeGap
from trainmedic_server.ports.archive import RunArchive
from trainmedic_server.ports.chat import ShownQuestions
from trainmedic_server.ports.effects import EffectRecords, EventPositions
from trainmedic_server.ports.findings import FindingRecords
from trainmedic_server.ports.messages import StoredMessages
from trainmedic_server.ports.present import StoredAgentLives
from trainmedic_server.ports.sessions import StoredSessions
from trainmedic_server.ports.verdicts import StoredVerdicts

T = TypeVar("T")


class LinkedRun(Struct, frozen=True):
    """A run (or a decision not to start) that an alert led to, as admission needs to know it."""

    run_id: str
    playbook: str
    target_key: str
    status: str
    """A `Status`, or one of a later release."""
    decision: str
    """A `Decision`, or one of a later release."""


class GuardFacts(Struct, frozen=True):
    """What the guards of one (playbook, target) look at. Observed runs count like started ones.

    Decisions not to start count for none of them.
    """

    last_ended_at: datetime | None = None
    """When the last run of the playbook on this target ended."""
    started: int = 0
    """How many runs of the playbook, on any target, were created after the moment that was asked for."""
    open_runs: int = 0
    """How many runs of the playbook are open, on any target."""


class KeptTables(Protocol):
    """Each kind of record with an interface of its own."""

    @property
    def findings(self) -> FindingRecords:
        """What rules have found in logs."""
        ...

    @property
    def agents(self) -> StoredAgentLives:
        """When agents were heard of last."""
        ...

    @property
    def verdicts(self) -> StoredVerdicts:
        """What was said of the failures of jobs."""
        ...

    @property
    def effects(self) -> EffectRecords:
        """What became of the metrics of alerts after runs had acted."""
        ...

    @property
    def event_positions(self) -> EventPositions:
        """Up to which event each listener has taken them."""
        ...

    @property
    def messages(self) -> StoredMessages:
        """What people are to be told, and were told."""
        ...

    @property
    def shown_questions(self) -> ShownQuestions:
        """The messages of a chat that show what runs ask."""
        ...

    @property
    def sessions(self) -> StoredSessions:
        """The browsers that are signed in to the console."""
        ...


class Transaction(KeptTables, Protocol):
    """One transaction of the run store. Everything written in it is durable together, or not at all.

    Methods that take many keys exist so that a storm costs few queries.
    """

    # alerts
    def alerts(self, identities: Collection[Identity]) -> dict[Identity, AlertRecord]: ...
    def firing_with(self, fingerprints: Collection[str]) -> list[AlertRecord]:
        """Return the alerts of these fingerprints, whatever their beginning, that have not resolved."""
        ...

    def firing(self, limit: int, names: Collection[str] | None = None) -> list[AlertRecord]:
        """Return up to `limit` unresolved alerts, of these alertnames only unless `names` is None."""
        ...

    def save_alerts(self, records: Sequence[AlertRecord]) -> None:
        """Insert or replace, by identity; of what is there, the alertname and when it was first heard of stay."""
        ...

    def firing_not_heard_since(self, moment: datetime) -> list[AlertRecord]:
        """Return unresolved alerts without a report since `moment`, linked to a run that is open or owes an undo."""
        ...

    def heard_no_later_than(self, moment: datetime) -> None:
        """Have each firing alert that was heard of after `moment` be heard of last then, because the clock was set
        back."""
        ...

    # runs
    def linked_runs(self, identities: Collection[Identity]) -> dict[Identity, list[LinkedRun]]:
        """Return the runs of each alert that led to any, in the order of tying."""
        ...

    def open_runs_for(self, keys: Collection[tuple[str, str]]) -> dict[tuple[str, str], str]:
        """Return the open run's id for each (playbook, target key) that has one."""
        ...

    def guard_facts(
        self, keys: Collection[tuple[str, str]], started_since: Mapping[str, datetime]
    ) -> dict[tuple[str, str], GuardFacts]:
        """Return the counts for the guards of each (playbook, target key). ``started`` counts the runs since
        ``started_since[playbook]``; it is 0 for a playbook that is missing there."""
        ...

    def nodes_acted_on(self, since: datetime) -> set[str]:
        """Return the distinct nodes that runs acted on after `since`: the target's, if the run was started and
        created after it, and those that a run was recorded to touch after it."""
        ...

    def touch_nodes(self, run_id: str, nodes: Collection[str], at: datetime) -> None:
        """Record that the run changes something on these nodes from `at` on, before it does."""
        ...

    def touched_nodes(self, run_id: str) -> set[str]:
        """Return the nodes that the run was recorded to touch."""
        ...

    def known_nodes(self) -> set[str]: ...
    def remember_nodes(self, nodes: Collection[str], at: datetime) -> None:
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
        """Return the runs of these ids that exist, oldest first."""
        ...

    def alerts_of(self, run_ids: Collection[str]) -> dict[str, list[AlertRecord]]:
        """Return the alerts tied to each run, in the order of tying."""
        ...

    def alert_counts(self, run_ids: Collection[str]) -> dict[str, int]:
        """Return how many alerts are tied to each run that has any."""
        ...

    def unfinished(self) -> list[Run]:
        """Return runs that are open, or closed and still owe an undo; oldest first."""
        ...

    def runs_in_effect(self, actions: Collection[str]) -> list[str]:
        """Return the ids of runs that have begun a step of one of these actions, and are open, owe an undo, or are
        tied to an alert that has not resolved; in no order."""
        ...

    def run_of_request(self, key: str) -> str | None:
        """Return the run that a person started by the request of this name."""
        ...

    def run_of_command(self, command_id: str) -> str | None:
        """Return the run whose step or undo has this as its current command."""
        ...

    # orders, events, controls, playbook versions
    def add_order(self, order: OperatorOrder) -> None: ...
    def orders_of(self, run_ids: Collection[str]) -> dict[str, list[OperatorOrder]]: ...
    def append(self, events: Sequence[Event]) -> None: ...
    def events_of(self, run_id: str, kind: str) -> list[Event]:
        """Return the run's events of this kind, in order."""
        ...

    def time_gaps(self) -> list[TimeGap]:
        """Return the gaps in the time of day, in the order in which they were noticed."""
        ...

    def add_time_gaps(self, gaps: Iterable[TimeGap]) -> None: ...
    def job_lives(self) -> list[JobLife]:
        """Return the record of each job that is remembered, in no order."""
        ...

    def save_job_lives(self, lives: Sequence[JobLife]) -> None:
        """Insert or replace, by the job's name."""
        ...

    def forget_job_lives(self, names: Collection[str]) -> None: ...
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

    async def prune(self, older_than: datetime, archive: RunArchive | None = None) -> int:
        """Delete closed runs that owe no undo and were created before `older_than`, with their data; return how many.

        Also deletes alerts without a remaining run, nodes, verdicts, findings that are over and places of jobs, each
        without a report since, and older events that concern no run; but no finding or verdict of a job that is kept.
        Of alerts without a run more than a fixed number are not kept, however young.
        Other transactions run in between. With `archive` a run is deleted after it was written there, whole; raises
        ArchiveUnavailable where it cannot be, and deletes nothing from then on, whatever it is.
        """
        ...

    async def close(self) -> None: ...


Values: TypeAlias = str | tuple[str, ...] | None
"""The values of which a filter takes one: a single one, several, or None for any."""


def values_of(values: Values) -> tuple[str, ...]:
    """The values as a tuple, each once; empty where any will do."""
    return tuple(dict.fromkeys((values,) if isinstance(values, str) else values or ()))


class HistoryFilter(Struct, frozen=True):
    """Which items of the history are meant; None means any. ``since`` is inclusive, ``until`` exclusive.

    ``owes_undo`` set to True asks for the closed runs that still owe an undo, False for all others; ``is_open`` for
    the runs that are not closed, or those that are.
    """

    alertname: Values = None
    playbook: Values = None
    status: Values = None
    decision: Values = None
    node: Values = None
    """Of the target, or one on which a run on a job has changed something."""
    gpu: Values = None
    """Its name alone, or with its node: ``gpu:node-1/0`` or ``node-1/0``."""
    job: Values = None
    since: datetime | None = None
    until: datetime | None = None
    owes_undo: bool | None = None
    target: Values = None
    """The target's key."""
    is_open: bool | None = None
    by: Values = None
    """Who has approved, rejected, cancelled or undone it."""
    has_acted: bool = False
    """True for only those runs that have begun to change something."""


class ActFilter(Struct, frozen=True):
    """Which acts of people are meant; None means any. ``since`` is inclusive, ``until`` exclusive."""

    actor: str | None = None
    since: datetime | None = None
    until: datetime | None = None


class RunRecord(Struct, frozen=True):
    """A run with everything that the store knows of it."""

    run: Run
    alerts: tuple[AlertRecord, ...]
    events: tuple[Event, ...]
    orders: tuple[OperatorOrder, ...] = ()
    effect: Effect | None = None
    """None where none is recorded."""


class History(Protocol):
    """Reads what was done, and never waits for a writer."""

    async def page(self, matching: HistoryFilter, limit: int, cursor: str | None) -> tuple[list[Run], str | None]:
        """Return at most `limit` runs, the newest first, and the cursor of the next page or None.
        There can be fewer, and even none, with a cursor: where what is asked for is rare, a page ends after a while.
        Runs that arrive in between never shift a page. Raises ValueError on a cursor that is not one.
        """
        ...

    def stream(self, matching: HistoryFilter) -> AsyncIterator[Run]:
        """Return all of it, newest first, in bounded memory."""
        ...

    async def record(self, run_id: str) -> RunRecord | None: ...
    async def events_after(self, seq: int, limit: int, kinds: Collection[str] = ()) -> list[Event]:
        """Return events with a larger `seq`, in order; of these kinds, or of all where none is named."""
        ...

    async def events_of_jobs(
        self, kinds: Collection[str], since: datetime, until: datetime, limit: int, job: str | None = None
    ) -> list[Event]:
        """Return the events of these kinds that concern no run, from `since` to before `until`, oldest first: those
        about this job, or about any. Of more than `limit`, the newest."""
        ...

    async def acts_of_people(self, matching: ActFilter, before: int | None, limit: int) -> list[Event]:
        """Return the events whose actor is not the server, newest first: those with a smaller `seq` than `before`."""
        ...

    async def last_seq(self) -> int: ...
