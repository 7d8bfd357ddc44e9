"""Changes decided by an admission, written in one transaction."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence, Set
from datetime import datetime

from msgspec import Struct

from trainmedic_server.domain import event_kinds as kinds
from trainmedic_server.domain.alert import AlertRecord, Delivery, Identity
from trainmedic_server.domain.event_codec import recorded
from trainmedic_server.domain.run import Controls, Event, Run
from trainmedic_server.engine.plan_values import Instruction, OutsideState
from trainmedic_server.ports.playbooks import CompiledPlaybook
from trainmedic_server.ports.store import Transaction

_REJECTED_IN_HISTORY = 20  # events per delivery


class StartedRun(Struct, frozen=True):
    run: Run
    playbook: CompiledPlaybook
    alert: AlertRecord
    then: Instruction | None = None  # first plan's instruction; None if the driver plans


class AdmissionChanges(Struct, frozen=True):
    """``started`` and ``touched`` are handled once the changes are durable."""

    records: Mapping[Identity, AlertRecord]
    runs: Sequence[Run]
    links: Sequence[tuple[str, Identity]]  # run ID and alert
    events: Sequence[Event]
    nodes: Set[str]  # known from now on
    controls: Controls | None  # None if unchanged
    started: Sequence[StartedRun]
    touched: Set[str]  # IDs of runs whose alerts changed
    frozen: Mapping[str, Sequence[str]] = {}  # target keys of a new group's members, by run ID
    outside: OutsideState | None = None  # the parent's, for started members

    def write(self, tx: Transaction, now: datetime) -> None:
        tx.save_alerts(list(self.records.values()))
        tx.add_runs(self.runs)
        for run_id, members in self.frozen.items():
            tx.add_group_list(run_id, members)
        tx.link(self.links)
        tx.append(self.events)
        if self.nodes:
            tx.remember_nodes(self.nodes, now)
        if self.controls is not None:
            tx.save_controls(self.controls)


class ByHand(Struct, frozen=True):
    actor: str  # operator who starts a run
    note: str = ""
    repeats: str | None = None  # ID of the retried run
    key: str | None = None  # idempotency key
    digest: str | None = None  # of the start that the key names
    groups: frozenset[str] = frozenset()  # the actor's; not recorded


def events_of_rejected(delivery: Delivery, now: datetime) -> Iterator[Event]:
    """Yield events of a delivery's first malformed alerts, and the number of others."""
    for rejected in delivery.rejected[:_REJECTED_IN_HISTORY]:
        fingerprint = rejected.identity.fingerprint if rejected.identity is not None else None
        content = kinds.AlertRejected(
            alert=rejected.name,
            index=rejected.index,
            why=rejected.reason,
            fingerprint=fingerprint,
            delivery=delivery.id,
        )
        yield recorded(content, now)
    if (others := len(delivery.rejected) - _REJECTED_IN_HISTORY) > 0:
        why = f"{others} more alerts of this delivery are malformed"
        yield recorded(kinds.AlertRejected(why=why, delivery=delivery.id), now)
