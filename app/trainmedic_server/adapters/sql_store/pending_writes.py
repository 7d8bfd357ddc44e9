"""Writes not sent to the database yet, combined for units of work that share a transaction."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from datetime import datetime

import sqlalchemy as sa

from trainmedic_server import errors
from trainmedic_server.adapters.sql_store import mapping, run_facts, schema, statements
from trainmedic_server.adapters.sql_store.bulk import BulkInsert
from trainmedic_server.domain.alert import AlertRecord, Identity
from trainmedic_server.domain.run import Controls, Decision, Event, OperatorOrder, Run, StepState
from trainmedic_server.domain.time_gaps import TimeGap

_CHANGING_COLUMNS = (
    "status",
    "decision",
    "ended_at",
    "acted_at",
    "waiting_on",
    "message",
    "unfinished",
    "batch",
    "also",
)
_COLUMNS_OF_REPORTS = (
    "status", "labels", "annotations", "ends_at", "generator_url", "last_heard_at", "times_heard", "resolved_at",
    "resolved_because", "reactions", "reacted",
)  # fmt: skip
_NEW_DECISIONS = frozenset({Decision.OUTSIDE_WINDOW, Decision.CAPACITY_LIMITED})  # Unknown to earlier releases.


class PendingWrites:
    """A later write replaces an earlier one of the same key; of a playbook's version, the first one stays."""

    def __init__(self) -> None:
        self.clear()

    def clear(self) -> None:
        self.alerts: dict[Identity, AlertRecord] = {}
        self.added: dict[str, Run] = {}
        self.saved: dict[str, Run] = {}
        self.steps: dict[tuple[str, str, int], StepState] = {}  # By run ID, phase and index.
        self.groups: dict[str, tuple[str, ...]] = {}
        self.parents: set[str] = set()  # Parent runs whose `unfinished` must be computed again.
        self.has_new_forms = False  # True if one of the runs cannot be read by earlier releases.
        self.links: dict[tuple[str, Identity], None] = {}  # An ordered set.
        self.orders: list[OperatorOrder] = []
        self.events: list[Event] = []
        self.nodes: dict[str, datetime] = {}
        self.touched: dict[tuple[str, str], datetime] = {}  # By run ID and node.
        self.counts: run_facts.Counts = Counter()
        self.playbooks: dict[tuple[str, str], tuple[str, datetime]] = {}  # Text and time by name and version.
        self.time_gaps: list[TimeGap] = []
        self.controls: Controls | None = None
        self.fingerprints: set[str] = set()  # Of alerts and links: reads of these flush first.
        self.targets: set[tuple[str, str]] = set()  # (playbook, target key) of runs; as `fingerprints`.

    def __bool__(self) -> bool:
        runs = self.added or self.saved or self.steps or self.groups or self.links or self.orders or self.events
        return bool(
            runs or self.alerts or self.nodes or self.touched or self.playbooks or self.controls or self.time_gaps
        )

    def save_alerts(self, records: Iterable[AlertRecord]) -> None:
        for record in records:
            self.alerts[record.alert.identity] = record
            self.fingerprints.add(record.alert.fingerprint)

    def link(self, links: Iterable[tuple[str, Identity]]) -> None:
        for link in links:
            self.links[link] = None
            self.fingerprints.add(link[1].fingerprint)

    def has_run(self, run_id: str) -> bool:
        return run_id in self.saved or run_id in self.added

    def _note_form(self, run: Run) -> None:
        has_jobs = bool(run.also or [step for step in run.steps if step.target])
        self.has_new_forms |= has_jobs or run.is_group or run.decision in _NEW_DECISIONS
        self.has_new_forms |= run.is_limited and bool(run.steps)

    def _note_group(self, run: Run) -> None:
        if run.parent is not None:
            self.parents.add(run.parent)
        elif run.is_group:
            self.parents.add(run.id)

    def add_run(self, run: Run) -> None:
        if run.id in self.added:
            raise errors.Conflict(f"there is a run {run.id} already")
        self.added[run.id] = run
        self._note_form(run)
        self._note_group(run)
        self.targets.add((run.playbook, run.target_key))
        if run.parent is None:  # a group counts once
            run_facts.count_change(self.counts, run, None)
        for step in run.steps:
            self.steps[run.id, step.phase, step.index] = step

    def save_run(self, run: Run, before: Run) -> None:
        (self.added if run.id in self.added else self.saved)[run.id] = run
        self._note_form(run)
        if (run.is_open or run.owes_undo) != (before.is_open or before.owes_undo) or run.is_group:
            self._note_group(run)
        self.targets.add((run.playbook, run.target_key))
        if run.parent is None:
            run_facts.count_change(self.counts, run, before)
        earlier: Mapping[tuple[str, int], StepState] = {step.key: step for step in before.steps}
        for step in run.steps:
            earlier_step = earlier.get(step.key)
            if earlier_step is not step and earlier_step != step:
                self.steps[run.id, step.phase, step.index] = step

    def absorb(self, other: PendingWrites) -> None:
        """Add later writes. Raises Conflict if both add the same run; then nothing is added."""
        if other.added:
            for run_id in other.added.keys() & self.added.keys():
                raise errors.Conflict(f"there is a run {run_id} already")
        self.alerts.update(other.alerts)
        self.added.update(other.added)
        for run_id, run in other.saved.items():
            (self.added if run_id in self.added else self.saved)[run_id] = run
        self.steps.update(other.steps)
        self.groups.update(other.groups)
        self.parents |= other.parents
        self.has_new_forms |= other.has_new_forms
        self.links.update(other.links)
        self.orders += other.orders
        self.events += other.events
        self.nodes.update(other.nodes)
        self.touched.update(other.touched)
        for fact, count in other.counts.items():
            self.counts[fact] += count
        self.playbooks.update({key: kept for key, kept in other.playbooks.items() if key not in self.playbooks})
        self.time_gaps += other.time_gaps
        self.controls = other.controls or self.controls
        self.fingerprints |= other.fingerprints
        self.targets |= other.targets


