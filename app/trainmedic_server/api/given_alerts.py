"""Parser of alerts in any common form.

These are a webhook's body or one alert of it; Alertmanager's ``GET /api/v2/alerts`` (also ``amtool alert query -o
json``); Prometheus's ``GET /api/v1/alerts``; items of ``GET /alerts``; runs of the history, whose alerts count as
firing, as at their decision; a time of a schedule; an event's labels.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from datetime import UTC, datetime
from typing import Any

from trainmedic_server.api import payload
from trainmedic_server.domain import beginnings
from trainmedic_server.domain.alert import Alert
from trainmedic_server.errors import PayloadError

MOST = 1000  # alerts

_START_KEYS = ("startsAt", "starts_at", "activeAt", "timestamp")
_MEMBERS = ("annotations", "generatorURL", "fingerprint")
_KEPT_BACK_BY = {
    "silencedBy": "silenced by",
    "inhibitedBy": "inhibited by",
    "mutedBy": "muted by the time interval",
}
_UNKNOWN = (
    "this is no known form of alerts: neither a webhook's body, nor a list from Alertmanager's API or amtool, nor a "
    "run of the history, nor an alert with 'labels'"
)


def read(document: Any, now: datetime) -> tuple[Alert, ...]:
    """Return the alerts in parsed JSON, by default firing since `now`. Raises PayloadError."""
    if isinstance(document, dict) and document.get("version") == payload.VERSION and "alerts" in document:
        return _alerts_of(document, now)
    if (stand_in := _stand_in(document, now)) is not None:
        return (stand_in,)
    entries = [_as_of_webhook(entry, now) for entry in _entries(document)]
    if not entries:
        raise PayloadError("it contains no alert" if document in ([], {}) else _UNKNOWN)
    if len(entries) > MOST:
        raise PayloadError(f"it contains {len(entries)} alerts; at most {MOST} are explained at once")
    return _alerts_of({"version": payload.VERSION, "alerts": entries}, now)


def _stand_in(document: Any, now: datetime) -> Alert | None:
    """Return the alert of ``{"schedule": PLAYBOOK}`` or ``{"event": NAME, "labels": {…}}``, None for other forms."""
    if isinstance(document, dict) and set(document) == {"event", "labels"} and isinstance(document["event"], str):
        labels = document["labels"]
        if isinstance(labels, dict):
            labels = payload.checked_labels({**labels, beginnings.EVENT_LABEL: document["event"]})
            return beginnings.of_event(document["event"], labels, None, b"", now)
    if isinstance(document, dict) and set(document) == {"schedule"} and isinstance(document["schedule"], str):
        return beginnings.of_schedule(document["schedule"], now)
    return None


def _alerts_of(document: Any, now: datetime) -> tuple[Alert, ...]:
    delivery = payload.delivery(document, "explained", now)
    if delivery.rejected:
        raise PayloadError.at([problem for each in delivery.rejected for problem in each.problems])
    return delivery.alerts


def kept_back(document: Any) -> tuple[str, ...]:
    """Return, for each alert of `read`, why Alertmanager does not send it; "" or missing if it does or if unknown."""
    is_delivery = isinstance(document, dict) and document.get("version") == payload.VERSION and "alerts" in document
    if is_delivery or _stand_in(document, datetime.now(UTC)) is not None:
        return ()
    return tuple(map(_kept_back, _entries(document)))


def _kept_back(entry: Any) -> str:
    if isinstance(entry, Mapping) and entry.get("state") == "pending":  # of Prometheus's API
        return "pending in Prometheus"
    status = entry.get("status") if isinstance(entry, Mapping) else None
    if not isinstance(status, Mapping):
        return ""
    by = [
        f"{words} {', '.join(map(str, status[name]))}"
        for name, words in _KEPT_BACK_BY.items()
        if isinstance(status.get(name), list) and status[name]
    ]
    return " and ".join(by)


def _entries(document: Any) -> Iterator[Any]:
    if isinstance(document, list):
        for entry in document:
            yield from _entries(entry) if _holds_others(entry) else (entry,)
        return
    if not isinstance(document, Mapping):
        raise PayloadError(_UNKNOWN)
    if isinstance(document.get("data"), Mapping):  # Prometheus's API
        document = document["data"]
    for name in ("alerts", "items"):
        if isinstance(document.get(name), list):
            is_run = "run_id" in document
            for entry in document[name]:
                # A run's alerts may have resolved after the decision, which was made while they fired.
                yield {**entry, "status": "firing"} if is_run and isinstance(entry, Mapping) else entry
            return
    if "labels" not in document and "alert_labels" not in document:
        raise PayloadError(_UNKNOWN)
    yield document


def _holds_others(entry: Any) -> bool:
    return isinstance(entry, Mapping) and isinstance(entry.get("alerts"), list)


def _as_of_webhook(entry: Any, now: datetime) -> Any:
    if not isinstance(entry, Mapping):
        return entry
    is_item = "alert_labels" in entry  # a run of the history
    starts_at = next((entry[name] for name in _START_KEYS if entry.get(name) is not None), now.isoformat())
    return {
        # Apply the active alert map to what Alertmanager sent, not to an earlier map's result.
        "labels": entry.get("original_labels") or (entry["alert_labels"] if is_item else entry.get("labels")),
        "status": "firing" if is_item else _status(entry, now),
        "startsAt": starts_at,
        "endsAt": entry.get("endsAt", entry.get("ends_at")),
        **{name: entry[name] for name in _MEMBERS if name in entry},
    }


def _status(entry: Mapping[str, Any], now: datetime) -> Any:
    """An alert is resolved once its end is past, as in Alertmanager's API."""
    status = entry.get("status")
    if isinstance(status, str):
        return status
    ends_at = entry.get("endsAt")
    if isinstance(status, Mapping) and isinstance(ends_at, str):
        return "resolved" if _is_past(ends_at, now) else "firing"
    return "firing" if status is None or isinstance(status, Mapping) else status


def _is_past(text: str, now: datetime) -> bool:
    try:
        moment = datetime.fromisoformat(text.upper())
    except ValueError:
        return False
    # Alertmanager writes the year 1 for an alert that has not ended.
    return moment.year > 1 and moment.replace(tzinfo=moment.tzinfo or UTC) <= now
