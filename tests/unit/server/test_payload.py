"""What the webhook takes for a delivery, and how it refuses what is none."""

from __future__ import annotations

import json
from datetime import UTC, datetime
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from tests.support.api_world import alert, payload
from tests.support.clocks import START
from trainmedic_core.fingerprint import fingerprint
from trainmedic_server.api import usual_payload
from trainmedic_server.api.payload import PROBLEMS_REPORTED, delivery, with_genuine_fingerprints
from trainmedic_server.api.schemas import PAYLOAD_EXAMPLE, AlertmanagerPayload
from trainmedic_server.domain.alert import AlertStatus, Delivery
from trainmedic_server.errors import PayloadError


def read(document: Any) -> Delivery:
    """The fast parser must take nothing that the careful one refuses, and the rest as that does."""
    usual = usual_payload.read(json.dumps(document).encode(), "d-1", START)
    try:
        taken = delivery(document, "d-1", START)
    except PayloadError:
        assert usual is None
        raise
    assert usual in (None, with_genuine_fingerprints(taken))
    return taken


def fields(document: Any) -> list[str]:
    with pytest.raises(PayloadError) as caught:
        read(document)
    assert caught.value.field == caught.value.problems[0][0]
    return [field for field, _ in caught.value.problems]


def test_an_alertmanager_payload_becomes_a_delivery() -> None:
    """Every member that counts is taken over, times in UTC and cut to microseconds."""
    document = payload(alert(startsAt="2026-01-31T13:59:00.123456789+02:00"), truncatedAlerts=3)
    taken = read(document)
    assert usual_payload.read(json.dumps(document).encode(), "d-1", START) == taken
    assert (taken.id, taken.received_at, taken.receiver, taken.truncated) == ("d-1", START, "trainmedic", 3)
    (only,) = taken.alerts
    assert only.starts_at == datetime(2026, 1, 31, 11, 59, 0, 123456, tzinfo=UTC)
    assert only.status is AlertStatus.FIRING
    assert only.labels == {"alertname": "GPUHot", "node": "node-1"}
    assert only.fingerprint == "c6eadffa33fcdf37"
    assert only.ends_at is None


@pytest.mark.parametrize(
    "body",
    [
        b'{"version": "4", "alerts": [], "x": "\xff"}',
        b'{"version": "4", "alerts": [], "receiver": "\xff"}',
        b'{"version": "4", "alerts": [], "receiver": "\\u0000"}',
        b'{"version": "4", "alerts": [], "receiver": "\\ud83d"}',
        b'{"version": "4", "alerts": [], "receiver": "' + b"x" * 65_536 + b'"}',
        b'{"version": "4", "alerts": ' + b"[" * 30_000 + b"]" * 30_000 + b"}",
        b'{"version": "4", "alerts": [], "x": ' + b"[" * 30_000 + b"]" * 30_000 + b"}",
        b"",
        b"[]",
    ],
)
def test_the_fast_parser_leaves_unusual_bodies_to_the_careful_one(body: bytes) -> None:
    """It reads them as none, and raises nothing."""
    assert usual_payload.read(body, "d-1", START) is None


