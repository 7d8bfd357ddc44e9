"""What the webhook takes for a delivery, and how it refuses what is none."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from tests.support.api_world import alert, payload
from tests.support.clocks import START
from trainmedic_server.domain.alert import AlertStatus, Delivery, fingerprint
from trainmedic_server.errors import PayloadError
from trainmedic_server.server.payload import PROBLEMS_REPORTED, delivery
from trainmedic_server.server.schemas import PAYLOAD_EXAMPLE, AlertmanagerPayload


def read(document: Any) -> Delivery:
    return delivery(document, "d-1", START)


def fields(document: Any) -> list[str]:
    with pytest.raises(PayloadError) as caught:
        read(document)
    assert caught.value.field == caught.value.problems[0][0]
    return [field for field, _ in caught.value.problems]


def test_an_alertmanager_payload_becomes_a_delivery() -> None:
    """Every member that counts is taken over, times in UTC and cut to microseconds."""
    taken = read(payload(alert(startsAt="2026-01-31T13:59:00.123456789+02:00"), truncatedAlerts=3))
    assert (taken.id, taken.received_at, taken.receiver, taken.truncated) == ("d-1", START, "trainmedic", 3)
    (only,) = taken.alerts
    assert only.starts_at == datetime(2026, 1, 31, 11, 59, 0, 123456, tzinfo=UTC)
    assert only.status is AlertStatus.FIRING
    assert only.labels == {"alertname": "GPUHot", "node": "node-1"}
    assert only.fingerprint == "c6eadffa33fcdf37"
    assert only.ends_at is None


def test_a_resolved_alert_keeps_its_end() -> None:
    """`ends_at` is the time of a resolved alert's end; a firing one has none."""
    resolved = read(payload(alert(status="resolved", endsAt="2026-01-31T12:00:00Z"))).alerts[0]
    assert resolved.ends_at == START
    assert read(payload(alert(endsAt="2026-01-31T12:00:00Z"))).alerts[0].ends_at is None


def test_what_hand_made_senders_leave_out_is_tolerated() -> None:
    """Version, and of each alert its status, labels and start, are all that is needed."""
    least = {"version": "4", "alerts": [{"status": "firing", "labels": {"a": "b"}, "startsAt": "2026-01-31T12:00:00Z"}]}
    taken = read(least)
    assert taken.alerts[0].fingerprint == fingerprint({"a": "b"})
    assert (taken.receiver, taken.truncated, dict(taken.alerts[0].annotations)) == ("", 0, {})


@pytest.mark.parametrize("empty", [None, ""])
def test_empty_optional_members_count_as_absent(empty: Any) -> None:
    """null and "" where a sender has nothing to say are not errors."""
    taken = read(payload(alert(endsAt=empty, fingerprint=empty, generatorURL=empty), groupKey=empty))
    assert taken.alerts[0].fingerprint == fingerprint({"alertname": "GPUHot", "node": "node-1"})


def test_unknown_members_are_accepted_everywhere() -> None:
    """Newer Alertmanagers and custom receivers add members, of any kind."""
    extra = {"notification_reason": [1, {"deep": None}], "routeLabels": 7}
    assert len(read(payload(alert(silenceURL=3, values={"B": 1.5}), **extra)).alerts) == 1


@pytest.mark.parametrize(
    ("labels", "expected"),
    [
        ({}, "cbf29ce484222325"),
        ({"node": "node-1", "alertname": "GPUTemperatureHigh"}, "c07df8a7c036d9f8"),
        ({"zone": "日本", "alertname": "é ü", "a": "x"}, "e765efe655ca1b32"),
    ],
)
def test_a_computed_fingerprint_is_the_one_alertmanager_computes(labels: dict[str, str], expected: str) -> None:
    """So that a hand-made alert and Alertmanager's own report of it are the same (values from 0.25)."""
    assert fingerprint(labels) == expected


