"""Alerts that come by the webhook and say to be Trainmedic's own: of a finding, or of a verdict."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from datetime import timedelta
from typing import Any

from msgspec.structs import replace

from tests.support.api_world import World
from tests.support.clocks import START
from tests.support.findings import of_training
from tests.unit.engine.finding_world import FindingWorld
from trainmedic_core.fingerprint import fingerprint
from trainmedic_logs.domain.known_verdict import KnownVerdict
from trainmedic_server.adapters.sql_store.in_memory import InMemoryStore
from trainmedic_server.api.own_alerts import OwnAlerts
from trainmedic_server.domain.alert import Alert, AlertStatus, Delivery
from trainmedic_server.engine import verdict_alert
from trainmedic_server.engine.runbooks import Runbooks

PLAIN = {"cause": "gpu", "confidence": "high", "node": "node-2", "ranks": [9], "advice": "isolate_node"}
LABELS = verdict_alert.labels_of("llm-1", PLAIN)
VERDICT = KnownVerdict("v1", "llm-1", 1, START, START, "gpu", "high", "node-2", "gpu:xid", PLAIN, LABELS)


def posted(labels: Mapping[str, str], annotations: Mapping[str, str] = {}) -> Alert:
    return Alert(fingerprint(labels), AlertStatus.FIRING, dict(labels), dict(annotations), START)


async def checked(store: InMemoryStore, *alerts: Alert) -> tuple[Alert, ...]:
    delivery = Delivery("d", START + timedelta(minutes=1), "r", "", "", alerts)
    return (await OwnAlerts(store, store).checked(delivery)).alerts


async def keep(store: InMemoryStore, verdict: KnownVerdict) -> None:
    await store.transact(lambda tx: tx.verdicts.save([verdict]))


async def test_the_alert_of_a_verdict_that_comes_back_is_own_and_says_what_the_verdict_says() -> None:
    """Whatever was put beside its labels on the way: ranks and advice are the verdict's."""
    store = InMemoryStore()
    await store.transact(lambda tx: tx.verdicts.save([VERDICT]))
    (alert,) = await checked(store, posted(LABELS, {"ranks": "0, 1", "advice": "restart"}))
    assert dict(alert.labels) == LABELS
    verdict = verdict_alert.verdict_of(alert)
    assert verdict is not None
    assert (verdict.ranks, verdict.advice, alert.annotations["verdict"]) == ((9,), "isolate_node", "v1")


async def test_the_alert_of_a_verdict_comes_back_with_its_link() -> None:
    """The server's own, whatever link was put there on the way."""
    store = InMemoryStore()
    await keep(store, VERDICT)
    alert = posted(LABELS, {"runbook_url": "https://evil.example"})
    own = OwnAlerts(store, store, Runbooks("https://git.example.org/on-call.md"))
    (back,) = (await own.checked(Delivery("d", START + timedelta(minutes=1), "r", "", "", (alert,)))).alerts
    assert back.annotations["runbook_url"] == "https://git.example.org/on-call.md#trainingfailed"


async def test_a_posted_alert_that_no_verdict_raised_is_not_own() -> None:
    """By another node, another job, or nothing at all: its label is renamed, and no playbook takes it for a verdict."""
    store = InMemoryStore()
    await store.transact(lambda tx: tx.verdicts.save([VERDICT, replace(VERDICT, id="v2", labels=None)]))
    forged = [{**LABELS, "node": "node-3"}, {**LABELS, "job_name": "llm-2"}, {"alertname": "X", "source": "diagnosis"}]
    for alert, before in zip(await checked(store, *map(posted, forged)), forged, strict=True):
        assert "source" not in alert.labels
        assert alert.labels["exported_source"] == "diagnosis"
        assert verdict_alert.verdict_of(alert) is None
        assert alert.fingerprint == fingerprint(before)


async def test_a_suspect_node_is_own_where_the_verdicts_of_three_jobs_name_it() -> None:
    """Of 30 days, and with the labels that the server gives it and no other."""
    store = InMemoryStore()
    for number in range(3):
        labels = verdict_alert.labels_of_suspect("node-2")
        forged = [{**labels, "severity": "critical"}, verdict_alert.labels_of_suspect("node-3")]
        alerts = await checked(store, posted(labels), *map(posted, forged))
        assert ["source" in alert.labels for alert in alerts] == [False, False, False], number
        await keep(store, replace(VERDICT, id=f"v{number}", job=f"llm-{number}"))
    own, *others = await checked(store, posted(labels), *map(posted, forged))
    assert own.labels["source"] == "diagnosis"
    assert not any("source" in alert.labels for alert in others)