def test_a_forged_fingerprint_of_a_stand_in_is_computed_again() -> None:
    """By the careful parser; the fast one takes only fingerprints in Alertmanager's form."""
    document = payload(alert(fingerprint="by-hand-1"))
    assert usual_payload.read(json.dumps(document).encode(), "d-1", START) is None
    (taken,) = with_genuine_fingerprints(read(document)).alerts
    assert taken.fingerprint == fingerprint(taken.labels)


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
        *((payload(alert(annotations=wrong)), ["alerts.0.annotations"]) for wrong in ([], "", 0, False)),
        *((payload(alerts=wrong), ["alerts"]) for wrong in ({}, "", 0, False, None)),
        (payload(alert(labels={f"l{number}": "x" * 60_000 for number in range(3)})), ["alerts.0.labels"]),
        (payload(alert(labels={"a": "x\0y"})), ["alerts.0.labels.a"]),
        (payload(alert(labels={"a\0": "x"})), ["alerts.0.labels.a\ufffd"]),
        (payload(alert(labels={"a": "x" * 65_537})), ["alerts.0.labels.a"]),
        (payload(alert(labels={str(n): "" for n in range(1_001)})), ["alerts.0.labels"]),
        (payload(alert(labels={"a": "x\ud83d"})), ["alerts.0.labels.a"]),
        (payload(alert(status="x", startsAt="y")), ["alerts.0.status", "alerts.0.startsAt"]),
    ],
)
def test_what_is_wrong_is_named_by_its_path(document: Any, expected: list[str]) -> None:
    """Each problem names the member; the first is also the error's field."""
    assert fields(document) == expected


def test_all_problems_are_told_up_to_a_limit() -> None:
    """A hostile body costs neither memory nor time for its millions of problems."""
    assert fields(payload(alert(status=None), alert(startsAt=5))) == ["alerts.0.status", "alerts.1.startsAt"]
    assert len(fields(payload(alerts=[{}] * 100_000))) == PROBLEMS_REPORTED


def test_grafanas_own_webhook_is_told_what_to_do() -> None:
    """Its version "1" is not what this server speaks; the message says how to get there."""
    with pytest.raises(PayloadError, match="send it to /events/grafana"):
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
def test_the_documented_schema_takes_what_the_webhook_takes_whole(document: dict[str, Any]) -> None:
    """The OpenAPI model and the parser are two writings of one contract (NUL is said in words only).

    What the webhook takes in part, without rejected alerts and ignored members, the model does not describe.
    """
    try:
        taken = read(document)
        is_whole = not taken.rejected and not taken.ignored
        messages = [message for each in taken.rejected for _, message in each.problems]
        messages += [message for _, message in taken.ignored]
    except PayloadError as error:
        is_whole, messages = False, [message for _, message in error.problems]
    if any("NUL" in message for message in messages):
        return
    try:
        AlertmanagerPayload.model_validate(document, strict=False)
        documented = True
    except ValidationError:
        documented = False
    assert is_whole == documented or _is_lax_about_times(document)


def _is_lax_about_times(document: dict[str, Any]) -> bool:
    """The model, being of Python, would also read a number as a time; JSON Schema would not."""
    return any(3 in (entry.get("startsAt"), entry.get("endsAt")) for entry in document["alerts"])


def test_the_documented_example_is_taken() -> None:
    """The example of the OpenAPI document is a payload that works."""
    assert read(PAYLOAD_EXAMPLE).alerts[0].labels["gpu"] == "3"


@pytest.mark.parametrize("length", [65_537, 70_000, 300_000])
def test_an_annotation_that_is_too_long_is_cut_and_says_how_long_it_was(length: int) -> None:
    """Its alert and the others are taken; the short annotations stay whole."""
    runbook = "https://runbooks.example.org/hot"
    taken = read(payload(alert(annotations={"log": "é" * length, "runbook": runbook}), alert(status="resolved")))
    assert (len(taken.alerts), taken.rejected, taken.ignored) == (2, (), ())
    annotations = taken.alerts[0].annotations
    assert annotations["runbook"] == runbook
    assert len(annotations["log"]) == 65_536
    assert annotations["log"].endswith(f"é… [cut: {length:,} characters]")


def test_annotations_that_are_too_long_together_lose_of_the_longest_first() -> None:
    """Within the limit of all of them, and the same texts in another order are cut the same."""
    texts = {"a": "a" * 60_000, "b": "b" * 61_000, "c": "c" * 62_000, "short": "s" * 900}
    (one,) = read(payload(alert(annotations=texts))).alerts
    (other,) = read(payload(alert(annotations=dict(reversed(texts.items()))))).alerts
    assert one.annotations == other.annotations
    assert one.annotations["short"] == "s" * 900
    assert 131_000 < sum(len(name) + len(text) for name, text in one.annotations.items()) <= 131_072
    assert {name: len(text) for name, text in one.annotations.items()} == {
        "a": 43_388, "b": 43_388, "c": 43_388, "short": 900,
    }  # fmt: skip
    assert all("[cut: 6" in one.annotations[name] for name in "abc")


