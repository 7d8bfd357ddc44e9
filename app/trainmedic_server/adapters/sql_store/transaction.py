"""Unit of work on one connection. A read that could miss a pending write flushes it first, inside a savepoint.

The writes of several units are sent together. If the database refuses them, the units run again one by one.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from datetime import datetime

import sqlalchemy as sa
from msgspec.structs import replace

from trainmedic_server import errors
from trainmedic_server.adapters.sql_store import database, mapping, queries, run_facts, statements
from trainmedic_server.adapters.sql_store.effects import SqlEffects
from trainmedic_server.adapters.sql_store.findings import SqlFindings
from trainmedic_server.adapters.sql_store.messages import SqlMessages
from trainmedic_server.adapters.sql_store.pending_writes import Flusher, PendingWrites
from trainmedic_server.adapters.sql_store.present import SqlAgentLives
from trainmedic_server.adapters.sql_store.sessions import SqlSessions
from trainmedic_server.adapters.sql_store.shown_questions import SqlShownQuestions
from trainmedic_server.adapters.sql_store.verdicts import SqlVerdicts
from trainmedic_server.adapters.sql_store.writer_cache import WriterCache
from trainmedic_server.domain.alert import AlertRecord, Identity
from trainmedic_server.domain.group import Member
from trainmedic_server.domain.job_life import JobLife
from trainmedic_server.domain.memory import LastRun, RunMemory
from trainmedic_server.domain.run import Controls, Event, OperatorOrder, Run, Status, UndoStatus
from trainmedic_server.domain.time_gaps import TimeGap
from trainmedic_server.ports.store import GuardFacts, LinkedRun, Transaction


class SharedWritesRefused(Exception):
    """Several units' writes failed. Each must run alone, so that only the faulty one fails."""


