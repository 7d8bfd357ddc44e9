"""The data of the run store in memory, and the transaction on it. Who calls it: ``memory_store``.

A unit of work changes the tables at once and journals what was there before, so that it can be taken back.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from datetime import datetime
from typing import Any

from trainmedic_server import errors
from trainmedic_server.domain.alert import AlertRecord, Identity
from trainmedic_server.domain.run import Controls, Decision, Event, OperatorOrder, Run, Status
from trainmedic_server.ports.store import GuardFacts, LinkedRun, Transaction

_ABSENT: Any = object()


class MemoryTables:
    """The data, and the journal by which the present unit can be taken back.

    Where the values of a dictionary are None it stands for a set that keeps its order.
    """

    def __init__(self) -> None:
        self.alerts: dict[Identity, AlertRecord] = {}
        self.firing: dict[str, dict[Identity, None]] = defaultdict(dict)
        """By fingerprint."""
        self.runs: dict[str, Run] = {}
        self.by_playbook: dict[str, dict[str, None]] = defaultdict(dict)
        """Run ids."""
        self.open: dict[tuple[str, str], str] = {}
        """The id of the open run by playbook and target key."""
        self.unfinished: dict[str, None] = {}
        """Ids of the runs that are open or owe an undo."""
        self.alerts_of_run: dict[str, dict[Identity, None]] = defaultdict(dict)
        self.runs_of_alert: dict[Identity, dict[str, None]] = defaultdict(dict)
        self.commands: dict[str, str] = {}
        """Run ids by the id of a command."""
        self.orders: dict[str, dict[str, OperatorOrder]] = defaultdict(dict)
        """By run id and order id."""
        self.events: list[Event] = []
        self.last_seq = 0
        self.controls: dict[None, Controls] = {}
        """One entry at most; a dictionary, so that the journal can take it back like the rest."""
        self.nodes: dict[str, datetime] = {}
        """When each was last seen."""
        self.playbooks: dict[tuple[str, str], str] = {}
        """Texts by name and version."""
        self.journal: list[tuple[Any, Any, Any]] = []
        """Table, key and the value from before; for events, the list, its length and the last ``seq``."""
        self.new_links: list[tuple[str, Identity]] = []
        """What the present unit has tied."""
        self._sorted: list[Run] | None = None

    def begin(self) -> None:
        self.journal.clear()
        self.new_links.clear()

    def put(self, table: dict[Any, Any], key: Any, value: Any) -> None:
        self.journal.append((table, key, table.get(key, _ABSENT)))
        table[key] = value

    def drop(self, table: dict[Any, Any], key: Any) -> None:
        if key in table:
            self.journal.append((table, key, table.pop(key)))

    def put_run(self, run: Run) -> None:
        """Keep `run`, and what is looked up by its state."""
        kept = self.runs.get(run.id)
        self.put(self.runs, run.id, run)
        self.put(self.by_playbook[run.playbook], run.id, None)
        self._sorted = None
        key = (run.playbook, run.target_key)
        if run.is_open:
            if self.open.get(key, run.id) != run.id:
                raise errors.Conflict(f"a run of {run.playbook} for {key[1]} is open already")
            self.put(self.open, key, run.id)
        elif self.open.get(key) == run.id:
            self.drop(self.open, key)
        if run.is_open or run.owes_undo:
            self.put(self.unfinished, run.id, None)
        else:
            self.drop(self.unfinished, run.id)
        for command in _commands(kept) - _commands(run) if kept else ():
            self.drop(self.commands, command)
        for command in _commands(run):
            self.put(self.commands, command, run.id)

    def append(self, events: Sequence[Event]) -> None:
        self.journal.append((self.events, len(self.events), self.last_seq))
        for event in events:
            self.last_seq += 1
            self.events.append(replace(event, seq=self.last_seq))

    def roll_back(self) -> None:
        for table, key, before in reversed(self.journal):
            if table is self.events:
                del self.events[key:]
                self.last_seq = before
            elif before is _ABSENT:
                table.pop(key, None)
            else:
                table[key] = before
        self.journal.clear()
        self._sorted = None

    def check_links(self) -> None:
        """What was tied must exist once the unit is done, as a database's foreign keys see to."""
        for run_id, identity in self.new_links:
            if run_id not in self.runs or identity not in self.alerts:
                raise errors.Conflict(f"run {run_id} cannot be tied to alert {identity.fingerprint}: one is not kept")

    def newest_first(self) -> list[Run]:
        if self._sorted is None:
            self._sorted = sorted(self.runs.values(), key=lambda run: (run.created_at, run.id), reverse=True)
        return self._sorted

    def prune(self, older_than: datetime) -> int:
        old = [run for run in self.runs.values() if run.created_at < older_than and run.id not in self.unfinished]
        for run in old:
            del self.runs[run.id], self.by_playbook[run.playbook][run.id]
            self.orders.pop(run.id, None)
            for identity in self.alerts_of_run.pop(run.id, ()):
                self.runs_of_alert[identity].pop(run.id, None)
            for command in _commands(run):
                self.commands.pop(command, None)
        gone = {run.id for run in old}
        self.events = [
            event
            for event in self.events
            if event.run_id not in gone and (event.run_id is not None or event.at >= older_than)
        ]
        for identity, record in list(self.alerts.items()):
            if record.last_heard_at < older_than and not self.runs_of_alert.get(identity):
                del self.alerts[identity]
                self.firing[identity.fingerprint].pop(identity, None)
        self.nodes = {node: at for node, at in self.nodes.items() if at >= older_than}
        self._sorted = None
        return len(old)


