"""Stand-in alerts for runs that a schedule, another run's end, or an event starts.

Fingerprint and start make each beginning happen once, over restarts and takeovers.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from datetime import datetime, timedelta
from typing import Any

from msgspec.structs import replace

from trainmedic_core.target import NO_PARTS, Target
from trainmedic_server.domain.alert import ENDED_RUN, EVENT, SCHEDULE, SENT_AS_EVENT, Alert, AlertStatus
from trainmedic_server.domain.run import Decision, Run

REPEATED_WITHIN = timedelta(hours=1)
"""Time within which an equal event without a key counts as a repeat."""
MOST_CHAINED = 5  # maximum length of a chain of runs that start each other
EVENT_LABEL = "event"

_BY_BODY = f"{EVENT}body-"
_ENDED, _NOT_STARTED = "ended_run", "not_started"  # annotations, as JSON


def schedule_name(playbook: str) -> str:
    return f"schedule:{playbook}"


def run_name(playbook: str) -> str:
    return f"run:{playbook}"


def event_name(event: str) -> str:
    return f"event:{event}"


def phrase(alertname: str) -> str:  # sentence for people, without full stop
    kind, _, name = alertname.partition(":")
    match kind if name else "":
        case "schedule":
            return f"The schedule of {name} came due"
        case "run":
            return f"A run of {name} ended"
        case "event":
            return f"The event {name} came"
    return f"{alertname or 'An alert'} fired"


def of_schedule(playbook: str, at: datetime, missed: str = "") -> Alert:
    """Return the stand-in for one time of a schedule. `missed`: why it starts nothing."""
    labels = {"alertname": schedule_name(playbook)}
    return _stand_in(f"{SCHEDULE}{playbook}", labels, at, refused=(Decision.STALE, missed) if missed else None)


def of_ended_run(run: Run, cause: Alert | None) -> Alert:
    """Return the stand-in for a closed run's end. `cause`: the alert that began that run."""
    assert run.ended_at is not None
    target = run.target
    labels = {**run.alert_labels, **labels_of(target), "alertname": run_name(run.playbook)}
    length = 1 + (int(ended_run_of(cause).get("chained", 0)) if cause is not None else 0)
    ended = {
        "id": run.id,
        "playbook": run.playbook,
        "status": str(run.status),
        "message": run.message,
        "alert": run.alert_name,
        "target": run.target_key,
        **(target.parts if target else NO_PARTS),
        "chained": length,
    }
    why = f"a chain has at most {MOST_CHAINED} runs, each started by the end of the one before it"
    refused = (Decision.RATE_LIMITED, why) if length >= MOST_CHAINED else None
    return _stand_in(f"{ENDED_RUN}{run.id}", labels, run.ended_at, {_ENDED: json.dumps(ended)}, refused)


def labels_of(target: Target | None) -> dict[str, str]:
    """Return the labels by which a stand-in names its target."""
    named = {} if target is None else {"job_name": target.job, "node": target.node, "gpu": target.gpu}
    return {name: value for name, value in named.items() if value}


def of_event(event: str, labels: Mapping[str, str], key: str | None, body: bytes, now: datetime) -> Alert:
    """Return the stand-in for an event, identified by `key` or for `REPEATED_WITHIN` by the digest of the body."""
    prefix, identity = (f"{EVENT}key-", key.encode(errors="surrogatepass")) if key is not None else (_BY_BODY, body)
    digest = hashlib.sha256(event.encode() + b"\0" + identity).hexdigest()[:32]
    named = {**labels, EVENT_LABEL: event, "alertname": event_name(event)}
    return _stand_in(f"{prefix}{digest}", named, now)


def sent_by_event(event: str, alert: Alert) -> Alert:  # an alert in Alertmanager's form that the event contains
    return replace(alert, annotations={**alert.annotations, SENT_AS_EVENT: event})


def _stand_in(
    fingerprint: str,
    labels: Mapping[str, str],
    at: datetime,
    annotations: Mapping[str, str] = {},
    refused: tuple[Decision, str] | None = None,
) -> Alert:
    notes = {**annotations, _NOT_STARTED: json.dumps(refused)} if refused is not None else annotations
    return Alert(fingerprint, AlertStatus.FIRING, labels, notes, at)


def is_repeated(earlier: Alert, alert: Alert) -> bool:
    """Return whether an event's alert with the fingerprint of an `earlier` one starts nothing new."""
    return not alert.fingerprint.startswith(_BY_BODY) or alert.starts_at - earlier.starts_at < REPEATED_WITHIN


def refusal_of(alert: Alert) -> tuple[Decision, str] | None:
    """Return why the beginning starts nothing; None if it may."""
    text = alert.annotations.get(_NOT_STARTED)
    if not text or not alert.is_stand_in:
        return None
    decision, why = json.loads(text)
    return Decision(decision), why


def ended_run_of(alert: Alert) -> dict[str, Any]:
    """Return the run whose end the alert stands for; empty for other alerts."""
    is_end = alert.fingerprint.startswith(ENDED_RUN)  # other alerts may have an annotation of this name
    text = alert.annotations.get(_ENDED) if is_end else None
    ended: dict[str, Any] = json.loads(text) if text else {}
    return ended