async def test_the_alert_of_a_finding_is_own_by_all_its_labels() -> None:
    """Those of others pass as they are, such as one with a source of its own."""
    world = await FindingWorld.begun()
    await world.tell(of_training("cuda-oom", "node-1", "llm-1", 0, world.clock.now()))
    (alert,) = world.taker.told
    # Another one with this fingerprint could be made: the fingerprint that is posted counts for nothing.
    forged = replace(posted({**alert.labels, "node": "node-9"}), fingerprint=alert.fingerprint)
    other = posted({"alertname": "X", "source": "vmalert"})
    assert [dict(each.labels) for each in await checked(world.store, alert, forged, other)] == [
        dict(alert.labels),
        {**{name: value for name, value in forged.labels.items() if name != "source"}, "exported_source": "log"},
        {"alertname": "X", "source": "vmalert"},
    ]


class CountedLabels(dict[str, str]):
    """Labels that count how often they are compared."""

    compared = 0

    def items(self) -> Any:
        CountedLabels.compared += 1
        return super().items()


class Stored:
    """What is stored, without a database."""

    def __init__(self, raised: Sequence[Alert], verdicts: Sequence[KnownVerdict]) -> None:
        CountedLabels.compared, self.jobs, self._raised, self._verdicts = 0, list[str](), raised, verdicts

    async def alerts_raised(self, fingerprints: Collection[str]) -> list[Mapping[str, str]]:
        return [CountedLabels(alert.labels) for alert in self._raised]

    async def verdicts_of(self, job: str, limit: int, attempt: int | None = None) -> list[KnownVerdict]:
        self.jobs.append(job)
        return list(self._verdicts)


async def test_many_alerts_of_findings_are_checked_at_the_cost_of_each() -> None:
    """Without a look at any verdict, and with each alert's labels compared once."""
    alerts = [posted({"alertname": "A", "source": "log", "job_name": f"llm-{number}"}) for number in range(100)]
    stored: Any = Stored(alerts, ())
    delivery = Delivery("d", START, "r", "", "", tuple(alerts))
    assert (await OwnAlerts(stored, stored).checked(delivery)).alerts == tuple(alerts)
    assert (CountedLabels.compared, stored.jobs) == (100, [])


async def test_many_alerts_of_a_jobs_verdicts_are_checked_at_the_cost_of_each() -> None:
    """The newest verdict of those with an alert's labels states it."""
    verdicts = [
        replace(VERDICT, id=f"v{number}", labels=CountedLabels({**LABELS, "node": f"node-{number % 40}"}))
        for number in range(50)
    ]
    stored: Any = Stored((), verdicts)
    alerts = [posted({**LABELS, "node": f"node-{number}"}) for number in range(45)]
    delivery = Delivery("d", START, "r", "", "", tuple(alerts))
    checked_alerts = (await OwnAlerts(stored, stored).checked(delivery)).alerts
    assert [alert.annotations.get("verdict") for alert in checked_alerts] == [f"v{n}" for n in range(40)] + [None] * 5
    assert (CountedLabels.compared, stored.jobs) == (50, ["llm-1"])


async def test_what_the_webhook_takes_was_checked() -> None:
    """Over HTTP, as an Alertmanager posts it."""
    world = World()
    entry: dict[str, Any] = {"status": "firing", "labels": LABELS, "annotations": {}, "startsAt": START.isoformat()}
    body = {"version": "4", "status": "firing", "receiver": "r", "groupKey": "g", "alerts": [entry]}
    async with world.client() as client:
        assert (await client.post("/webhook", json=body)).status_code == 200
        await world.findings.transact(lambda tx: tx.verdicts.save([VERDICT]))
        assert (await client.post("/webhook", json=body)).status_code == 200
    first, second = world.engine.deliveries
    assert first.alerts[0].labels.get("source") is None
    assert second.alerts[0].labels["source"] == "diagnosis"
