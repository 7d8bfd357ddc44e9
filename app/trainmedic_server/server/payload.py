"""Makes a `Delivery` of a webhook's JSON: checks everything, and reports every problem up to a bound.

The contract is Alertmanager's payload version "4". Members that Trainmedic has no use for are not looked
at. The checks are written by hand rather than as a model because the number of reported problems, and the
work done for a hostile body, must be bounded; `schemas.AlertmanagerPayload` documents the same contract and
a test holds the two together.

Who calls it: the webhook, and commands that read an alert from a file.
"""

from __future__ import annotations

import re
from datetime import UTC, datetime
from typing import Any

from trainmedic_server.domain.alert import Alert, AlertStatus, Delivery, fingerprint
from trainmedic_server.errors import PayloadError

VERSION = "4"
LABELS_PER_ALERT = 1_000
TEXT_LENGTH = 65_536
MAPPING_LENGTH = 131_072
"""Characters of all names and values of an alert's labels, and of its annotations."""
FINGERPRINT_LENGTH = 128
PROBLEMS_REPORTED = 20

_STATUSES = {status.value: status for status in AlertStatus}
_TIME = re.compile(r"\d{4}-\d\d-\d\d[Tt]\d\d:\d\d:\d\d(\.\d+)?([Zz]|[+-]\d\d:\d\d)")
_MISSING: Any = object()


def delivery(document: Any, delivery_id: str, received_at: datetime) -> Delivery:
    """The delivery that `document`, parsed JSON, holds. Raises PayloadError with every problem, up to 20.

    Tolerated, because senders differ: absent or null ``annotations``, ``endsAt``, ``generatorURL``,
    ``fingerprint`` (then computed from the labels as Alertmanager does), ``truncatedAlerts``,
    ``receiver``, ``groupKey``, ``externalURL`` and ``status`` of the whole.
    """
    if not isinstance(document, dict):
        raise PayloadError.at([("", "the body must be a JSON object")])
    problems = _Problems()
    _version(document.get("version", _MISSING), problems)
    _status(document.get("status"), "status", problems, required=False)
    entries = document.get("alerts", _MISSING)
    alerts: list[Alert] = []
    if type(entries) is list:
        for index, entry in enumerate(entries):
            alert = _alert(entry, f"alerts.{index}", problems)
            if alert is not None:
                alerts.append(alert)
            if problems.full:
                break
    else:
        problems.add("alerts", "is missing" if entries is _MISSING else "must be a list")
    receiver = _text(document.get("receiver"), "receiver", problems)
    group_key = _text(document.get("groupKey"), "groupKey", problems)
    external_url = _text(document.get("externalURL"), "externalURL", problems)
    truncated = _count(document.get("truncatedAlerts"), "truncatedAlerts", problems)
    problems.raise_any()
    return Delivery(delivery_id, received_at, receiver, group_key, external_url, tuple(alerts), truncated)


class _Problems:
    """The problems met so far, as (field, message); no more than are reported."""

    def __init__(self) -> None:
        self._problems: list[tuple[str, str]] = []

    @property
    def full(self) -> bool:
        return len(self._problems) >= PROBLEMS_REPORTED

    def add(self, field: str, message: str) -> None:
        if not self.full:
            self._problems.append((field, message))

    def raise_any(self) -> None:
        if self._problems:
            raise PayloadError.at(self._problems)


def _version(value: Any, problems: _Problems) -> None:
    if value is _MISSING:
        problems.add("version", 'is missing; it must be "4", Alertmanager\'s webhook payload')
    elif value == "1":
        problems.add(
            "version", 'is "1", as Grafana\'s own webhook sends; send through an Alertmanager, which sends "4"'
        )
    elif value != VERSION:
        problems.add("version", 'must be "4", Alertmanager\'s webhook payload')


def _alert(entry: Any, path: str, problems: _Problems) -> Alert | None:
    """The alert, or None where something of it is wrong."""
    if type(entry) is not dict:
        problems.add(path, "must be an object")
        return None
    status = _status(entry.get("status"), f"{path}.status", problems, required=True)
    labels = _strings(entry.get("labels"), f"{path}.labels", problems, required=True)
    annotations = _strings(entry.get("annotations"), f"{path}.annotations", problems, required=False)
    starts_at = _time(entry.get("startsAt"), f"{path}.startsAt", problems, required=True)
    ended = entry.get("endsAt")
    ends_at = _time(None if ended == "" else ended, f"{path}.endsAt", problems, required=False)
    generator_url = _text(entry.get("generatorURL"), f"{path}.generatorURL", problems)
    own_fingerprint = _text(entry.get("fingerprint"), f"{path}.fingerprint", problems, FINGERPRINT_LENGTH)
    if status is None or labels is None or annotations is None or starts_at is None:
        return None
    if status is AlertStatus.FIRING or (ends_at is not None and ends_at.year == 1):
        ends_at = None
    return Alert(own_fingerprint or fingerprint(labels), status, labels, annotations, starts_at, ends_at, generator_url)


def _status(value: Any, path: str, problems: _Problems, *, required: bool) -> AlertStatus | None:
    status = _STATUSES.get(value) if type(value) is str else None
    if status is None and (required or value is not None):
        problems.add(path, "is missing" if value is None else 'must be "firing" or "resolved"')
    return status


def _strings(value: Any, path: str, problems: _Problems, *, required: bool) -> dict[str, str] | None:
    """A mapping of text to text, as labels and annotations are."""
    if value is None and not required:
        return {}
    if type(value) is not dict:
        problems.add(path, "is missing" if value is None else "must be an object")
        return None
    if len(value) > LABELS_PER_ALERT:
        problems.add(path, f"has {len(value)} members; at most {LABELS_PER_ALERT} are taken")
        return None
    sound = True
    for name, text in value.items():
        wrong = _wrong_with(text) or _wrong_with(name)
        if wrong:
            sound = False
            problems.add(f"{path}.{name[:64]}", wrong)
    if not sound:
        return None
    length = sum(map(len, value)) + sum(map(len, value.values()))
    if length > MAPPING_LENGTH:
        problems.add(path, f"is {length} characters long in all; at most {MAPPING_LENGTH} are taken")
        return None
    return value


def _text(value: Any, path: str, problems: _Problems, longest: int = TEXT_LENGTH) -> str:
    if value is None:
        return ""
    wrong = _wrong_with(value, longest)
    if wrong:
        problems.add(path, wrong)
        return ""
    return str(value)


def _wrong_with(value: Any, longest: int = TEXT_LENGTH) -> str | None:
    if type(value) is not str:
        return "must be a string"
    if len(value) > longest:
        return f"is {len(value)} characters long; at most {longest} are taken"
    if "\0" in value:
        return "holds a NUL character, which no database takes"
    return None


def _time(value: Any, path: str, problems: _Problems, *, required: bool) -> datetime | None:
    """The time in UTC; digits past the microsecond are cut off."""
    if value is None:
        if required:
            problems.add(path, "is missing")
        return None
    if type(value) is str and _TIME.fullmatch(value):
        try:
            return datetime.fromisoformat(value.upper()).astimezone(UTC)
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
