"""The run store and its history."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Collection, Iterable, Mapping, Sequence
from datetime import datetime
from typing import Protocol, TypeAlias, TypeVar

from msgspec import Struct

from trainmedic_server.domain.alert import AlertRecord, Identity
from trainmedic_server.domain.effect import Effect
from trainmedic_server.domain.group import Member
from trainmedic_server.domain.job_life import JobLife
from trainmedic_server.domain.memory import RunMemory
from trainmedic_server.domain.run import Controls, Event, OperatorOrder, Run, UndoStatus
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
    run_id: str
    playbook: str
    target_key: str
    status: str
    decision: str  # May be one of a later release.
    ended_at: datetime | None = None
    is_again: bool = False  # True if the guard ``again`` started it.


class GuardFacts(Struct, frozen=True):
    """Inputs of the guards for one (playbook, target). Observed runs count, decisions not to start do not."""

    last_ended_at: datetime | None = None  # On this target. None if none has ended.
    # The two numbers exclude members of groups.
    started: int = 0  # Runs after the requested time, on any target or, if requested, on this one.
    open_runs: int = 0  # On any target.


class Transaction(Protocol):
    """One transaction: all or nothing is durable."""

    @property
    def findings(self) -> FindingRecords: ...

    @property
    def agents(self) -> StoredAgentLives: ...

    @property
    def verdicts(self) -> StoredVerdicts: ...

    @property
    def effects(self) -> EffectRecords: ...

    @property
    def event_positions(self) -> EventPositions: ...

    @property
    def messages(self) -> StoredMessages: ...

    @property
    def shown_questions(self) -> ShownQuestions: ...

    @property
    def sessions(self) -> StoredSessions: ...

    # alerts
    def alerts(self, identities: Collection[Identity]) -> dict[Identity, AlertRecord]: ...
    def firing_with(self, fingerprints: Collection[str]) -> list[AlertRecord]: ...  # unresolved ones

    def newest_alerts(self, fingerprints: Collection[str]) -> dict[str, AlertRecord]:
        """Return the alert of each fingerprint that began last, also a resolved one."""
        ...

    # Unresolved alerts in no order. `names`, None for all, are compared with the alertname in the last report.
    def firing(self, limit: int, names: Collection[str] | None = None) -> list[AlertRecord]: ...

    def save_alerts(self, records: Sequence[AlertRecord]) -> None:
        """Insert or replace, by identity. The first report's time, original labels and name for searches stay."""
        ...

    def firing_not_heard_since(self, moment: datetime) -> list[AlertRecord]:
        """Return unresolved alerts last reported before `moment` with a run that is open or owes an undo."""
        ...

    def limit_last_reports(self, moment: datetime) -> None:
        """Set later last reports of unresolved alerts to `moment`: the clock was set back."""
        ...

    # runs
    def linked_runs(self, identities: Collection[Identity]) -> dict[Identity, list[LinkedRun]]:
        """Return runs in order of linking, without alerts that have none."""
        ...

    def open_runs_for(self, keys: Collection[tuple[str, str]]) -> dict[tuple[str, str], str]:
        """Return IDs of open runs by (playbook, target key)."""
        ...

    def open_targets(self) -> Collection[tuple[str, str]]:
        """Return (playbook, target key) of all open runs."""
        ...

    def guard_facts(
        self,
        keys: Collection[tuple[str, str]],
        started_since: Mapping[str, datetime],
        per_target: Collection[str] = (),
    ) -> dict[tuple[str, str], GuardFacts]:
        """Return guard inputs by (playbook, target key).

        ``started`` counts runs after ``started_since[playbook]``, 0 if absent there; of playbooks `per_target`, those
        on the target.
        """
        ...

    def limited_since(self, playbook: str, moment: datetime) -> set[str]:
        """Return target keys of rate-limited runs with ``on_limited`` steps, created after `moment`, without members
        of groups.
        """
        ...

    def memories(self, playbook: str, targets: Collection[str], since: Mapping[str, datetime]) -> dict[str, RunMemory]:
        """Return each target's last earlier run that changed something, and the number of such runs since each time of
        `since`, which is by period (``1d``).
        """
        ...

    def nodes_acted_on(self, since: datetime) -> set[str]:
        """Return target nodes of runs started and created after `since`, and nodes touched after it, without runs that
        are `Run.is_vouched_for`.
        """
        ...

    def nodes_at_work(self) -> set[str]:
        """Return target nodes and touched nodes of open runs that have acted."""
        ...

    def touch_nodes(self, run_id: str, nodes: Collection[str], at: datetime, *, count: bool = True) -> None:
        """Record nodes that the run changes. `count` is False for a run that is `Run.is_vouched_for`."""
        ...

    def touched_nodes(self, run_id: str) -> set[str]: ...

    def known_nodes(self) -> set[str]: ...
    def remember_nodes(self, nodes: Collection[str], at: datetime) -> None:
        """Record that these nodes exist, until pruned. A recorded time is renewed only after an hour."""
        ...

    def add_runs(self, runs: Sequence[Run]) -> None:
        """Insert runs with their steps. The transaction raises Conflict on a reused ID or a second open run of a
        playbook and target.
        """
        ...

    def save_runs(self, changes: Sequence[tuple[Run, Run | None]]) -> None:
        """Update runs, with the steps that differ from the previous state, which is read if None. Raises NotFound.

        The playbook, version, target, mode, alert and ``created_at`` never change.
        """
        ...

    def add_group_list(self, run_id: str, members: Sequence[str]) -> None:
        """Store the target keys of a new parent run's members. The list never changes."""
        ...

    def group_list(self, run_id: str) -> tuple[str, ...]: ...
    def members(self, run_id: str) -> list[Member]:
        """Return only members that have a run."""
        ...

    def unfinished_members(self, run_id: str) -> list[str]: ...  # run IDs
    def members_with_undo(self, run_id: str, undos: Collection[UndoStatus]) -> list[str]:
        """Return the run IDs of members whose undo is in one of these states."""
        ...

    def link(self, links: Iterable[tuple[str, Identity]]) -> None:
        """Link alerts to runs, as (run ID, alert). Idempotent. The transaction raises Conflict if the run or alert does
        not exist at its end.
        """
        ...

    def run(self, run_id: str) -> Run | None: ...
    def runs(self, run_ids: Collection[str]) -> list[Run]:
        """Return the existing ones, oldest first."""
        ...

    def alerts_of(self, run_ids: Collection[str]) -> dict[str, list[AlertRecord]]: ...

    def alert_counts(self, run_ids: Collection[str]) -> dict[str, int]:
        """Omit runs without alerts."""
        ...

    def unfinished(self) -> list[Run]:
        """Return runs that are open or owe an undo, oldest first."""
        ...

    def runs_in_effect(self, actions: Collection[str]) -> list[str]:
        """Return IDs of runs that began a step of one of these actions and are open, owe an undo, or have an unresolved
        alert (a member: its parent's).
        """
        ...

    def run_of_request(self, key: str) -> str | None: ...  # by the idempotency key of a manual start

    # For late replies: None if the step has succeeded, or its undo is done.
    def run_of_command(self, command_id: str) -> str | None: ...

    # orders, events, controls, playbook versions
    def add_order(self, order: OperatorOrder) -> None: ...
    def orders_of(self, run_ids: Collection[str]) -> dict[str, list[OperatorOrder]]: ...
    def append(self, events: Sequence[Event]) -> None: ...
    def events_of(self, run_id: str, kind: str) -> list[Event]: ...

    def time_gaps(self) -> list[TimeGap]: ...

    def add_time_gaps(self, gaps: Iterable[TimeGap]) -> None: ...
    def job_lives(self) -> list[JobLife]: ...

    def save_job_lives(self, lives: Sequence[JobLife]) -> None: ...

    def forget_job_lives(self, names: Collection[str]) -> None: ...
    def controls(self) -> Controls: ...
    def save_controls(self, controls: Controls) -> None: ...
    def keep_playbook(self, name: str, version: str, text: str, at: datetime) -> None:
        """Store the text, so that runs can continue after an edit. Idempotent."""
        ...

    def playbook_text(self, name: str, version: str) -> str | None: ...