class MemoryTransaction(Transaction):
    """`ports.Transaction` on the tables."""

    def __init__(self, tables: MemoryTables) -> None:
        self._tables = tables

    def alerts(self, identities: Collection[Identity]) -> dict[Identity, AlertRecord]:
        kept = self._tables.alerts
        return {identity: kept[identity] for identity in identities if identity in kept}

    def firing_with(self, fingerprints: Collection[str]) -> list[AlertRecord]:
        tables = self._tables
        return [
            tables.alerts[identity]
            for fingerprint in dict.fromkeys(fingerprints)
            for identity in sorted(tables.firing.get(fingerprint, ()))
        ]

    def save_alerts(self, records: Sequence[AlertRecord]) -> None:
        tables = self._tables
        for record in records:
            identity = record.identity
            tables.put(tables.alerts, identity, record)
            if record.is_resolved:
                tables.drop(tables.firing[identity.fingerprint], identity)
            else:
                tables.put(tables.firing[identity.fingerprint], identity, None)

    def firing_not_heard_since(self, moment: datetime) -> list[AlertRecord]:
        tables = self._tables
        tied = {identity for run_id in tables.unfinished for identity in tables.alerts_of_run.get(run_id, ())}
        silent = [tables.alerts[identity] for identity in tied]
        silent = [record for record in silent if not record.is_resolved and record.last_heard_at < moment]
        return sorted(silent, key=lambda record: (record.last_heard_at, record.identity))

    def linked_runs(self, identities: Collection[Identity]) -> dict[Identity, list[LinkedRun]]:
        tables = self._tables
        linked: dict[Identity, list[LinkedRun]] = {}
        for identity in identities:
            runs = [tables.runs[run_id] for run_id in tables.runs_of_alert.get(identity, ()) if run_id in tables.runs]
            if runs:
                linked[identity] = [
                    LinkedRun(run.id, run.playbook, run.target_key, run.status.value, run.decision.value)
                    for run in runs
                ]
        return linked

    def open_runs_for(self, keys: Collection[tuple[str, str]]) -> dict[tuple[str, str], str]:
        return {key: self._tables.open[key] for key in keys if key in self._tables.open}

    def guard_facts(
        self, keys: Collection[tuple[str, str]], started_since: Mapping[str, datetime]
    ) -> dict[tuple[str, str], GuardFacts]:
        facts: dict[tuple[str, str], GuardFacts] = {}
        for playbook in {playbook for playbook, _ in keys}:
            runs = [self._tables.runs[run_id] for run_id in self._tables.by_playbook.get(playbook, ())]
            runs = [run for run in runs if run.status is not Status.NOT_STARTED]
            since = started_since.get(playbook)
            started = sum(run.created_at > since for run in runs) if since is not None else 0
            open_runs = sum(run.is_open for run in runs)
            ended: dict[str, datetime] = {}
            for run in runs:
                if run.ended_at is not None:
                    ended[run.target_key] = max(run.ended_at, ended.get(run.target_key, run.ended_at))
            for key in keys:
                if key[0] == playbook:
                    facts[key] = GuardFacts(ended.get(key[1]), started, open_runs)
        return facts

    def nodes_acted_on(self, since: datetime) -> set[str]:
        return {
            run.target.node
            for run in self._tables.runs.values()
            if run.decision is Decision.STARTED and run.created_at > since and run.target and run.target.node
        }

    def known_nodes(self) -> set[str]:
        return set(self._tables.nodes)

    def note_nodes(self, nodes: Collection[str], at: datetime) -> None:
        for node in nodes:
            self._tables.put(self._tables.nodes, node, max(at, self._tables.nodes.get(node, at)))

    def add_runs(self, runs: Sequence[Run]) -> None:
        for run in runs:
            if run.id in self._tables.runs:
                raise errors.Conflict(f"there is a run {run.id} already")
            self._tables.put_run(run)

    def save_runs(self, changes: Sequence[tuple[Run, Run | None]]) -> None:
        for run, _ in changes:
            self._tables.put_run(run)

    def link(self, links: Iterable[tuple[str, Identity]]) -> None:
        tables = self._tables
        for run_id, identity in links:
            tables.new_links.append((run_id, identity))
            if identity not in tables.alerts_of_run[run_id]:
                tables.put(tables.alerts_of_run[run_id], identity, None)
                tables.put(tables.runs_of_alert[identity], run_id, None)

    def run(self, run_id: str) -> Run | None:
        return self._tables.runs.get(run_id)

    def runs(self, run_ids: Collection[str]) -> list[Run]:
        kept = self._tables.runs
        return _oldest_first(kept[run_id] for run_id in set(run_ids) if run_id in kept)

    def alerts_of(self, run_ids: Collection[str]) -> dict[str, list[AlertRecord]]:
        tables = self._tables
        return {
            run_id: [tables.alerts[identity] for identity in tables.alerts_of_run[run_id]]
            for run_id in run_ids
            if tables.alerts_of_run.get(run_id)
        }

    def alert_counts(self, run_ids: Collection[str]) -> dict[str, int]:
        tied = self._tables.alerts_of_run
        return {run_id: len(tied[run_id]) for run_id in run_ids if tied.get(run_id)}

    def unfinished(self) -> list[Run]:
        return _oldest_first(self._tables.runs[run_id] for run_id in self._tables.unfinished)

    def runs_in_effect(self, actions: Collection[str]) -> list[str]:
        tables = self._tables
        firing = (identity for identities in tables.firing.values() for identity in identities)
        run_ids = {*tables.unfinished, *(run_id for alert in firing for run_id in tables.runs_of_alert.get(alert, ()))}
        runs = self.runs(run_ids)
        return [run.id for run in runs if any(step.action in actions and step.attempts for step in run.steps)]

    def run_of_command(self, command_id: str) -> str | None:
        return self._tables.commands.get(command_id)

    def add_order(self, order: OperatorOrder) -> None:
        tables = self._tables
        if order.run_id not in tables.runs:
            raise errors.Conflict(f"there is no run {order.run_id} to give an order to")
        if order.id in tables.orders[order.run_id]:
            raise errors.Conflict(f"there is an order {order.id} already")
        tables.put(tables.orders[order.run_id], order.id, order)

    def orders_of(self, run_ids: Collection[str]) -> dict[str, list[OperatorOrder]]:
        orders = self._tables.orders
        return {run_id: list(orders[run_id].values()) for run_id in run_ids if orders.get(run_id)}

    def append(self, events: Sequence[Event]) -> None:
        self._tables.append(events)

    def events_of(self, run_id: str, kind: str) -> list[Event]:
        return [event for event in self._tables.events if (event.run_id, event.kind) == (run_id, kind)]

    def controls(self) -> Controls:
        return self._tables.controls.get(None, Controls())

    def save_controls(self, controls: Controls) -> None:
        self._tables.put(self._tables.controls, None, controls)

    def keep_playbook(self, name: str, version: str, text: str, at: datetime) -> None:
        if (name, version) not in self._tables.playbooks:
            self._tables.put(self._tables.playbooks, (name, version), text)

    def playbook_text(self, name: str, version: str) -> str | None:
        return self._tables.playbooks.get((name, version))


def _oldest_first(runs: Iterable[Run]) -> list[Run]:
    return sorted(runs, key=lambda run: (run.created_at, run.id))


def _commands(run: Run) -> set[str]:
    """The command ids by which a reply finds the run: of the last attempt of each step and each undo."""
    duties = [attempts for step in run.steps for attempts in (step.attempts, step.undo_attempts)]
    return {attempts[-1].command_id for attempts in duties if attempts}