class Flusher:
    def __init__(self, dialect: sa.Dialect) -> None:
        self._alerts = BulkInsert(dialect, schema.alerts, "update", _COLUMNS_OF_REPORTS)
        self._added = BulkInsert(dialect, schema.runs)
        self._saved = BulkInsert(dialect, schema.runs, "update", _CHANGING_COLUMNS)
        self._steps = BulkInsert(dialect, schema.steps, "update")
        self._groups = BulkInsert(dialect, schema.groups)
        self._links = BulkInsert(dialect, schema.run_alerts, "ignore")
        self._touched = BulkInsert(dialect, schema.touched_nodes, "update")
        self._orders = BulkInsert(dialect, schema.orders)
        self._events = BulkInsert(dialect, schema.events)
        self._counts = BulkInsert(dialect, schema.playbook_days, "add")
        self._nodes = BulkInsert(dialect, schema.nodes, "update")
        self._playbooks = BulkInsert(dialect, schema.playbook_versions, "ignore")
        self._time_gaps = BulkInsert(dialect, schema.time_gaps)
        self._controls = BulkInsert(dialect, schema.controls, "update")

    def __call__(self, connection: sa.Connection, pending: PendingWrites) -> None:
        """Send referenced rows first, and closed runs before new ones: a unique index permits one open run for each
        playbook and target.
        """
        playbooks, steps = pending.playbooks.items(), pending.steps.items()
        self._playbooks.run(connection, ((*key, text, at) for key, (text, at) in playbooks))
        self._alerts.run(connection, map(mapping.alert_row, pending.alerts.values()))
        self._nodes.run(connection, pending.nodes.items())
        self._saved.run(connection, map(mapping.run_row, pending.saved.values()))
        self._added.run(connection, map(mapping.run_row, pending.added.values()))
        for parent in sorted(pending.parents):
            connection.execute(statements.UPDATE_PARENT, {"group": parent})
        self._steps.run(connection, (mapping.step_row(key[0], step) for key, step in steps))
        if pending.has_new_forms:
            connection.execute(statements.REQUIRE_NEWER_READER)
        self._groups.run(connection, ((run_id, list(members)) for run_id, members in pending.groups.items()))
        self._links.run(connection, ((run_id, *identity) for run_id, identity in pending.links))
        self._touched.run(connection, ((*key, at) for key, at in pending.touched.items()))
        self._counts.run(connection, ((*key, count) for key, count in pending.counts.items() if count))
        self._orders.run(connection, map(mapping.order_row, pending.orders))
        self._time_gaps.run(connection, map(mapping.time_gap_row, pending.time_gaps))
        self._controls.run(connection, [mapping.controls_row(pending.controls)] if pending.controls else ())
        self._events.run(connection, map(mapping.event_row, pending.events))
