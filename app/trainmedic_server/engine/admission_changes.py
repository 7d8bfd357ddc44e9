"""What an admission has decided, to be written in one transaction; and who starts a run by hand.

Who calls it: ``admission`` makes it, whole, ``intake`` and ``by_hand`` write it, ``service`` does what is to be done
then.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from datetime import datetime

from msgspec import Struct

from trainmedic_server.domain.alert import AlertRecord, Identity
from trainmedic_server.domain.run import Controls, Event, Run
from trainmedic_server.engine.plan_values import Instruction
from trainmedic_server.ports.playbooks import CompiledPlaybook
from trainmedic_server.ports.store import Transaction


class StartedRun(Struct, frozen=True):
    """A run to drive."""

    run: Run
    playbook: CompiledPlaybook
    alert: AlertRecord
    """The one that it was started for."""
    then: Instruction | None = None
    """What to do first, where that is on record with the run's admission."""


class AdmissionChanges(Struct, frozen=True):
    """What is to be written, and, in the last two fields, what is to be done once it is durable."""

    records: Mapping[Identity, AlertRecord]
    runs: Sequence[Run]
    links: Sequence[tuple[str, Identity]]
    events: Sequence[Event]
    nodes: Set[str]
    controls: Controls | None
    """None if they stay."""
    started: Sequence[StartedRun]
    touched: Set[str]
    """The ids of runs whose drivers have to read what has changed."""

    def write(self, tx: Transaction, now: datetime) -> None:
        """Write all but the playbooks' texts."""
        tx.save_alerts(list(self.records.values()))
        tx.add_runs(self.runs)
        tx.link(self.links)
        tx.append(self.events)
        if self.nodes:
            tx.remember_nodes(self.nodes, now)
        if self.controls is not None:
            tx.save_controls(self.controls)


class ByHand(Struct, frozen=True):
    """Who starts a run, and what else is to be on record of that."""

    actor: str
    note: str = ""
    repeats: str | None = None
    """The id of the run that it repeats."""
    key: str | None = None
    """How the client names its request."""