class RunStore(Protocol):
    async def transact(self, work: Callable[[Transaction], T]) -> T:
        """Run `work` in a transaction and return its result when durable. Raises StoreUnavailable.

        Concurrent calls may share a transaction; if `work` raises, only its own changes are dropped. `work` may run
        again, so it must have no external effects.
        """
        # In a server, `work` runs in the only writing thread, not in the event loop; in a simulation, in the caller's.
        ...

    async def check(self) -> None:
        """Raise StoreUnavailable if the store does not answer."""
        ...

    async def prune(self, older_than: datetime, archive: RunArchive | None = None) -> int:
        """Delete closed runs without a pending undo created before `older_than`, with their data; return their number.

        Members of unfinished groups stay, and parents that have members.

        Also deletes older data without a run: alerts, whose number is limited at any age, nodes, verdicts, closed
        findings, job places, events, counts and time gaps. Findings, verdicts and places of retained jobs stay. Other
        transactions run in between.

        With `archive`, each run is archived first. If that fails, raises ArchiveUnavailable and stops deleting.
        """
        ...

    async def close(self) -> None: ...


Values: TypeAlias = str | tuple[str, ...] | None  # None for any.


def values_of(values: Values) -> tuple[str, ...]:
    """Return the distinct values; empty if any value matches."""
    return tuple(dict.fromkeys((values,) if isinstance(values, str) else values or ()))