def test_of_very_many_annotations_the_first_are_kept_and_the_others_counted() -> None:
    """The count stands in an annotation of its own."""
    (taken,) = read(payload(alert(annotations={f"n{number}": "text" for number in range(1_500)}))).alerts
    assert len(taken.annotations) == 1_000
    assert taken.annotations["n998"] == "text"
    assert taken.annotations["trainmedic_cut"] == "[cut: only 999 of 1,500 annotations are kept]"


def test_annotations_lose_what_no_database_stores() -> None:
    """A line of a log can hold NUL; a sender other than Alertmanager half a surrogate pair."""
    (taken,) = read(payload(alert(annotations={"line\0": "a\0b\ud83dc"}))).alerts
    assert taken.annotations == {"line\ufffd": "a\ufffdb\ufffdc"}


@settings(max_examples=200, deadline=None)
@given(
    st.lists(st.tuples(st.integers(1, 90_000), st.integers(0, 200_000)), max_size=12),
    st.sampled_from([0, 3, 990, 2_000]),
)
def test_whatever_annotations_there_are_the_limits_hold(lengths: list[tuple[int, int]], tiny: int) -> None:
    """Of number, of each text, and of all together; and each text begins as it did."""
    texts = {f"{index}".ljust(name, "n"): "v" * value for index, (name, value) in enumerate(lengths)}
    texts |= {f"tiny{number}": "t" for number in range(tiny)}
    (taken,) = read(payload(alert(annotations=texts))).alerts
    assert len(taken.annotations) == min(len(texts), 1_000)
    assert sum(len(name) + len(text) for name, text in taken.annotations.items()) <= 131_072
    assert max((len(text) for text in taken.annotations.values()), default=0) <= 65_536
    if sum(len(name) + len(text) for name, text in texts.items()) <= 65_536 and len(texts) <= 1_000:
        assert taken.annotations == texts


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"labels": {"alertname": "Odd", "gpu": 3}}, "alerts.1.labels.gpu: must be a string"),
        ({"labels": None}, "alerts.1.labels: is missing"),
        ({"labels": {"alertname": "Odd", "path": "p" * 70_000}}, "alerts.1.labels.path: has 70000 characters"),
        ({"labels": {f"n{number}": "x" for number in range(1_200)}}, "alerts.1.labels: has 1200 members"),
        ({"status": "suppressed"}, 'alerts.1.status: must be "firing" or "resolved"'),
        ({"startsAt": "noon"}, "alerts.1.startsAt: must be an RFC 3339 time"),
        ({"annotations": {"values": [1]}}, "alerts.1.annotations.values: must be a string"),
        ({"annotations": "text"}, "alerts.1.annotations: must be an object"),
    ],
)
def test_a_malformed_alert_does_not_refuse_the_others(changes: dict[str, Any], problem: str) -> None:
    """It is rejected with its place and its reason; those before and after it are taken."""
    taken = read(payload(alert(), alert(**changes), alert(labels={"alertname": "Last"})))
    assert [each.name for each in taken.alerts] == ["GPUHot", "Last"]
    (rejected,) = taken.rejected
    assert rejected.index == 1
    assert rejected.reason.startswith(problem)
    assert rejected.name == ("" if not isinstance(labels := changes.get("labels", {"alertname": "GPUHot"}), dict)
                             else labels.get("alertname", ""))  # fmt: skip


