"""Histories that the real engine leaves in virtual time, as the API shows them, for tests of the replay."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from datetime import datetime, timedelta
from typing import Any

from msgspec import Struct

from tests.unit.simulation.actions import SimulatedActions
from trainmedic_core.fingerprint import fingerprint
from trainmedic_server import telemetry
from trainmedic_server.adapters.sql_store.in_memory import InMemoryStore
from trainmedic_server.api import alert_list, views
from trainmedic_server.catalog import loader
from trainmedic_server.catalog.library import StaticCatalog
from trainmedic_server.domain.alert import Alert, AlertStatus, Delivery
from trainmedic_server.domain.playbook import Mode
from trainmedic_server.domain.topology import Topology
from trainmedic_server.engine.service import Engine
from trainmedic_server.ports.limits import EngineLimits
from trainmedic_server.ports.received_alerts import ReceivedAlertFilter
from trainmedic_server.ports.store import HistoryFilter
from trainmedic_server.simulation import recorded, virtual_time
from trainmedic_server.simulation.recorded import Recorded
from trainmedic_server.simulation.replay import Replay, ReplaySettings
from trainmedic_server.simulation.replay_result import ReplayResult
from trainmedic_server.simulation.replay_spool import ReplaySpool
from trainmedic_server.simulation.scripted import Script, ScriptedActions
from trainmedic_server.simulation.suite_format import ReplyModel, ReplyOutcome
from trainmedic_server.simulation.virtual_time import BEGINNING, VirtualClock

_AFTERWARDS = timedelta(hours=2)


class Told(Struct, frozen=True):
    """One report of an alert. Times in seconds since the beginning."""

    at: float
    labels: Mapping[str, str]
    starts_at: float
    status: AlertStatus = AlertStatus.FIRING

    def alert(self) -> Alert:
        ends_at = moment(self.at) if self.status is AlertStatus.RESOLVED else None
        return Alert(fingerprint(self.labels), self.status, self.labels, {}, moment(self.starts_at), ends_at)


def moment(seconds: float) -> datetime:
    return BEGINNING + timedelta(seconds=seconds)


def catalog_of(*texts: str) -> StaticCatalog:
    actions = SimulatedActions()
    return StaticCatalog([loader.load_one(text, "test.yaml", actions) for text in texts], actions)


def reports(seed: int, count: int, *, repeat: bool) -> list[Told]:
    """Alerts on 4 nodes and 3 jobs within an hour. None has the fingerprint or a report's time of another."""
    chance = random.Random(seed)
    seconds = chance.sample(range(1, 3600), count)
    told: list[Told] = []
    for number, at in enumerate(seconds):
        is_hot = chance.random() < 0.7
        labels = {"alertname": "Hot", "node": f"n{chance.randrange(4)}"} if is_hot else {"alertname": "Slow"}
        labels |= {"number": str(number)} | ({} if is_hot else {"job_name": f"llm-{chance.randrange(3)}"})
        end = at + chance.randrange(5, 900) + 0.25
        told.append(Told(at, labels, at))
        again = at + 61.5
        while repeat and again < end:
            told.append(Told(again, labels, at))
            again += chance.choice((61.5, 122.5, 303.5))
        told.append(Told(end, labels, at, AlertStatus.RESOLVED))
    return sorted(told, key=lambda each: each.at)


def replies(seed: int) -> dict[str, list[ReplyModel]]:
    """Attempts that take up to two minutes, of which a fifth fails."""
    chance = random.Random(seed)
    outcomes = [ReplyOutcome.APPLIED] * 4 + [ReplyOutcome.FAILED]
    return {
        name: [
            ReplyModel(outcome=chance.choice(outcomes), after=timedelta(seconds=chance.randrange(120) + 0.37))
            for _ in range(200)
        ]
        for name in ("test.cap", "test.uncap", "test.tell")
    }


def played(
    catalog: StaticCatalog,
    told: Sequence[Told],
    script: Mapping[str, Sequence[ReplyModel]] = {},
    mode: Mode = Mode.ENFORCE,
) -> list[Recorded]:
    """Return what the history holds after the real engine has received these reports."""
    return virtual_time.run(_play(catalog, told, script, mode))


async def _play(
    catalog: StaticCatalog, told: Sequence[Told], script: Mapping[str, Sequence[ReplyModel]], mode: Mode
) -> list[Recorded]:
    store, clock = InMemoryStore(), VirtualClock()
    actions = ScriptedActions(SimulatedActions(), Script(script), store, clock)
    limits, metrics = EngineLimits(mode=mode), telemetry.Metrics()
    engine = Engine(store, catalog, actions, clock, limits, metrics, Topology)
    await engine.start()
    for number, each in enumerate(told):
        await clock.sleep_until(moment(each.at))
        await engine.admit(Delivery(f"delivery-{number}", clock.now(), "", "", "", (each.alert(),)))
    await clock.sleep_until(clock.now() + _AFTERWARDS)
    heard, _ = await store.alerts_page(ReceivedAlertFilter(), 1000, None)
    runs, _ = await store.page(HistoryFilter(), 1000, None)
    await engine.stop()
    items: list[Any] = [*(alert_list.view(each, {}) for each in heard), *map(views.item, runs)]
    return [recorded.of_item(item.model_dump(mode="json")) for item in items]


def replayed(
    catalog: StaticCatalog, items: Sequence[Recorded], mode: Mode = Mode.ENFORCE, **settings: Any
) -> ReplayResult:
    with ReplaySpool() as spool:
        every = ReplaySettings(EngineLimits(mode=mode), settings.pop("topology", Topology()), **settings)
        replay = Replay(catalog, SimulatedActions(), every, spool)
        for item in items:
            replay.take(item)
        return replay.result()