@pytest.mark.parametrize(
    ("document", "expected"),
    [
        ([], [""]),
        ("text", [""]),
        (None, [""]),
        (payload(version=...), ["version"]),
        (payload(version="1"), ["version"]),
        (payload(version=4), ["version"]),
        (payload(alerts=...), ["alerts"]),
        (payload(alerts={}), ["alerts"]),
        (payload(alerts=[None]), ["alerts.0"]),
        (payload(status="odd"), ["status"]),
        (payload(receiver=5), ["receiver"]),
        (payload(truncatedAlerts=-1), ["truncatedAlerts"]),
        (payload(truncatedAlerts=True), ["truncatedAlerts"]),
        (payload(truncatedAlerts=1 << 40), ["truncatedAlerts"]),
        (payload(alert(status=...)), ["alerts.0.status"]),
        (payload(alert(status=["firing"])), ["alerts.0.status"]),
        (payload(alert(labels=...)), ["alerts.0.labels"]),
        (payload(alert(labels=[])), ["alerts.0.labels"]),
        (payload(alert(labels={"gpu": 0})), ["alerts.0.labels.gpu"]),
        (payload(alert(annotations={"a": None})), ["alerts.0.annotations.a"]),
        (payload(alert(startsAt=...)), ["alerts.0.startsAt"]),
        (payload(alert(startsAt="yesterday")), ["alerts.0.startsAt"]),
        (payload(alert(startsAt="2026-01-31T12:00:00")), ["alerts.0.startsAt"]),
        (payload(alert(startsAt="2026-02-30T12:00:00Z")), ["alerts.0.startsAt"]),
        (payload(alert(startsAt="0001-01-01T00:00:00+02:00")), ["alerts.0.startsAt"]),
        (payload(alert(startsAt=1769860800)), ["alerts.0.startsAt"]),
        (payload(alert(endsAt="later")), ["alerts.0.endsAt"]),
        *((payload(alert(endsAt=wrong)), ["alerts.0.endsAt"]) for wrong in ({}, [], 0, 0.0, False, {"a": 1}, " ")),
        *((payload(alert(fingerprint=wrong)), ["alerts.0.fingerprint"]) for wrong in ({}, [], 0, False)),
        *((payload(alert(generatorURL=wrong)), ["alerts.0.generatorURL"]) for wrong in ({}, [], 0, False)),
        *((payload(alert(annotations=wrong)), ["alerts.0.annotations"]) for wrong in ([], "", 0, False)),
        *((payload(receiver=wrong), ["receiver"]) for wrong in ({}, [], 0, False)),
        *((payload(truncatedAlerts=wrong), ["truncatedAlerts"]) for wrong in ({}, [], "", False, 0.0)),
        *((payload(status=wrong), ["status"]) for wrong in ({}, [], "", 0, False)),
        *((payload(alerts=wrong), ["alerts"]) for wrong in ({}, "", 0, False, None)),
        (payload(alert(labels={f"l{number}": "x" * 60_000 for number in range(3)})), ["alerts.0.labels"]),
        (payload(alert(annotations={f"l{number}": "x" * 60_000 for number in range(3)})), ["alerts.0.annotations"]),
        (payload(alert(fingerprint="f" * 129)), ["alerts.0.fingerprint"]),
        (payload(alert(labels={"a": "x\0y"})), ["alerts.0.labels.a"]),
        (payload(alert(labels={"a\0": "x"})), ["alerts.0.labels.a\0"]),
        (payload(alert(labels={"a": "x" * 65_537})), ["alerts.0.labels.a"]),
        (payload(alert(labels={str(n): "" for n in range(1_001)})), ["alerts.0.labels"]),
        (payload(alert(), alert(status="x", startsAt="y")), ["alerts.1.status", "alerts.1.startsAt"]),
    ],
)
def test_what_is_wrong_is_named_by_its_path(document: Any, expected: list[str]) -> None:
    """Each problem names the member; the first is also the error's field."""
    assert fields(document) == expected


def test_all_problems_are_told_up_to_a_limit() -> None:
    """A hostile body costs neither memory nor time for its millions of problems."""
    assert fields(payload(alert(status=None), version="3")) == ["version", "alerts.0.status"]
    assert len(fields(payload(alerts=[{}] * 100_000))) == PROBLEMS_REPORTED


def test_grafanas_own_webhook_is_told_what_to_do() -> None:
    """Its version "1" is not what this server speaks; the message says how to get there."""
    with pytest.raises(PayloadError, match="send through an Alertmanager"):
        read(payload(version="1"))


# What senders send, and what they never would, at every place of the payload.
_text = st.none() | st.text(max_size=8) | st.integers() | st.sampled_from(["firing", "resolved", "4", "x" * 65_537])
_times = st.sampled_from(
    ["2026-01-31T12:00:00Z", "0001-01-01T00:00:00Z", "2026-01-31T12:00:00.5+01:00", "never", "", 3]
)
_strings = st.none() | st.dictionaries(st.text(max_size=3), st.text(max_size=3) | st.integers(), max_size=3)
_alerts = st.fixed_dictionaries(
    {"status": st.sampled_from(["firing", "resolved"]) | _text, "labels": _strings, "startsAt": _times},
    optional={"annotations": _strings, "endsAt": _times, "fingerprint": _text, "generatorURL": _text},
)
_payloads = st.fixed_dictionaries(
    {"version": st.just("4") | _text, "alerts": st.lists(_alerts, max_size=2)},
    optional={"status": _text, "receiver": _text, "truncatedAlerts": st.none() | st.integers(-1, 1 << 32)},
)


@settings(max_examples=300, deadline=None)
@given(_payloads)
def test_the_documented_schema_takes_exactly_what_the_webhook_takes(document: dict[str, Any]) -> None:
    """The OpenAPI model and the parser are two writings of one contract (NUL is said in words only)."""
    try:
        read(document)
        taken = True
    except PayloadError as error:
        if any("NUL" in message for _, message in error.problems):
            return
        taken = False
    try:
        AlertmanagerPayload.model_validate(document, strict=False)
        documented = True
    except ValidationError:
        documented = False
    assert taken == documented or _is_lax_about_times(document)


def _is_lax_about_times(document: dict[str, Any]) -> bool:
    """The model, being of Python, would also read a number as a time; JSON Schema would not."""
    return any(3 in (entry.get("startsAt"), entry.get("endsAt")) for entry in document["alerts"])


def test_the_documented_example_is_taken() -> None:
    """The example of the OpenAPI document is a payload that works."""
    assert read(PAYLOAD_EXAMPLE).alerts[0].labels["gpu"] == "3"