def test_a_malformed_alert_that_is_no_object_has_neither_name_nor_identity() -> None:
    """There is nothing to read in it."""
    (rejected,) = read(payload(alert(), alerts=[alert(), 7])).rejected
    assert (rejected.name, rejected.identity, rejected.status, rejected.is_end) == ("", None, None, False)


@pytest.mark.parametrize("changes", [{"labels": {"gpu": 3}}, {"annotations": []}, {"labels": {"p": "x" * 65_537}}])
def test_the_end_of_an_alert_is_read_from_a_malformed_report(changes: dict[str, Any]) -> None:
    """By Alertmanager's fingerprint and the beginning; it is taken also where it is alone."""
    (rejected,) = read(payload(alert(status="resolved", fingerprint="0123456789abcdef", **changes))).rejected
    assert rejected.is_end
    assert rejected.identity is not None
    assert rejected.identity.fingerprint == "0123456789abcdef"
    assert rejected.identity.starts_at == datetime(2026, 1, 31, 11, 59, 0, 123456, tzinfo=UTC)


def test_without_a_fingerprint_sound_labels_give_the_identity_of_a_malformed_report() -> None:
    """Malformed labels give none."""
    sound = read(payload(alert(), alert(annotations=[], fingerprint=...))).rejected[0]
    assert sound.identity is not None
    assert sound.identity.fingerprint == fingerprint({"alertname": "GPUHot", "node": "node-1"})
    assert read(payload(alert(), alert(labels={"a": 1}, fingerprint=...))).rejected[0].identity is None


@pytest.mark.parametrize(
    ("document", "field"),
    [
        *((payload(status=wrong), "status") for wrong in ("odd", {}, [], "", 0, False)),
        *((payload(receiver=wrong), "receiver") for wrong in (5, {}, [], False, "r" * 65_537, "r\0")),
        *((payload(groupKey=wrong), "groupKey") for wrong in (5, {}, "g" * 90_000)),
        *((payload(externalURL=wrong), "externalURL") for wrong in (5, {}, "u" * 90_000)),
        *((payload(truncatedAlerts=wrong), "truncatedAlerts") for wrong in (-1, True, 1 << 40, {}, [], "", False, 0.0)),
        *((payload(alert(endsAt=wrong)), "alerts.0.endsAt") for wrong in ("later", {}, [], 0, 0.0, False, {"a": 1})),
        *((payload(alert(fingerprint=wrong)), "alerts.0.fingerprint") for wrong in ({}, [], 0, False, "f" * 129)),
        *((payload(alert(generatorURL=wrong)), "alerts.0.generatorURL") for wrong in ({}, 0, False, "u" * 65_537)),
    ],
)
def test_a_malformed_member_that_nothing_depends_on_counts_as_absent(document: Any, field: str) -> None:
    """It is named as ignored; every alert is taken."""
    taken = read(document)
    assert (len(taken.alerts), taken.rejected, [path for path, _ in taken.ignored]) == (1, (), [field])
    alert_taken = taken.alerts[0]
    assert (taken.truncated, alert_taken.ends_at) == (0, None)
    if field.endswith("fingerprint"):
        assert alert_taken.fingerprint == fingerprint(alert_taken.labels)


def test_the_work_for_malformed_alerts_is_bounded() -> None:
    """No real delivery has so many. Below the bound each is recorded, with few words."""
    refused = fields(payload(alerts=[alert(), *[{}] * 10_001]))
    assert (refused[0], refused[-1], len(refused)) == ("alerts.1.status", "alerts", PROBLEMS_REPORTED)
    taken = read(payload(alerts=[*[{}] * 10_000, alert()]))
    assert (len(taken.rejected), len(taken.alerts)) == (10_000, 1)
    (many,) = read(payload(alert(), alert(labels={f"l{number}": number for number in range(900)}))).rejected
    assert len(many.problems) == PROBLEMS_REPORTED
    assert many.reason.count(";") == 5
    assert many.reason.endswith("and 15 more")