class HistoryFilter(Struct, frozen=True):
    """None matches any. ``since`` is inclusive, ``until`` exclusive.

    ``owes_undo`` True selects closed runs with a pending undo, False all others.
    """

    alertname: Values = None
    playbook: Values = None
    status: Values = None
    decision: Values = None
    node: Values = None  # Node of the target, or, if the target has none, one that the run changed.
    gpu: Values = None
    """With or without its node: ``node-1/0``, ``gpu:node-1/0``, or as ``0`` on any node."""
    job: Values = None
    since: datetime | None = None
    until: datetime | None = None
    owes_undo: bool | None = None
    target: Values = None  # Key, such as ``node:gpu-7``.
    is_open: bool | None = None
    by: Values = None  # Person with an operator command to it.
    has_acted: bool = False  # False matches any.
    parent: Values = None
    """Only members of these runs. Without it, members are found only by node, GPU, job or target."""

    @property
    def finds_members(self) -> bool:
        return any((self.node, self.gpu, self.job, self.target)) or self.parent is not None


class ActFilter(Struct, frozen=True):
    """None matches any. ``since`` is inclusive, ``until`` exclusive."""

    actor: str | None = None
    since: datetime | None = None
    until: datetime | None = None


class RunRecord(Struct, frozen=True):
    run: Run
    alerts: tuple[AlertRecord, ...]  # For a member of a group, its parent's.
    events: tuple[Event, ...]
    orders: tuple[OperatorOrder, ...] = ()
    effect: Effect | None = None
    members: tuple[str, ...] = ()  # Target keys of a parent's list.


class History(Protocol):
    """Reads without waiting for writers."""

    async def page(self, matching: HistoryFilter, limit: int, cursor: str | None) -> tuple[list[Run], str | None]:
        """Return at most `limit` runs, newest first, and the next page's cursor, if any.

        The search time is limited: a page may be short or empty and still have a cursor. New runs do not shift pages.
        Raises ValueError on an invalid cursor.
        """
        ...

    def stream(self, matching: HistoryFilter) -> AsyncIterator[Run]: ...  # newest first

    async def record(self, run_id: str) -> RunRecord | None: ...
    async def events_after(self, seq: int, limit: int, kinds: Collection[str] = ()) -> list[Event]:
        """Return events with a larger `seq`, in order; of all kinds if `kinds` is empty."""
        ...

    async def events_of_jobs(
        self, kinds: Collection[str], since: datetime, until: datetime, limit: int, job: str | None = None
    ) -> list[Event]:
        """Return the newest `limit` events of no run, of these kinds, from `since` to before `until`, oldest first.

        `job` None selects all jobs.
        """
        ...

    async def acts_of_people(self, matching: ActFilter, before: int | None, limit: int) -> list[Event]:
        """Return events whose actor is not the server, with `seq` below `before`, newest first."""
        ...

    async def last_seq(self) -> int: ...  # 0 without events
