"""Runs that begin with the end of another run.

The end is a history event, so it is found again after a kill; its stand-in alert counts once.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence

from trainmedic.wire.envelope import new_id
from trainmedic_server.domain import beginnings
from trainmedic_server.domain.alert import Alert, Delivery
from trainmedic_server.domain.event_codec import names
from trainmedic_server.domain.event_kinds import Closed
from trainmedic_server.domain.run import Event, Run
from trainmedic_server.ports.outside import Clock
from trainmedic_server.ports.playbooks import Catalog
from trainmedic_server.ports.store import RunStore, Transaction


class RunEnds:
    name = "run_ends"
    kinds = names(Closed)
    at_once = 100

    def __init__(
        self, store: RunStore, catalog: Catalog, admit: Callable[[Delivery], Awaitable[object]], clock: Clock
    ) -> None:
        self._store = store
        self._catalog = catalog
        self._admit = admit
        self._clock = clock

    async def take(self, events: Sequence[Event]) -> None:
        """Raises Saturated, StoreUnavailable."""
        awaited = self._awaited()
        ids = [event.run_id for event in events if event.run_id is not None] if awaited else []
        if not ids:
            return

        def ends(tx: Transaction) -> list[Alert]:
            runs = [run for run in tx.runs(ids) if run.parent is None and (run.playbook, str(run.status)) in awaited]
            return [beginnings.of_ended_run(run, _cause(tx, run)) for run in runs]

        alerts = await self._store.transact(ends)
        if alerts:
            await self._admit(Delivery(new_id(), self._clock.now(), self.name, "", "", tuple(alerts)))

    def _awaited(self) -> set[tuple[str, str]]:
        triggers = (playbook.definition.on.run for playbook in self._catalog.all())
        return {
            (playbook, status)
            for trigger in triggers
            if trigger is not None
            for playbook in trigger.playbook
            for status in trigger.status
        }


def _cause(tx: Transaction, run: Run) -> Alert | None:  # for the length of a chain of runs
    record = tx.alerts([run.alert]).get(run.alert)
    return record.alert if record is not None else None
