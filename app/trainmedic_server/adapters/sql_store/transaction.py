"""What a unit of work sees of the store: `ports.Transaction` on one connection.

Writes wait in `Pending`; a read that could miss one has them flushed first. A unit that flushes
its own writes does so behind a savepoint, so that it can still be taken back alone.
Who calls it: ``writer``, on its thread; and the engine's work, through the port.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from datetime import datetime

import sqlalchemy as sa

from trainmedic_server.adapters.sql_store import database, mapping, queries, schema
from trainmedic_server.adapters.sql_store.lookup import KEYS, Lookup
from trainmedic_server.adapters.sql_store.memo import Memo
from trainmedic_server.adapters.sql_store.pending import Flush, Pending
from trainmedic_server.adapters.sql_store.schema import alerts, run_alerts, runs, steps
from trainmedic_server.domain.alert import AlertRecord, Identity
from trainmedic_server.domain.run import Controls, Decision, Event, OperatorOrder, Run
from trainmedic_server.ports.store import GuardFacts, LinkedRun, Transaction

_ALERTS = Lookup(sa.select(alerts).where(alerts.c.fingerprint.in_(KEYS), queries.within(alerts.c.starts_at)))
_FIRING = Lookup(
    sa.select(alerts)
    .where(alerts.c.fingerprint.in_(KEYS), alerts.c.resolved_at.is_(None))
    .order_by(alerts.c.fingerprint, alerts.c.starts_at)
)
_SAME_ALERT = sa.and_(
    run_alerts.c.fingerprint == alerts.c.fingerprint,
    run_alerts.c.starts_at == alerts.c.starts_at,
)
_SILENT = (
    sa.select(alerts)
    .where(
        alerts.c.resolved_at.is_(None),
        alerts.c.last_heard_at < sa.bindparam("moment", type_=schema.Moment),
        sa.exists().where(_SAME_ALERT, runs.c.id == run_alerts.c.run_id, runs.c.unfinished),
    )
    .order_by(alerts.c.last_heard_at, alerts.c.fingerprint, alerts.c.starts_at)
)
_LINKED = Lookup(
    sa.select(
        run_alerts.c.fingerprint,
        run_alerts.c.starts_at,
        runs.c.id,
        runs.c.playbook,
        runs.c.target_key,
        runs.c.status,
        runs.c.decision,
    )
    .join(runs, runs.c.id == run_alerts.c.run_id)
    .where(run_alerts.c.fingerprint.in_(KEYS), queries.within(run_alerts.c.starts_at))
    .order_by(run_alerts.c.seq)
)
_OPEN = sa.select(runs.c.id, runs.c.playbook, runs.c.target_key).where(schema.is_open)
_LAST_ENDED = Lookup(
    sa.select(runs.c.target_key, sa.func.max(runs.c.ended_at).label("ended_at"))
    .where(runs.c.playbook == sa.bindparam("playbook"), runs.c.target_key.in_(KEYS), schema.was_started)
    .group_by(runs.c.target_key)
)
_STARTED = (
    sa.select(sa.func.count())
    .select_from(runs)
    .where(
        runs.c.playbook == sa.bindparam("playbook"),
        schema.was_started,
        runs.c.created_at > sa.bindparam("since", type_=schema.Moment),
    )
)
_ACTED_ON = (
    sa.select(runs.c.node, sa.func.max(runs.c.created_at).label("latest"))
    .where(
        runs.c.decision == Decision.STARTED.value,
        runs.c.created_at > sa.bindparam("since", type_=schema.Moment),
        runs.c.node.is_not(None),
    )
    .group_by(runs.c.node)
)
_ALERT_COUNTS = Lookup(
    sa.select(run_alerts.c.run_id, sa.func.count()).where(run_alerts.c.run_id.in_(KEYS)).group_by(run_alerts.c.run_id)
)
_UNFINISHED = sa.select(runs).where(runs.c.unfinished).order_by(runs.c.created_at, runs.c.id)
_FIRES = (
    sa.select(run_alerts.c.run_id)
    .join(alerts, _SAME_ALERT)
    .where(
        # Said twice, so that SQLite begins with the few alerts that fire and not with all ties.
        run_alerts.c.fingerprint.in_(sa.select(alerts.c.fingerprint).where(alerts.c.resolved_at.is_(None))),
        alerts.c.resolved_at.is_(None),
    )
)
_IN_EFFECT = (
    sa.select(steps.c.run_id)
    .where(
        steps.c.run_id.in_(sa.select(runs.c.id).where(runs.c.unfinished).union(_FIRES)),
        steps.c.action.in_(sa.bindparam("actions", expanding=True)),
        steps.c.command_id.is_not(None),
    )
    .distinct()
)
_COMMAND: sa.BindParameter[str] = sa.bindparam("command")
_RUN_OF_COMMAND = (
    sa.select(steps.c.run_id)
    .where(steps.c.command_id == _COMMAND)
    .union_all(sa.select(steps.c.run_id).where(steps.c.undo_command_id == _COMMAND))
    .limit(1)
)
_EVENTS_OF = (
    sa.select(*schema.events.columns)
    .where(schema.events.c.run_id == sa.bindparam("run"), schema.events.c.kind == sa.bindparam("kind"))
    .order_by(schema.events.c.seq)
)
_NODES = sa.select(schema.nodes)
_CONTROLS = sa.select(schema.controls)
_PLAYBOOK = sa.select(schema.playbook_versions.c.text).where(
    schema.playbook_versions.c.name == sa.bindparam("name"),
    schema.playbook_versions.c.version == sa.bindparam("version"),
)


class Entangled(Exception):
    """Writes of several units were refused together; each has to run alone to find out whose it was."""


class SqlTransaction(Transaction):
    """One unit of work. ``shared`` holds what earlier units of the same transaction have written.

    ``guarded``: from its beginning behind a savepoint, so that whatever it is refused is its own affair.
    """

    def __init__(
        self, connection: sa.Connection, flush: Flush, memo: Memo, shared: Pending, *, guarded: bool = False
    ) -> None:
        self._connection = connection
        self._flush = flush
        self._memo = memo
        self._shared = shared
        self._own = Pending()
        self._savepoint = connection.begin_nested() if guarded else None

    # the end of a unit

    @property
    def has_written(self) -> bool:
        """Whether the unit has changed anything, sent or not."""
        return bool(self._own) or self._savepoint is not None

    @property
    def is_guarded(self) -> bool:
        """Whether it can be taken back alone, after an error of the database too."""
        return self._savepoint is not None

    def keep(self, *, flush: bool = False) -> None:
        """The unit is done: its writes join those of the others, or are sent at once."""
        if flush and self._own:
            self._send_own()
        self._shared.absorb(self._own)
        if self._savepoint is not None:
            self._savepoint.commit()

    def abandon(self) -> None:
        """The unit raised: nothing of it is kept."""
        if self._savepoint is not None:
            self._savepoint.rollback()
        if self._savepoint is not None or self._own.targets or self._own.nodes or self._own.playbooks:
            self._memo.forget()

    def settle(self) -> sa.Connection:
        """Send all that is pending, and give the connection for statements of one's own."""
        send_shared(self._connection, self._flush, self._shared)
        self._send_own()
        self._memo.forget()
        return self._connection

    def _send_own(self) -> None:
        if self._savepoint is None:
            self._savepoint = self._connection.begin_nested()
        self._flush(self._connection, self._own)
        self._own.clear()

    def _see(self, touches: Callable[[Pending], object]) -> sa.Connection:
        """The connection, with nothing pending that a read could miss: nothing that `touches` it."""
        if touches(self._own):
            send_shared(self._connection, self._flush, self._shared)
            self._send_own()
        elif touches(self._shared):
            send_shared(self._connection, self._flush, self._shared)
        return self._connection

    def _see_runs(self) -> sa.Connection:
        return self._see(lambda pending: pending.added or pending.saved)

    def _see_alerts(self, fingerprints: Collection[str]) -> sa.Connection:
        return self._see(lambda pending: not pending.fingerprints.isdisjoint(fingerprints))

    def _see_run_ids(self, run_ids: Collection[str]) -> sa.Connection:
        return self._see(lambda pending: any(map(pending.has_run, run_ids)))

    # alerts

    def alerts(self, identities: Collection[Identity]) -> dict[Identity, AlertRecord]:
        connection = self._see_alerts([identity.fingerprint for identity in identities])
        found = queries.of_alerts(connection, _ALERTS, identities)
        return {identity: mapping.alert_of(row) for identity, row in found}

    def firing_with(self, fingerprints: Collection[str]) -> list[AlertRecord]:
        found = _FIRING.rows(self._see_alerts(fingerprints), fingerprints)
        return [mapping.alert_of(row) for row in found]

    def save_alerts(self, records: Sequence[AlertRecord]) -> None:
        self._own.save_alerts(records)

    def firing_not_heard_since(self, moment: datetime) -> list[AlertRecord]:
        connection = self._see(lambda pending: pending.fingerprints or pending.targets)
        return [mapping.alert_of(row) for row in connection.execute(_SILENT, {"moment": moment})]

    # runs

    def linked_runs(self, identities: Collection[Identity]) -> dict[Identity, list[LinkedRun]]:
        connection = self._see_alerts([identity.fingerprint for identity in identities])
        found: dict[Identity, list[LinkedRun]] = {}
        for identity, row in queries.of_alerts(connection, _LINKED, identities):
            linked = LinkedRun(*row[2:])
            saved = self._own.saved.get(linked.run_id) or self._shared.saved.get(linked.run_id)
            if saved is not None:
                linked = replace(linked, status=saved.status.value, decision=saved.decision.value)
            found.setdefault(identity, []).append(linked)
        return found

    def open_runs_for(self, keys: Collection[tuple[str, str]]) -> dict[tuple[str, str], str]:
        known = self._open_runs()
        return {key: known[key] for key in keys if key in known}

    def guard_facts(
        self, keys: Collection[tuple[str, str]], started_since: Mapping[str, datetime]
    ) -> dict[tuple[str, str], GuardFacts]:
        self._open_runs()
        facts: dict[tuple[str, str], GuardFacts] = {}
        for playbook in {playbook for playbook, _ in keys}:
            since, started = started_since.get(playbook), 0
            if since is not None:
                asked = {"playbook": playbook, "since": since}
                started = self._see_runs().execute(_STARTED, asked).scalar_one()
            targets = [target for its_playbook, target in keys if its_playbook == playbook]
            connection = self._see(lambda pending: not pending.targets.isdisjoint(keys))
            ended: dict[str, datetime | None] = dict(_LAST_ENDED.rows(connection, targets, playbook=playbook))
            open_runs = self._memo.count_open(playbook)
            facts |= {(playbook, key): GuardFacts(ended.get(key), started, open_runs) for key in targets}
        return facts

    def _open_runs(self) -> Mapping[tuple[str, str], str]:
        known = self._memo.open_runs
        if known is None:
            known = {(row.playbook, row.target_key): row.id for row in self._see_runs().execute(_OPEN)}
            self._memo.learn_open_runs(known)
        return known

    def nodes_acted_on(self, since: datetime) -> set[str]:
        nodes = self._memo.acted_since(since)
        if nodes is None:
            latest = {row.node: row.latest for row in self._see_runs().execute(_ACTED_ON, {"since": since})}
            self._memo.learn_acted(since, latest)
            nodes = set(latest)
        return nodes

    def known_nodes(self) -> set[str]:
        known = self._memo.nodes
        if known is None:
            connection = self._see(lambda pending: pending.nodes)
            known = {row.name: row.seen_at for row in connection.execute(_NODES)}
            self._memo.nodes = known
        return set(known)

    def note_nodes(self, nodes: Collection[str], at: datetime) -> None:
        self._own.nodes.update((node, at) for node in nodes if self._memo.unseen(node, at))

    def add_runs(self, runs: Sequence[Run]) -> None:
        for run in runs:
            self._own.add_run(run)
            self._memo.follow(run)

    def save_runs(self, changes: Sequence[tuple[Run, Run | None]]) -> None:
        for run, before in changes:
            self._own.save_run(run, before)
            self._memo.follow(run)

    def link(self, links: Iterable[tuple[str, Identity]]) -> None:
        self._own.link(links)

    def run(self, run_id: str) -> Run | None:
        found = self.runs([run_id])
        return found[0] if found else None

    def runs(self, run_ids: Collection[str]) -> list[Run]:
        return queries.runs(self._see_run_ids(run_ids), run_ids)

    def alerts_of(self, run_ids: Collection[str]) -> dict[str, list[AlertRecord]]:
        return queries.alerts_of(self._see(lambda pending: pending.fingerprints), run_ids)

    def alert_counts(self, run_ids: Collection[str]) -> dict[str, int]:
        asked = set(run_ids)
        connection = self._see(lambda pending: any(run_id in asked for run_id, _ in pending.links))
        return dict(_ALERT_COUNTS.rows(connection, asked))

    def unfinished(self) -> list[Run]:
        connection = self._see_runs()
        return queries.with_steps(connection, connection.execute(_UNFINISHED).all())

    def runs_in_effect(self, actions: Collection[str]) -> list[str]:
        connection = self._see(lambda pending: pending.targets or pending.fingerprints)
        return list(connection.execute(_IN_EFFECT, {"actions": list(actions)}).scalars())

    def run_of_command(self, command_id: str) -> str | None:
        found: str | None = self._see_runs().execute(_RUN_OF_COMMAND, {"command": command_id}).scalar()
        return found

    # orders, events, controls, playbook versions

    def add_order(self, order: OperatorOrder) -> None:
        self._own.orders.append(order)

    def orders_of(self, run_ids: Collection[str]) -> dict[str, list[OperatorOrder]]:
        return queries.orders_of(self._see(lambda pending: pending.orders), run_ids)

    def append(self, events: Sequence[Event]) -> None:
        self._own.events += events

    def events_of(self, run_id: str, kind: str) -> list[Event]:
        connection = self._see(lambda pending: pending.events)
        return [mapping.event_of(row) for row in connection.execute(_EVENTS_OF, {"run": run_id, "kind": kind})]

    def controls(self) -> Controls:
        row = self._see(lambda pending: pending.controls).execute(_CONTROLS).one_or_none()
        return mapping.controls_of(row) if row is not None else Controls()

    def save_controls(self, controls: Controls) -> None:
        self._own.controls = controls

    def keep_playbook(self, name: str, version: str, text: str, at: datetime) -> None:
        if (name, version) not in self._memo.playbooks:
            self._memo.playbooks.add((name, version))
            self._own.playbooks.setdefault((name, version), (text, at))

    def playbook_text(self, name: str, version: str) -> str | None:
        asked = {"name": name, "version": version}
        found: str | None = self._see(lambda pending: pending.playbooks).execute(_PLAYBOOK, asked).scalar()
        return found


def send_shared(connection: sa.Connection, flush: Flush, shared: Pending) -> None:
    """Send what several units have written. Raises Entangled where that is refused."""
    if not shared:
        return
    try:
        flush(connection, shared)
    except Exception as error:
        if database.is_outage(error):
            raise
        raise Entangled from error
    shared.clear()
