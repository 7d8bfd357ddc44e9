"""What the engine takes from a malformed report of an alert, and how it is recorded."""

from __future__ import annotations

from collections.abc import Callable

from tests.unit.engine.books import CAP
from tests.unit.engine.world import World
from trainmedic_server.domain.admission import Admission
from trainmedic_server.domain.alert import Alert, AlertStatus, Delivery, Identity, RejectedAlert
from trainmedic_server.domain.run import Event
from trainmedic_server.ports.received_alerts import ReceivedAlertFilter

MakeWorld = Callable[..., World]
PROBLEMS = (("alerts.0.labels.path", "has 70000 characters; at most 65536 are accepted"),)


def malformed(identity: Identity | None = None, status: AlertStatus | None = None, index: int = 0) -> RejectedAlert:
    return RejectedAlert(index, "Hot", PROBLEMS, identity, status)


async def deliver(w: World, *rejected: RejectedAlert, alerts: tuple[Alert, ...] = ()) -> Admission:
    admission = await w.engine.admit(Delivery("d-9", w.clock.now(), "r", "{}", "", alerts, 0, rejected))
    await w.pass_time(0)
    return admission


async def events(w: World, kind: str) -> list[Event]:
    return [event for event in await w.store.events_after(0, 1000) if event.kind == kind]


async def test_the_end_in_a_malformed_report_gives_back_what_was_done(world: MakeWorld) -> None:
    """The run's alert keeps its labels, and the undo is carried out at once."""
    w = world(CAP)
    alert = w.alert(gpu="0", node="n1")
    await w.post(alert)
    admission = await deliver(w, malformed(alert.identity, AlertStatus.RESOLVED), alerts=(w.alert("Cold"),))
    assert (admission.alerts, len(admission.rejected)) == (2, 1)
    [record] = (await w.store.alerts_page(ReceivedAlertFilter(alertname="Hot"), 10, None))[0]
    assert (record.is_resolved, record.resolved_because, dict(record.alert.labels)) == (
        True, "alertmanager", dict(alert.labels),
    )  # fmt: skip
    assert len(w.actions["uncap"].calls) == 1


async def test_a_later_beginning_that_ended_ends_the_earlier_one(world: MakeWorld) -> None:
    """Only one beginning of an alert can fire at a time."""
    w = world(CAP)
    alert = w.alert(gpu="0", node="n1")
    await w.post(alert)
    await w.pass_time(60)
    await deliver(w, malformed(Identity(alert.fingerprint, w.clock.now()), AlertStatus.RESOLVED))
    assert len(w.actions["uncap"].calls) == 1
    assert [event.data["because"] for event in await events(w, "alert_resolved")] == ["superseded"]


async def test_a_malformed_repeat_says_that_the_alert_still_fires(world: MakeWorld) -> None:
    """It is not assumed to have resolved, and nothing else follows."""
    w = world(CAP)
    alert = w.alert(gpu="0", node="n1")
    await w.post(alert)
    await w.pass_time(3600)
    await deliver(w, malformed(alert.identity, AlertStatus.FIRING))
    [record] = (await w.store.alerts_page(ReceivedAlertFilter(), 10, None))[0]
    assert (record.is_resolved, record.count, record.last_heard_at) == (False, 2, w.clock.now())
    assert w.actions["uncap"].calls == []


async def test_a_malformed_report_of_an_unknown_alert_starts_nothing(world: MakeWorld) -> None:
    """Whether it fires or has ended; nothing is kept of it but the event."""
    w = world(CAP)
    unknown = w.alert(gpu="0", node="n1").identity
    await deliver(w, malformed(unknown, AlertStatus.FIRING), malformed(unknown, AlertStatus.RESOLVED), malformed())
    assert (await w.store.alerts_page(ReceivedAlertFilter(), 10, None))[0] == []
    assert w.actions["cap"].calls == []


async def test_each_malformed_alert_is_an_event_of_the_history(world: MakeWorld) -> None:
    """With its reason; of very many the first twenty, and how many more there were. The metric counts all."""
    w = world(CAP)
    identity = w.alert().identity
    await deliver(w, malformed(identity, AlertStatus.FIRING, 4), *(malformed(index=index) for index in range(5, 40)))
    recorded = await events(w, "alert_rejected")
    assert len(recorded) == 21
    assert dict(recorded[0].data) == {
        "alert": "Hot",
        "index": 4,
        "fingerprint": identity.fingerprint,
        "why": "alerts.0.labels.path: has 70000 characters; at most 65536 are accepted",
        "delivery": "d-9",
    }
    assert recorded[-1].data["why"] == "16 more alerts of this delivery are malformed"
    assert w.metrics.registry.get_sample_value("trainmedic_rejected_alerts_total") == 36