# `writer.Committer` makes one for each unit of work. The unit uses it only during its call, in the committing thread.
class SqlTransaction(Transaction):
    """`shared` has the writes of earlier units of the transaction. A `guarded` unit begins with a savepoint: a database
    error reverts only this unit.
    """

    def __init__(
        self,
        connection: sa.Connection,
        flush: Flusher,
        cache: WriterCache,
        shared: PendingWrites,
        *,
        guarded: bool = False,
    ) -> None:
        self._connection = connection
        self._flush = flush
        self._cache = cache
        self._shared = shared
        self._own = PendingWrites()
        self._savepoint = connection.begin_nested() if guarded else None

    # the end of a unit

    @property
    def may_have_written(self) -> bool:
        return bool(self._own) or self._savepoint is not None  # Some reads begin a savepoint, too.

    @property
    def is_guarded(self) -> bool:
        return self._savepoint is not None

    def finish(self, *, flush: bool = False) -> None:
        """Leave the unit's writes to `shared`, or send them with `flush`."""
        if flush and self._own:
            self._send_own()
        self._shared.absorb(self._own)
        if self._savepoint is not None:
            self._savepoint.commit()

    def roll_back(self) -> None:
        if self._savepoint is not None:
            self._savepoint.rollback()
        own = self._own
        # The cache may have these writes already, or was filled by a read of what is reverted now.
        is_cached = own.targets or own.nodes or own.touched or own.playbooks
        if self._savepoint is not None or is_cached:
            self._cache.forget()

    def flushed_connection(self, *, deletes_nodes: bool = False) -> sa.Connection:
        """Flush everything. The caller must not change cached data, such as open runs. It may delete nodes if it
        passes `deletes_nodes`.
        """
        send_shared(self._connection, self._flush, self._shared)
        self._send_own()
        if deletes_nodes:
            self._cache.forget()
        return self._connection

    def _guarded_connection(self) -> sa.Connection:
        # For tables whose statements are sent at once. An error of one must revert only this unit.
        if self._savepoint is None:
            self._savepoint = self._connection.begin_nested()
        return self._connection

    @property
    def findings(self) -> SqlFindings:
        return SqlFindings(self._guarded_connection)

    @property
    def agents(self) -> SqlAgentLives:
        return SqlAgentLives(self._guarded_connection)

    @property
    def verdicts(self) -> SqlVerdicts:
        return SqlVerdicts(self._guarded_connection)

    @property
    def effects(self) -> SqlEffects:
        return SqlEffects(self._guarded_connection)

    @property
    def event_positions(self) -> SqlEffects:
        return SqlEffects(self._guarded_connection)  # It implements both ports.

    @property
    def messages(self) -> SqlMessages:
        return SqlMessages(self._guarded_connection)

    @property
    def sessions(self) -> SqlSessions:
        return SqlSessions(self._guarded_connection)

    @property
    def shown_questions(self) -> SqlShownQuestions:
        return SqlShownQuestions(self._guarded_connection)

    def _send_own(self) -> None:
        if self._savepoint is None:
            self._savepoint = self._connection.begin_nested()
        self._flush(self._connection, self._own)
        self._own.clear()

    def _flushed_if(self, concerns: Callable[[PendingWrites], object]) -> sa.Connection:
        """Flush only if `concerns` returns true for pending writes, which the next read would miss."""
        if concerns(self._own):  # Earlier units first: own writes may refer to their rows.
            send_shared(self._connection, self._flush, self._shared)
            self._send_own()
        elif concerns(self._shared):
            send_shared(self._connection, self._flush, self._shared)
        return self._connection

    def _flushed_runs(self) -> sa.Connection:
        return self._flushed_if(lambda pending: pending.added or pending.saved)

    def _flushed_alerts(self, fingerprints: Collection[str]) -> sa.Connection:
        return self._flushed_if(lambda pending: not pending.fingerprints.isdisjoint(fingerprints))

    def _flushed_run_ids(self, run_ids: Collection[str]) -> sa.Connection:
        return self._flushed_if(lambda pending: any(map(pending.has_run, run_ids)))

    # alerts

    def alerts(self, identities: Collection[Identity]) -> dict[Identity, AlertRecord]:
        connection = self._flushed_alerts([identity.fingerprint for identity in identities])
        rows = queries.of_alerts(connection, statements.ALERTS, identities)
        return {identity: mapping.alert_of(row) for identity, row in rows}

    def firing_with(self, fingerprints: Collection[str]) -> list[AlertRecord]:
        rows = statements.FIRING_ALERTS.rows(self._flushed_alerts(fingerprints), fingerprints)
        return [mapping.alert_of(row) for row in rows]

    def newest_alerts(self, fingerprints: Collection[str]) -> dict[str, AlertRecord]:
        rows = statements.NEWEST_ALERTS.rows(self._flushed_alerts(fingerprints), fingerprints)
        return {row[0]: mapping.alert_of(row) for row in rows}

    def firing(self, limit: int, names: Collection[str] | None = None) -> list[AlertRecord]:
        connection = self._flushed_if(lambda pending: pending.fingerprints)
        rows = connection.execute(statements.firing(names, connection.dialect), {"limit": limit})
        return [mapping.alert_of(row) for row in rows]

    def save_alerts(self, records: Sequence[AlertRecord]) -> None:
        self._own.save_alerts(records)

    def firing_not_heard_since(self, moment: datetime) -> list[AlertRecord]:
        connection = self._flushed_if(lambda pending: pending.fingerprints or pending.targets)
        return [mapping.alert_of(row) for row in connection.execute(statements.SILENT_ALERTS, {"moment": moment})]

    def limit_last_reports(self, moment: datetime) -> None:
        self.flushed_connection().execute(statements.LIMIT_LAST_REPORTS, {"moment": moment})

    # runs

    def linked_runs(self, identities: Collection[Identity]) -> dict[Identity, list[LinkedRun]]:
        connection = self._flushed_alerts([identity.fingerprint for identity in identities])
        linked_runs: dict[Identity, list[LinkedRun]] = {}
        for identity, row in queries.of_alerts(connection, statements.LINKED_RUNS, identities):
            linked = LinkedRun(*row[2:])
            # Pending changes of runs are not flushed for this read, but applied to its rows.
            saved = self._own.saved.get(linked.run_id) or self._shared.saved.get(linked.run_id)
            if saved is not None:
                linked = replace(linked, status=saved.status, decision=saved.decision, ended_at=saved.ended_at)
            linked_runs.setdefault(identity, []).append(linked)
        return linked_runs

    def open_runs_for(self, keys: Collection[tuple[str, str]]) -> dict[tuple[str, str], str]:
        open_runs = self._open_runs()
        return {key: open_runs[key] for key in keys if key in open_runs}

    def open_targets(self) -> Collection[tuple[str, str]]:
        return self._open_runs().keys()

    def guard_facts(
        self,
        keys: Collection[tuple[str, str]],
        started_since: Mapping[str, datetime],
        per_target: Collection[str] = (),
    ) -> dict[tuple[str, str], GuardFacts]:
        self._open_runs()  # Fills the cache, for `count_open`.
        facts: dict[tuple[str, str], GuardFacts] = {}
        for playbook in {playbook for playbook, _ in keys}:
            since, started = started_since.get(playbook), 0
            targets = [target for its_playbook, target in keys if its_playbook == playbook]
            started_by_target: dict[str, int] = {}
            if since is not None:
                values = {"playbook": playbook, "since": since}
                if playbook in per_target:
                    started_by_target = dict(
                        statements.COUNT_STARTED_BY_TARGET.rows(self._flushed_runs(), targets, **values)
                    )
                else:
                    started = self._flushed_runs().execute(statements.COUNT_STARTED, values).scalar_one()
            connection = self._flushed_if(lambda pending: not pending.targets.isdisjoint(keys))
            ended: dict[str, datetime | None] = dict(statements.LAST_ENDED.rows(connection, targets, playbook=playbook))
            open_runs = self._cache.count_open(playbook)
            facts |= {
                (playbook, key): GuardFacts(ended.get(key), started_by_target.get(key, started), open_runs)
                for key in targets
            }
        return facts

    def limited_since(self, playbook: str, moment: datetime) -> set[str]:
        rows = self._flushed_runs().execute(statements.LIMITED_TARGETS, {"playbook": playbook, "since": moment})
        return set(rows.scalars())

    def memories(self, playbook: str, targets: Collection[str], since: Mapping[str, datetime]) -> dict[str, RunMemory]:
        connection = self._flushed_runs()
        counts: dict[str, dict[str, int]] = {target: {} for target in targets}
        for window, moment in since.items():
            rows = statements.COUNT_ACTED_BY_TARGET.rows(connection, targets, playbook=playbook, since=moment)
            for target, count in rows:
                counts[target][window] = count
        last: dict[str, str | None] = dict(statements.LAST_ACTED_BY_TARGET.rows(connection, targets, playbook=playbook))
        acted = {run.id: run for run in self.runs([run_id for run_id in last.values() if run_id is not None])}
        # `last` has every target, with None if no run has acted on it.
        return {target: RunMemory(counts[target], _last_run_of(acted.get(last[target] or ""))) for target in targets}

    def _open_runs(self) -> Mapping[tuple[str, str], str]:
        open_runs = self._cache.open_runs
        if open_runs is None:
            rows = self._flushed_runs().execute(statements.OPEN_RUNS).all()
            open_runs = {(row.playbook, row.target_key): row.id for row in rows}
            self._cache.set_open_runs(open_runs, {row.id for row in rows if row.parent is not None})
        return open_runs

    def nodes_acted_on(self, since: datetime) -> set[str]:
        nodes = self._cache.nodes_acted_on_since(since)
        if nodes is None:
            connection = self._flushed_if(lambda pending: pending.added or pending.saved or pending.touched)
            latest: dict[str, datetime] = {}
            for statement in (statements.NODES_OF_STARTED_RUNS, statements.NODES_TOUCHED):
                for node, at in connection.execute(statement, {"since": since}):
                    latest[node] = max(at, latest.get(node, at))
            self._cache.set_acted_on(since, latest)
            nodes = set(latest)
        return nodes

    def nodes_at_work(self) -> set[str]:
        connection = self._flushed_if(lambda pending: pending.added or pending.saved or pending.touched)
        return set(connection.execute(statements.NODES_AT_WORK).scalars())

    def touch_nodes(self, run_id: str, nodes: Collection[str], at: datetime, *, count: bool = True) -> None:
        self._own.touched.update(((run_id, node), at) for node in nodes)
        if count:
            self._cache.touch(nodes, at)

    def touched_nodes(self, run_id: str) -> set[str]:
        connection = self._flushed_if(lambda pending: pending.touched)
        return set(connection.execute(statements.TOUCHED_BY, {"run": run_id}).scalars())

    def known_nodes(self) -> set[str]:
        nodes = self._cache.nodes
        if nodes is None:
            connection = self._flushed_if(lambda pending: pending.nodes)
            nodes = {row.name: row.seen_at for row in connection.execute(statements.NODES)}
            self._cache.nodes = nodes
        return set(nodes)

    def remember_nodes(self, nodes: Collection[str], at: datetime) -> None:
        self._own.nodes.update((node, at) for node in nodes if self._cache.should_write_node(node, at))

    def add_runs(self, runs: Sequence[Run]) -> None:
        self._count_repeated(runs, 1)
        for run in runs:
            self._own.add_run(run)
            self._cache.update(run)

    def _count_repeated(self, runs: Sequence[Run], by: int) -> None:
        """Add `by` to the fact ``repeated`` for each run within `REPEATED_WITHIN` after the playbook's last one on the
        target.
        """
        countable = [run for run in runs if run_facts.may_be_repetition(run)]
        keys = {(run.playbook, run.target_key) for run in countable}
        ended: dict[tuple[str, str], datetime] = {}
        for playbook in {playbook for playbook, _ in keys}:
            targets = [target for its_playbook, target in keys if its_playbook == playbook]
            connection = self._flushed_if(lambda pending: not pending.targets.isdisjoint(keys))
            rows = statements.LAST_ENDED_UNOBSERVED.rows(connection, targets, playbook=playbook)
            ended |= {(playbook, target): at for target, at in rows if at is not None}
        for run in countable:
            last = ended.get(key := (run.playbook, run.target_key))
            if last is not None and last <= run.created_at <= last + run_facts.REPEATED_WITHIN:
                self._own.counts[run_facts.day_of(run.created_at), run.playbook, run_facts.REPEATED] += by
            if run.ended_at is not None:
                ended[key] = run.ended_at

    def save_runs(self, changes: Sequence[tuple[Run, Run | None]]) -> None:
        for run, known in changes:
            before = known or self.run(run.id)
            if before is None:
                raise errors.NotFound(f"there is no run {run.id}")
            if run.status is Status.NOT_STARTED and before.is_open:  # It was counted when added, but never started.
                self._count_repeated([before], -1)
            self._own.save_run(run, before)
            self._cache.update(run)

    def add_group_list(self, run_id: str, members: Sequence[str]) -> None:
        self._own.groups[run_id] = tuple(members)

    def group_list(self, run_id: str) -> tuple[str, ...]:
        connection = self._flushed_if(lambda pending: pending.groups)
        return tuple(connection.execute(statements.GROUP_LIST, {"parent": run_id}).scalar() or ())

    def members(self, run_id: str) -> list[Member]:
        rows = self._flushed_runs().execute(statements.MEMBERS, {"parent": run_id})
        return [mapping.member_of(row) for row in rows]

    def unfinished_members(self, run_id: str) -> list[str]:
        return list(self._flushed_runs().execute(statements.UNFINISHED_MEMBERS, {"parent": run_id}).scalars())

    def members_with_undo(self, run_id: str, undos: Collection[UndoStatus]) -> list[str]:
        values = {"parent": run_id, "undos": [str(status) for status in undos]}
        return list(self._flushed_runs().execute(statements.MEMBERS_WITH_UNDO, values).scalars())

    def link(self, links: Iterable[tuple[str, Identity]]) -> None:
        self._own.link(links)

    def run(self, run_id: str) -> Run | None:
        return next(iter(self.runs([run_id])), None)

    def runs(self, run_ids: Collection[str]) -> list[Run]:
        return queries.runs(self._flushed_run_ids(run_ids), run_ids)

    def alerts_of(self, run_ids: Collection[str]) -> dict[str, list[AlertRecord]]:
        return queries.alerts_of(self._flushed_if(lambda pending: pending.fingerprints), run_ids)

    def alert_counts(self, run_ids: Collection[str]) -> dict[str, int]:
        distinct = set(run_ids)
        connection = self._flushed_if(lambda pending: any(run_id in distinct for run_id, _ in pending.links))
        return {run_id: count for run_id, count in statements.COUNT_ALERTS.rows(connection, distinct) if count}

    def unfinished(self) -> list[Run]:
        connection = self._flushed_runs()
        return queries.with_steps(connection, connection.execute(statements.UNFINISHED_RUNS).all())

    def runs_in_effect(self, actions: Collection[str]) -> list[str]:
        connection = self._flushed_if(lambda pending: pending.targets or pending.fingerprints)
        return list(connection.execute(statements.RUNS_IN_EFFECT, {"actions": list(actions)}).scalars())

    def run_of_request(self, key: str) -> str | None:
        run_id: str | None = self._flushed_runs().execute(statements.RUN_OF_REQUEST, {"key": key}).scalar()
        return run_id

    def run_of_command(self, command_id: str) -> str | None:
        run_id: str | None = self._flushed_runs().execute(statements.RUN_OF_COMMAND, {"command": command_id}).scalar()
        return run_id

    # orders, events, controls, playbook versions

    def add_order(self, order: OperatorOrder) -> None:
        self._own.orders.append(order)

    def orders_of(self, run_ids: Collection[str]) -> dict[str, list[OperatorOrder]]:
        return queries.orders_of(self._flushed_if(lambda pending: pending.orders), run_ids)

    def append(self, events: Sequence[Event]) -> None:
        self._own.events += events

    def events_of(self, run_id: str, kind: str) -> list[Event]:
        connection = self._flushed_if(lambda pending: pending.events)
        rows = connection.execute(statements.EVENTS_OF_KIND, {"run": run_id, "kind": kind})
        return [mapping.event_of(row) for row in rows]

    def time_gaps(self) -> list[TimeGap]:
        connection = self._flushed_if(lambda pending: pending.time_gaps)
        return [mapping.time_gap_of(row) for row in connection.execute(statements.TIME_GAPS)]

    def add_time_gaps(self, gaps: Iterable[TimeGap]) -> None:
        self._own.time_gaps += gaps

    def job_lives(self) -> list[JobLife]:
        # Nothing is pending: changes of job lives are sent at once.
        return [mapping.job_life_of(row) for row in self._connection.execute(statements.JOB_LIVES)]

    def save_job_lives(self, lives: Sequence[JobLife]) -> None:
        self.forget_job_lives([life.name for life in lives])
        if lives:
            self.flushed_connection().execute(statements.ADD_JOB_LIVES, [mapping.job_life_row(life) for life in lives])

    def forget_job_lives(self, names: Collection[str]) -> None:
        if names:
            self.flushed_connection().execute(statements.FORGET_JOB_LIVES, [{"job": name} for name in names])

    def controls(self) -> Controls:
        row = self._flushed_if(lambda pending: pending.controls).execute(statements.CONTROLS).one_or_none()
        return mapping.controls_of(row) if row is not None else Controls()

    def save_controls(self, controls: Controls) -> None:
        self._own.controls = controls

    def keep_playbook(self, name: str, version: str, text: str, at: datetime) -> None:
        if (name, version) not in self._cache.playbooks:
            self._cache.playbooks.add((name, version))
            self._own.playbooks.setdefault((name, version), (text, at))

    def playbook_text(self, name: str, version: str) -> str | None:
        connection = self._flushed_if(lambda pending: pending.playbooks)
        text: str | None = connection.execute(statements.PLAYBOOK_TEXT, {"name": name, "version": version}).scalar()
        return text


def _last_run_of(run: Run | None) -> LastRun | None:
    if run is None or run.acted_at is None:
        return None
    return LastRun(run.id, str(run.status), run.acted_at, run.ended_at, run.message)


def send_shared(connection: sa.Connection, flush: Flusher, shared: PendingWrites) -> None:
    if not shared:
        return
    try:
        flush(connection, shared)
    except Exception as error:  # also an encoding error: the units run again one by one
        if database.is_outage(error):
            raise
        raise SharedWritesRefused from error
    shared.clear()
