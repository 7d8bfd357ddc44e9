"""A small world around the real engine: a store in memory, virtual time, and actions that do as told.

The actions stand in for what reaches outside; they model neither a network nor the receivers'
memory of command ids, but record the id of every call so that tests can look at it.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import defaultdict, deque
from collections.abc import Mapping, Sequence
from datetime import datetime, timedelta
from typing import Any, ClassVar

from pydantic import BaseModel, ConfigDict

from tests.unit.engine.books import catalog_of
from trainmedic_core.target import TargetKind
from trainmedic_server import errors, telemetry
from trainmedic_server.adapters.sql_store.in_memory import InMemoryStore
from trainmedic_server.domain import inventory as inventories
from trainmedic_server.domain.admission import Admission
from trainmedic_server.domain.alert import Alert, AlertStatus, Delivery, Identity
from trainmedic_server.domain.playbook import Mode
from trainmedic_server.domain.run import Run
from trainmedic_server.domain.topology import (
    NO_SLURM,
    AgentTopology,
    ClusterTopology,
    JobTopology,
    SlurmTopology,
    Topology,
)
from trainmedic_server.engine.service import Engine
from trainmedic_server.ports.actions import Action, Call, Inverse, Services
from trainmedic_server.ports.alert_map import NO_ALERT_MAP, AlertMap
from trainmedic_server.ports.ending import end_tasks
from trainmedic_server.ports.limits import EngineLimits
from trainmedic_server.ports.store import HistoryFilter
from trainmedic_server.simulation.virtual_time import VirtualClock


class Amount(BaseModel):
    model_config = ConfigDict(extra="forbid")
    amount: float = 1.0


class Scripted:
    """An action whose outcomes a test sets: an output, an error to raise, ``hang``, or ``deaf``, which hangs and loses
    the first cancellation, as redis-py may."""

    name: ClassVar[str]
    summary: ClassVar[str] = "Does as the test says."
    targets: ClassVar[frozenset[TargetKind]] = frozenset(TargetKind)
    harmful: ClassVar[bool] = True
    default_timeout: ClassVar[timedelta] = timedelta(seconds=30)
    Params: ClassVar[type[BaseModel]] = Amount

    def __init__(self, services: Services | None = None) -> None:
        self.calls: list[Call] = []
        self.outcomes: deque[Any] = deque()
        self.settled_ids: list[str] = []
        self.in_flight = 0

    async def perform(self, call: Call) -> Mapping[str, Any]:
        self.calls.append(call)
        outcome = self.outcomes.popleft() if self.outcomes else {"done": True}
        self.in_flight += 1
        try:
            if outcome == "deaf":
                with contextlib.suppress(asyncio.CancelledError):
                    await asyncio.Event().wait()
            if outcome in ("hang", "deaf"):
                await asyncio.Event().wait()
            if isinstance(outcome, timedelta):
                await asyncio.sleep(outcome.total_seconds())
                outcome = {"done": True}
        finally:
            self.in_flight -= 1
        if isinstance(outcome, Exception):
            raise outcome
        return outcome

    def outcome_saved(self, command_id: str) -> None:
        self.settled_ids.append(command_id)

    @classmethod
    def inverse(cls, params: BaseModel, output: Mapping[str, Any] | None) -> Inverse | None:
        return None


class Cap(Scripted):
    name = "test.cap"

    @classmethod
    def inverse(cls, params: BaseModel, output: Mapping[str, Any] | None) -> Inverse | None:
        return Inverse("test.uncap", {"amount": params.model_dump()["amount"]})


class Uncap(Scripted):
    name = "test.uncap"


class Other(Scripted):
    name = "test.other"


class Look(Scripted):
    name = "test.look"
    harmful = False


class Tell(Scripted):
    name = "test.tell"
    harmful = False


class ScriptedActions:
    """`ports.Actions` over the classes above, and `more`."""

    def __init__(self, *more: type[Scripted]) -> None:
        self._instances: dict[str, Scripted] = {kind.name: kind() for kind in (Cap, Uncap, Other, Look, Tell, *more)}

    def names(self) -> Sequence[str]:
        return sorted(self._instances)

    def action_class(self, name: str) -> type[Action] | None:
        found = self._instances.get(name)
        return type(found) if found else None

    def get(self, name: str) -> Action:
        if name not in self._instances:
            raise errors.PermanentFailure(f"no action {name}")
        return self._instances[name]

    def remove(self, name: str) -> Scripted:
        """As if a newer server had it no more."""
        return self._instances.pop(f"test.{name}")

    def add(self, action: Scripted) -> None:
        self._instances[action.name] = action

    def __getitem__(self, name: str) -> Scripted:
        return self._instances[f"test.{name}"]


class Source:
    """`ports.AlertSource` that says what the test sets."""

    def __init__(self) -> None:
        self.firing: set[Identity] = set()
        self.error: Exception | None = None

    async def is_firing(self, identity: Identity) -> bool:
        if self.error:
            raise self.error
        return identity in self.firing

    async def silence(self, matchers: Mapping[str, str], ends_at: datetime, comment: str) -> str:
        raise errors.PermanentFailure("not used here")

    async def expire_silence(self, silence_id: str) -> None:
        raise errors.PermanentFailure("not used here")


class UnsteadyClock(VirtualClock):
    """Virtual time that can be set back, as an operator or NTP does it to a machine's clock."""

    def set_back(self, by: timedelta) -> None:
        self._beginning -= by


