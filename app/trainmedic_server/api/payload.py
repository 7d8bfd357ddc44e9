"""Parser of a webhook's JSON (Alertmanager's version "4") into a `Delivery`.

It is hand-written, to bound the reported problems and the work for a hostile body. `usual_payload` reads most bodies
faster. `schemas.AlertmanagerPayload` documents the same contract; a test compares all three. Alertmanager never retries
a 4xx, so a malformed alert becomes a `RejectedAlert` and does not refuse its group.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from datetime import UTC, datetime
from itertools import chain
from typing import Any

from msgspec.structs import replace

from trainmedic_core.fingerprint import fingerprint
from trainmedic_server.api import cut_texts
from trainmedic_server.api.cut_texts import TEXT_LENGTH, TOTAL_LENGTH
from trainmedic_server.domain.alert import Alert, AlertStatus, Delivery, Identity, RejectedAlert
from trainmedic_server.errors import PayloadError

VERSION = "4"
LABELS_PER_ALERT = 1_000
FINGERPRINT_LENGTH = 128  # characters
PROBLEMS_REPORTED = 20  # of a delivery
MOST_REJECTED = 10_000  # more malformed alerts refuse the delivery

_NAME_LENGTH = 200  # characters of a rejected alert's name
_STATUSES = {status.value: status for status in AlertStatus}
_LABELS_LENGTH = min(TEXT_LENGTH, TOTAL_LENGTH)  # up to which neither limit can be exceeded
_TIME = re.compile(r"\d{4}-\d\d-\d\d[Tt]\d\d:\d\d:\d\d(\.\d+)?([Zz]|[+-]\d\d:\d\d)")
_MISSING: Any = object()  # marks an absent member, unlike null


def delivery(document: Any, delivery_id: str, received_at: datetime) -> Delivery:
    """Return the delivery in parsed JSON. All but ``version``, ``alerts``, and an alert's ``status``, ``labels`` and
    ``startsAt`` may be absent or null. A missing ``fingerprint`` is computed as in Alertmanager.

    Raises PayloadError with up to 20 problems: not version "4", no list ``alerts``, only malformed alerts, none of
    which is an end, or too many malformed ones.
    """
    if not isinstance(document, dict):
        raise PayloadError.at([("", "the body must be a JSON object")])
    problems = _Problems()
    _version(document.get("version", _MISSING), problems)
    entries = document.get("alerts", _MISSING)
    if type(entries) is not list:
        problems.add("alerts", "is missing" if entries is _MISSING else "must be a list")
    problems.raise_any()
    ignored = _Problems()
    alerts, rejected = _alerts(entries, ignored)
    _status(document.get("status"), "status", ignored, required=False)
    return Delivery(
        delivery_id,
        received_at,
        _text(document.get("receiver"), "receiver", ignored),
        _text(document.get("groupKey"), "groupKey", ignored),
        _text(document.get("externalURL"), "externalURL", ignored),
        tuple(alerts),
        _count(document.get("truncatedAlerts"), "truncatedAlerts", ignored),
        tuple(rejected),
        tuple(ignored),
    )


def with_genuine_fingerprints(delivery: Delivery) -> Delivery:
    """Replace fingerprints by which alerts could pass for stand-ins."""
    if not any(alert.is_stand_in for alert in delivery.alerts):
        return delivery
    alerts = (
        replace(alert, fingerprint=fingerprint(alert.labels)) if alert.is_stand_in else alert
        for alert in delivery.alerts
    )
    return replace(delivery, alerts=tuple(alerts))


def time_of(text: str) -> datetime:
    """Return an RFC 3339 time in UTC, cut to microseconds. Raises ValueError or OverflowError for other texts."""
    if not _TIME.fullmatch(text):
        raise ValueError(text)
    return datetime.fromisoformat(text.upper()).astimezone(UTC)


def checked_labels(labels: Mapping[str, str]) -> dict[str, str]:
    """Raise PayloadError if an event's labels exceed an alert's limits."""
    problems = _Problems()
    sound = _labels(dict(labels), "labels", problems)
    problems.raise_any()
    assert sound is not None
    return sound


class _Problems(list[tuple[str, str]]):
    """Pairs of field and message. Surplus ones are ignored."""

    def add(self, field: str, message: str) -> None:
        if len(self) < PROBLEMS_REPORTED:
            self.append((cut_texts.storable(field), message))

    def raise_any(self) -> None:
        if self:
            raise PayloadError.at(self)


def _alerts(entries: list[Any], ignored: _Problems) -> tuple[list[Alert], list[RejectedAlert]]:
    """Return the sound and the malformed alerts. Raises PayloadError if none can be used."""
    alerts: list[Alert] = []
    rejected: list[RejectedAlert] = []
    problems = _Problems()
    for index, entry in enumerate(entries):
        alert = _alert(entry, f"alerts.{index}", problems, ignored)
        if alert is not None:
            alerts.append(alert)
            continue
        rejected.append(_rejected(entry, index, tuple(problems)))
        problems = _Problems()
        if len(rejected) > MOST_REJECTED:
            too_many = ("alerts", f"has more than {MOST_REJECTED} malformed members")
            raise PayloadError.at([*_first_problems(rejected)[: PROBLEMS_REPORTED - 1], too_many])
    if rejected and not alerts and not any(each.is_end for each in rejected):
        raise PayloadError.at(_first_problems(rejected))
    return alerts, rejected


def _first_problems(rejected: list[RejectedAlert]) -> list[tuple[str, str]]:
    problems = (problem for each in rejected for problem in each.problems)
    return [problem for problem, _ in zip(problems, range(PROBLEMS_REPORTED), strict=False)]


def _rejected(entry: Any, index: int, problems: tuple[tuple[str, str], ...]) -> RejectedAlert:
    if type(entry) is not dict:
        return RejectedAlert(index, "", problems)
    unread = _Problems()
    status = _status(entry.get("status"), "", unread, required=True)
    starts_at = _time(entry.get("startsAt"), "", unread, required=True)
    labels = entry.get("labels")
    name = labels.get("alertname") if type(labels) is dict else None
    shown = cut_texts.cut(cut_texts.storable(name), _NAME_LENGTH) if type(name) is str else ""
    # Compute nothing from malformed labels: no alert with these labels was ever accepted.
    own = _text(entry.get("fingerprint"), "", unread, FINGERPRINT_LENGTH)
    if not own and (sound := _labels(labels, "", unread)) is not None:
        own = fingerprint(sound)
    identity = Identity(own, starts_at) if own and starts_at is not None else None
    return RejectedAlert(index, shown, problems, identity, status)


def _version(value: Any, problems: _Problems) -> None:
    if value is _MISSING:
        problems.add("version", 'is missing; it must be "4", Alertmanager\'s webhook payload')
    elif value == "1":
        problems.add(
            "version", 'is "1", as Grafana\'s own webhook sends; send it to /events/grafana, with --alert-map grafana'
        )
    elif value != VERSION:
        problems.add("version", 'must be "4", Alertmanager\'s webhook payload')


def _alert(entry: Any, path: str, problems: _Problems, ignored: _Problems) -> Alert | None:
    """Return None for a malformed alert. Problems of optional members go to `ignored`."""
    if type(entry) is not dict:
        problems.add(path, "must be an object")
        return None
    status = _status(entry.get("status"), f"{path}.status", problems, required=True)
    labels = _labels(entry.get("labels"), f"{path}.labels", problems)
    annotations = _annotations(entry.get("annotations"), f"{path}.annotations", problems)
    starts_at = _time(entry.get("startsAt"), f"{path}.startsAt", problems, required=True)
    if status is None or labels is None or annotations is None or starts_at is None:
        return None
    ended = entry.get("endsAt")
    ends_at = _time(None if ended == "" else ended, f"{path}.endsAt", ignored, required=False)
    generator_url = _text(entry.get("generatorURL"), f"{path}.generatorURL", ignored)
    own_fingerprint = _text(entry.get("fingerprint"), f"{path}.fingerprint", ignored, FINGERPRINT_LENGTH)
    if status is AlertStatus.FIRING or (ends_at is not None and ends_at.year == 1):
        ends_at = None
    return Alert(own_fingerprint or fingerprint(labels), status, labels, annotations, starts_at, ends_at, generator_url)


def _status(value: Any, path: str, problems: _Problems, *, required: bool) -> AlertStatus | None:
    status = _STATUSES.get(value) if type(value) is str else None
    if status is None and (required or value is not None):
        problems.add(path, "is missing" if value is None else 'must be "firing" or "resolved"')
    return status


def _labels(value: Any, path: str, problems: _Problems) -> dict[str, str] | None:
    if type(value) is not dict:
        problems.add(path, "is missing" if value is None else "must be an object")
        return None
    if len(value) > LABELS_PER_ALERT:
        problems.add(path, f"has {len(value)} members; at most {LABELS_PER_ALERT} are accepted")
        return None
    if set(map(type, value.values())) <= {str}:
        joined = "".join(chain.from_iterable(value.items()))
        if len(joined) <= _LABELS_LENGTH and not cut_texts.has_unstorable(joined):
            return value  # nearly always: the rest only finds the fault
    sound = True
    for name, text in value.items():
        wrong = _problem_of(text) or _problem_of(name)
        if wrong:
            sound = False
            problems.add(f"{path}.{name[:64]}", wrong)
    if not sound:
        return None
    length = sum(map(len, value)) + sum(map(len, value.values()))
    if length > TOTAL_LENGTH:
        problems.add(path, f"has {length} characters in total; at most {TOTAL_LENGTH} are accepted")
        return None
    return value


def _annotations(value: Any, path: str, problems: _Problems) -> Mapping[str, str] | None:
    """Return the annotations, truncated if too long, None if they are not texts."""
    if value is None:
        return {}
    if type(value) is not dict:
        problems.add(path, "must be an object")
        return None
    texts = cut_texts.first_texts(value)
    sound = True
    for name, text in texts.items():
        if type(text) is not str:
            sound = False
            problems.add(f"{path}.{name[:64]}", "must be a string")
    return cut_texts.fitted(texts) if sound else None


def _text(value: Any, path: str, ignored: _Problems, longest: int = TEXT_LENGTH) -> str:
    if type(value) is str and len(value) <= longest and not cut_texts.has_unstorable(value):
        return value  # nearly always: the rest only finds the fault
    wrong = _problem_of(value, longest) if value is not None else None
    if wrong:
        ignored.add(path, wrong)
    return ""


def _problem_of(value: Any, longest: int = TEXT_LENGTH) -> str | None:
    if type(value) is not str:
        return "must be a string"
    if len(value) > longest:
        return f"has {len(value)} characters; at most {longest} are accepted"
    if cut_texts.has_unstorable(value):
        kind = "a NUL character" if "\0" in value else "half a surrogate pair"
        return f"contains {kind}, which no database stores"
    return None


def _time(value: Any, path: str, problems: _Problems, *, required: bool) -> datetime | None:
    if value is None:
        if required:
            problems.add(path, "is missing")
        return None
    if type(value) is str:
        try:
            return time_of(value)
        except (ValueError, OverflowError):
            pass
    problems.add(path, 'must be an RFC 3339 time, such as "2026-01-31T12:00:00Z"')
    return None


def _count(value: Any, path: str, problems: _Problems) -> int:
    if value is None:
        return 0
    if type(value) is not int or not 0 <= value < 1 << 31:
        problems.add(path, "must be a whole number from 0 to 2147483647")
        return 0
    return value