def jobs_of(slurm_ids: Mapping[str, str]) -> JobTopology:
    return JobTopology.of({job: {"slurm": {"job_id": each}} for job, each in slurm_ids.items()}, AgentTopology())


class World:
    """One server's engine, which can be killed and started again over the same store."""

    def __init__(
        self,
        *playbooks: str,
        source: Source | None = None,
        inventory: Mapping[str, str] | None = None,
        slurm: SlurmTopology = NO_SLURM,
        store: InMemoryStore | None = None,
        more: Sequence[type[Scripted]] = (),
        **limits: Any,
    ) -> None:
        self.store = store or InMemoryStore()
        self.clock = UnsteadyClock()
        self.actions = ScriptedActions(*more)
        self.metrics = telemetry.Metrics()
        self.limits = _limits(limits)
        self.source = source
        self.inventory = dict(inventory or {})
        self.slurm = slurm
        self.slurm_ids: Mapping[str, str] = {}
        """Of connected jobs, by name."""
        self.catalog = catalog_of(playbooks, self.actions)
        self.alert_map: AlertMap = NO_ALERT_MAP
        self.cluster = ClusterTopology()
        self.agents = AgentTopology()
        self.engine = self._engine()
        self._deliveries = 0

    def _engine(self) -> Engine:
        return Engine(
            self.store,
            self.catalog,
            self.actions,
            self.clock,
            self.limits,
            self.metrics,
            lambda: Topology(
                inventories.parse(self.inventory),
                jobs_of(self.slurm_ids),
                self.agents,
                cluster=self.cluster,
                slurm=self.slurm,
            ),
            self.source,
            alert_map=lambda: self.alert_map,
        )

    async def restart(self, after: float = 0.0, **limits: Any) -> None:
        """Kill the server where it stands, as SIGKILL would, and start another `after` seconds later."""
        await end_tasks(self.engine._workers._tasks.values())
        self.engine._workers._drivers.clear()
        await self.stop_and_start(after, **limits)

    async def stop_and_start(self, after: float = 0.0, **limits: Any) -> None:
        """Stop the server as a signal to end does, and start another `after` seconds later."""
        await self.engine.stop()
        await asyncio.sleep(after)
        if limits:
            self.limits = _limits(limits)
        self.metrics = telemetry.Metrics()
        self.engine = self._engine()
        await self.engine.start()
        await self.pass_time(0)

    async def pass_time(self, seconds: float) -> None:
        await asyncio.sleep(seconds)
        for _ in range(50):
            await asyncio.sleep(0)

    def alert(
        self,
        name: str = "Hot",
        status: str = "firing",
        began_ago: float = 0.0,
        fingerprint: str | None = None,
        **labels: str,
    ) -> Alert:
        labels = {"alertname": name, **labels}
        return Alert(
            fingerprint or "-".join(f"{key}={value}" for key, value in sorted(labels.items())),
            AlertStatus(status),
            labels,
            {},
            self.clock.now() - timedelta(seconds=began_ago),
            self.clock.now() if status == "resolved" else None,
        )

    async def post(self, *alerts: Alert) -> Admission:
        """Deliver the alerts in one delivery, and let the engine work."""
        self._deliveries += 1
        delivery = Delivery(f"delivery-{self._deliveries}", self.clock.now(), "trainmedic", "{}", "", tuple(alerts))
        admission = await self.engine.admit(delivery)
        await self.pass_time(0)
        return admission

    async def resolve(self, alert: Alert) -> Admission:
        return await self.post(
            Alert(
                alert.fingerprint,
                AlertStatus.RESOLVED,
                alert.labels,
                alert.annotations,
                alert.starts_at,
                self.clock.now(),
            )
        )

    async def runs(self) -> list[Run]:
        """Every item of the history, oldest first."""
        page, _ = await self.store.page(HistoryFilter(), 1000, None)
        return list(reversed(page))

    async def run(self, run_id: str | None = None) -> Run:
        runs = await self.runs()
        if run_id is None:
            assert len(runs) == 1, runs
            return runs[0]
        return next(run for run in runs if run.id == run_id)

    async def story(self, run_id: str | None = None) -> list[str]:
        """The kinds of the run's events, in order."""
        run = await self.run(run_id)
        record = await self.store.record(run.id)
        assert record is not None
        return [event.kind for event in record.events]

    def calls(self) -> dict[str, int]:
        counts: dict[str, int] = defaultdict(int)
        for name in self.actions.names():
            if name.startswith("test."):
                counts[name.removeprefix("test.")] = len(self.actions[name.removeprefix("test.")].calls)
        return {name: count for name, count in counts.items() if count}


def _limits(given: Mapping[str, Any]) -> EngineLimits:
    return EngineLimits(**{**given, "mode": Mode(given.get("mode", Mode.ENFORCE))})
